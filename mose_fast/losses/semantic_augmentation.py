"""Cross-entropy on class means, augmented by their covariances in closed form (IL2A;
docs/specification/baselines.md section 13)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from mose_fast.ops.expert_losses import masked_cross_entropy


def class_statistics(features: Tensor, labels: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields each class in ``labels`` int64 [N] with the mean float [D] and the covariance float
    [D, D] of its ``features`` float [N, D].
    """
    for label in labels.unique().tolist():
        own = features[labels == label]
        mean = own.mean(0)
        yield label, mean, (own - mean).T @ (own - mean) / max(len(own) - 1, 1)


def semantic_augmentation(
    weight: Tensor,
    bias: Tensor,
    means: Tensor,
    covariances: Tensor,
    drawn: Tensor,
    known: Tensor,
    *,
    ratio: float,
    temperature: float,
) -> Tensor:
    """An upper bound of the expected cross-entropy at temperature 1 over features drawn around
    class means, from normal distributions with ``ratio`` times the classes' covariances.

    ``weight`` [K, D] and ``bias`` [K] are the classifier's, ``means`` float32 [K, D] and
    ``covariances`` [K, D, D] those of each class's features, ``drawn`` int64 [n] the classes k
    whose means are used, ``known`` bool [K] those of the softmax. Returns the mean over k of the
    cross-entropy of (w_j . mean_k + b_j + ratio / 2 (w_j - w_k)^T covariance_k (w_j - w_k)) /
    temperature.
    """
    apart = weight - weight[drawn][:, None]
    spread = ((apart @ covariances[drawn]) * apart).sum(2)
    logits = means[drawn] @ weight.T + bias + ratio / 2 * spread
    return masked_cross_entropy(logits / temperature, drawn, known)
