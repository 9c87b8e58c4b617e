"""The classifiers that are fitted to the replay memory's features and logits, and the predictions
of all classifiers of all experts (docs/specification/mose.md section 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.nn.class_means import ClassMeans
from mose_fast.settings.run import CLASSIFIERS

#: Classifiers that read features alone; the others read logits, too.
OF_FEATURES = ("ncm", "lda", "ridge", "residual")

#: Classifiers whose standardised scores are averaged.
AVERAGED = {"ncm_linear": ("ncm", "linear"), "lda_adjusted": ("lda", "adjusted")}

#: Classifiers that also have a row ``all``: the features of all experts, concatenated.
JOINING = (*OF_FEATURES, *AVERAGED)

#: The results' name of the mean of experts, by classifier: of squared distances, logits or scores.
MEAN_OF_EXPERTS = dict.fromkeys(CLASSIFIERS, "mean_score") | {"ncm": "mean_distance", "linear": "mean_logit"}

# Published for EARL (yonseivnl/earl, 9743a35): neighbours, and the scale of their distances.
_NEIGHBOURS, _DISTANCE = 25, 0.9

# Variances of normalised features below this are rounding.
_LEAST = 1e-14


def names_of_experts(classifier: str, experts: int, joined: bool) -> list[str]:
    """The results' names of a classifier's rows: ``1`` ..., the mean of experts and, if ``joined``,
    several experts and a classifier of :data:`JOINING`, ``all``.
    """
    own = [*(str(e + 1) for e in range(experts)), MEAN_OF_EXPERTS[classifier]]
    return [*own, "all"] if joined and experts > 1 and classifier in JOINING else own


class Affine:
    """A classifier whose scores are affine in normalised features.

    Attributes:
        weight: float64 [E, K, D].
        bias: float64 [E, K]; -inf for classes without a sample.
    """

    def __init__(self, weight: Tensor, bias: Tensor, known: Tensor) -> None:
        self.weight, self.bias = weight, bias.masked_fill(~known, -torch.inf)

    def scores(self, features: Tensor) -> Tensor:
        """Float64 [E, N, K] of ``features`` [E, N, D]."""
        return affine_scores(features, self.weight, self.bias)


def affine_scores(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Float64 [..., N, K] of ``features`` [..., N, D], which are normalised, ``weight`` [..., K, D]
    and ``bias`` [..., K]; in operations that ONNX has.
    """
    return _normalised(features) @ weight.transpose(-2, -1) + bias.unsqueeze(-2)


def _normalised(features: Tensor) -> Tensor:
    return F.normalize(features.float(), dim=-1).double()


def linear_discriminant(features: Tensor, labels: Tensor, classes: int) -> Affine:
    """Fits linear discriminant analysis with equal priors to ``features`` [E, N, D], which are
    normalised, and ``labels`` int64 [N] below ``classes``. The covariance within classes is shared
    and shrunk towards a multiple of the identity (Ledoit and Wolf, 2004).

    Scores are log posteriors up to a constant of the image. Without any variance within classes,
    they rank as the distances to the class means do.
    """
    features = _normalised(features)
    of_class = _of_class(labels, classes)
    counts = of_class.sum(1)
    means = of_class @ features / counts.clamp_min(1).unsqueeze(-1)
    residuals = features - means[:, labels]
    n, size = residuals.shape[1:]
    covariance = residuals.mT @ residuals / n
    squares = covariance.square().sum((-2, -1))
    scale = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    # How far the covariance is expected to be from the true one, relative to how far it is from a
    # multiple of the identity; the bound keeps the matrix below positive definite.
    noise = (residuals.square().sum(-1).square().mean(-1) - squares) / n
    shrinkage = (noise / (squares - size * scale.square())).nan_to_num(1.0).clamp(1e-6, 1)
    covariance *= (1 - shrinkage)[:, None, None]
    covariance.diagonal(dim1=-2, dim2=-1).add_((shrinkage * scale.clamp_min(_LEAST)).unsqueeze(-1))
    weight = _solved(covariance, means.mT).mT
    return Affine(weight, -(weight * means).sum(-1) / 2, counts > 0)


def ridge(features: Tensor, labels: Tensor, classes: int, penalty: float) -> Affine:
    """Fits ridge regression of one-hot targets with an intercept to ``features`` [E, N, D],
    normalised, and ``labels`` int64 [N] below ``classes``. All classes with a sample weigh the
    same. ``penalty`` is relative to the mean eigenvalue of the features' scatter.
    """
    features = _normalised(features)
    of_class = _of_class(labels, classes)
    counts = of_class.sum(1)
    known = counts > 0
    weights = (1 / (known.sum() * counts))[labels]
    centre, share = weights @ features, of_class @ weights
    rows = (features - centre.unsqueeze(-2)) * weights.sqrt().unsqueeze(-1)
    targets = (of_class.T - share) * weights.sqrt().unsqueeze(-1)
    scatter = rows.mT @ rows
    diagonal = scatter.diagonal(dim1=-2, dim2=-1)
    diagonal += (penalty * diagonal.mean(-1, keepdim=True)).clamp_min(_LEAST)
    weight = _solved(scatter, rows.mT @ targets).mT
    return Affine(weight, share - (weight @ centre.unsqueeze(-1)).squeeze(-1), known)


def _of_class(labels: Tensor, classes: int) -> Tensor:
    """Float64 [K, N], 1 where a sample is of a class."""
    # A product with it has the same bits each time: on a GPU, index_add_ adds in any order.
    return (labels == torch.arange(classes, device=labels.device).unsqueeze(1)).double()


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    # Unchecked, so that NaN of a network that has diverged leads to NaN, as elsewhere.
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(matrix).L)


class ResidualNeighbours:
    """Nearest class mean of features that are moved as their nearest stored features would have to
    be moved to their class means (EARL: Seo et al., CVPR 2024, whose targets are fixed vectors).
    """

    def __init__(self, features: Tensor, labels: Tensor, means: ClassMeans) -> None:
        self.means, self._stored = means, _normalised(features)
        self._residuals = means.means[:, labels].double() - self._stored

    def scores(self, features: Tensor) -> Tensor:
        """Minus squared distances of the moved ``features`` [E, N, D] to the class means, float64
        [E, N, K]; -inf for classes without a sample.
        """
        features = _normalised(features)
        distances = torch.cdist(features, self._stored)
        nearest, which = distances.topk(min(_NEIGHBOURS, distances.shape[-1]), largest=False)
        weights = torch.zeros_like(distances).scatter(-1, which, torch.softmax(-nearest / _DISTANCE, -1))
        return self.means.scores(features + weights @ self._residuals)


class Classifiers:
    """All classifiers of all experts, each fitted to the replay memory when it is first asked for.

    Args:
        features: float [E, N, D], the memory's, in evaluation mode.
        logits: float [E, N, K], likewise.
        labels: int64 [N].
        ridge_penalty: See :func:`ridge`.

    Attributes:
        means: The class means.
        known: bool [K], the classes with a sample: no other is predicted, except by ``linear``.
    """

    def __init__(self, features: Tensor, logits: Tensor, labels: Tensor, *, ridge_penalty: float) -> None:
        self._features, self._logits, self._labels, self._penalty = features, logits, labels, ridge_penalty
        self.means = ClassMeans(features, labels, logits.shape[-1])
        self.known = self.means.known
        self._fitted: dict[tuple[str, bool], ClassMeans | Affine | ResidualNeighbours] = {("ncm", False): self.means}
        self._prior: Tensor | None = None

    def scores(self, classifier: str, features: Tensor, logits: Tensor, *, joined: bool = False) -> Tensor:
        """Scores of images with ``features`` [E, N, D] and ``logits`` [E, N, K] by every expert and
        their mean: [E + 1, N, K], the largest is predicted; float64, but those of ``linear`` have
        the logits' dtype. ``joined``: [1, N, K], by the features of all experts, concatenated, and
        by the mean of logits. Raises ValueError if the memory is empty, except for ``linear``.
        """
        if classifier != "linear":
            self.means.check_filled()
        if classifier in AVERAGED:
            parts = [self.scores(part, features, logits, joined=joined) for part in AVERAGED[classifier]]
            return torch.stack([standardised(part, self.known) for part in parts]).mean(0)
        if classifier in OF_FEATURES:
            fitted = self.fitted(classifier, joined=joined)
            return fitted.scores(concatenated(features)) if joined else with_mean(fitted.scores(features))
        if classifier == "adjusted":
            logits = (logits.double() - self.log_prior().unsqueeze(1)).masked_fill(~self.known, -torch.inf)
        return logits.mean(0, keepdim=True) if joined else with_mean(logits)

    def fitted(self, classifier: str, *, joined: bool = False) -> ClassMeans | Affine | ResidualNeighbours:
        """A classifier of :data:`OF_FEATURES`, of each expert or of all experts' features."""
        if (classifier, joined) not in self._fitted:
            features = concatenated(self._features) if joined else self._features
            labels, classes = self._labels, len(self.known)
            if classifier == "ncm":
                found = ClassMeans(features, labels, classes)
            elif classifier == "lda":
                found = linear_discriminant(features, labels, classes)
            elif classifier == "ridge":
                found = ridge(features, labels, classes, self._penalty)
            else:
                found = ResidualNeighbours(features, labels, self.fitted("ncm", joined=joined))
            self._fitted[classifier, joined] = found
        return self._fitted[classifier, joined]

    def log_prior(self) -> Tensor:
        """The prior that each expert's head has: the log of its mean probability of each class on
        the memory's samples, all classes with a sample weighing the same. Float64 [E, K].
        """
        if self._prior is None:
            of_class = _of_class(self._labels, len(self.known))
            weights = 1 / (self.known.sum() * of_class.sum(1)[self._labels])
            # The log of a sum, not a sum, which could be 0.
            probabilities = F.log_softmax(self._logits.double(), -1) + weights.log().unsqueeze(-1)
            self._prior = probabilities.logsumexp(1)
        return self._prior


def with_mean(scores: Tensor) -> Tensor:
    """[E + 1, ...] from [E, ...]: the mean comes last."""
    return torch.cat([scores, scores.mean(0, keepdim=True)])


def concatenated(features: Tensor) -> Tensor:
    """Normalised ``features`` [E, N, D] of all experts beside each other: [1, N, E * D]."""
    return F.normalize(features.float(), dim=-1).transpose(0, 1).flatten(1).unsqueeze(0)


def standardised(scores: Tensor, known: Tensor) -> Tensor:
    """Float64 scores [..., K] with mean 0 and standard deviation 1 over the known classes; 0 where
    they are all equal, -inf for other classes; in operations that ONNX has.
    """
    scores, count = scores.double(), known.sum()
    centred = scores - scores.masked_fill(~known, 0).sum(-1, keepdim=True) / count
    variance = centred.masked_fill(~known, 0).square().sum(-1, keepdim=True) / count
    return (centred / variance.sqrt().clamp_min(1e-150)).masked_fill(~known, -torch.inf)


def classify(
    features: Tensor, logits: Tensor, fitted: Classifiers | None, names: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Tensor]]:
    """Predicts labels by classifiers and experts, ``{"ncm": {"1": ..., "mean_distance": ...}}`` and
    so on, int64 [N] each.

    ``features`` are float [E, N, D], ``logits`` float [E, N, K]; ``names`` has the experts' names
    by classifier (:func:`names_of_experts`). ``fitted`` is None while the memory is empty: all but
    ``linear`` then predict -1, no class.
    """
    found = {}
    for classifier, experts in names.items():
        if classifier == "linear":
            labels = with_mean(logits.float()).argmax(-1)
        elif fitted is None:
            labels = torch.full((len(experts), features.shape[1]), -1, device=features.device)
        else:
            labels = fitted.scores(classifier, features, logits).argmax(-1)
            if "all" in experts:
                joined = fitted.scores(classifier, features, logits, joined=True)
                labels = torch.cat([labels, joined.argmax(-1)])
        found[classifier] = dict(zip(experts, labels.unbind(0), strict=True))
    return found
