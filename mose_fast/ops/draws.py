"""Counter-based random numbers for methods: functions of their arguments alone, so that resumed
runs and other devices draw the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.reference.philox import Purpose, philox, uniform_below32, unit

__all__ = ["Purpose", "permutation", "random_words", "uniform_below32", "unit"]


def random_words(
    seed: int, sequence: int, count: int, purpose: Purpose, device: torch.device | str = "cpu", lane: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws four independent random words for each of ``count`` items.

    Args:
        seed: The run's seed.
        sequence: The number of the draw, for example the step.
        count: The number of items.
        purpose: The purpose of the words; draws for two purposes are independent.
        device: Where the words are drawn and returned.
        lane: The number of a further set of words for the same items and purpose.

    Returns:
        Four int64 tensors [count] with values in [0, 2**32), for :func:`unit` and
        :func:`uniform_below32`.
    """
    items = torch.arange(count, device=device)
    return philox(torch.full_like(items, seed), torch.full_like(items, sequence), items, purpose, lane)


def permutation(seed: int, sequence: int, count: int, purpose: Purpose, device: torch.device | str = "cpu") -> Tensor:
    """Draws an order of ``count`` things, int64 [count]; arguments: :func:`random_words`."""
    high, low, *_ = random_words(seed, sequence, count, purpose, device)
    return torch.argsort((high << 31) | (low >> 1), stable=True)
