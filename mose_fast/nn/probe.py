"""A linear classifier fitted to fixed features (docs/specification/baselines.md section 14)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mose_fast.ops.draws import Purpose, random_words, uniform_below32

_MOMENTUM, _BATCH = 0.9, 256
# After these shares of all passes the learning rate falls to a fifth.
_DROPS, _FACTOR = (0.6, 0.75, 0.9), 0.2


def fit_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    passes: int,
    lr: float,
    seed: int,
    sequence: int,
    after_step: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """Fits a linear classifier by cross-entropy to ``features`` float32 [N, D] and ``labels`` int64
    [N]: SGD with momentum 0.9 from zero weights, in batches of 256. Each pass draws as many rows as
    there are, with replacement, from each class equally often. Returns weight float32 [K, D] and
    bias float32 [K].

    With features that are not negative it never predicts a class without rows: the logits of all
    classes sum to zero, and those of such a class are negative. ``sequence`` is the number of the
    fit, times at least ``passes``.
    """
    device, count = features.device, len(features)
    rows = torch.cat([features, features.new_ones(count, 1)], 1)
    sizes = torch.bincount(labels, minlength=classes)
    by_class, first = torch.argsort(labels, stable=True), sizes.cumsum(0) - sizes
    stored = sizes.nonzero().flatten()
    weight = rows.new_zeros(classes, rows.shape[1])
    velocity = torch.zeros_like(weight)
    for number in range(passes):
        rate = lr * _FACTOR ** sum(number >= share * passes for share in _DROPS)
        which, within, _, _ = random_words(seed, sequence + number, count, Purpose.FIT, device)
        drawn = stored[uniform_below32(which, torch.full_like(which, len(stored)))]
        order = by_class[first[drawn] + uniform_below32(within, sizes[drawn])]
        for chosen in order.split(_BATCH):
            errors = (rows[chosen] @ weight.T).softmax(1)
            errors[torch.arange(len(chosen), device=device), labels[chosen]] -= 1
            velocity = _MOMENTUM * velocity + errors.T @ rows[chosen] / len(chosen)
            weight -= rate * velocity
            after_step()
    return weight[:, :-1], weight[:, -1]
