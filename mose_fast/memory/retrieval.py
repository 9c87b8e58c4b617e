"""Retrieval by value: of many candidates, the ones worth replaying (MIR, ASER;
docs/specification/baselines.md sections 3 and 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["highest"]


def highest(slots: Tensor, scores: Tensor, count: int) -> Tensor:
    """The candidates with the highest scores.

    Args:
        slots: int64 [S], candidates.
        scores: float [S], their worth; of equal ones the first is taken.
        count: Wanted.

    Returns:
        int64 [min(count, S)], in the candidates' order: where all are taken, nothing has changed.
    """
    chosen = torch.sort(scores, descending=True, stable=True).indices[:count]
    return slots[chosen.sort().values]
