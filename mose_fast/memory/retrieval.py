"""The candidates most worth replaying (MIR, ASER; docs/specification/baselines.md sections 3 and
5).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["highest"]


def highest(slots: Tensor, scores: Tensor, count: int) -> Tensor:
    """The ``count`` candidates, int64 [S], with the highest scores, float [S], in the candidates'
    order; of equal scores the first is taken. If all are taken, they are unchanged.
    """
    chosen = torch.sort(scores, descending=True, stable=True).indices[:count]
    return slots[chosen.sort().values]
