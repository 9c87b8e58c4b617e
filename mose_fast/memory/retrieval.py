"""The candidates most worth replaying (MIR, ASER).

See docs/specification/baselines.md sections 3 and 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["highest"]


def highest(slots: Tensor, scores: Tensor, count: int) -> Tensor:
    """The candidates with the highest scores.

    Args:
        slots: int64 [S], candidates.
        scores: float [S], their value; of equal scores the first is taken.
        count: Number of candidates wanted.

    Returns:
        int64 [min(count, S)], in the candidates' order; if all are taken, they are unchanged.
    """
    chosen = torch.sort(scores, descending=True, stable=True).indices[:count]
    return slots[chosen.sort().values]
