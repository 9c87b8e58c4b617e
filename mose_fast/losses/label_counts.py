"""How often each class occurs among rows: the priors of a logit-adjusted cross-entropy."""

from __future__ import annotations

import torch
from torch import Tensor


def label_counts(labels: Tensor, classes: int, counted: Tensor | None = None) -> Tensor:
    """Counts labels without waiting for a GPU.

    Args:
        labels: int64 [N], 0 ... K - 1.
        classes: K.
        counted: bool [N], the rows to count; None: all.

    Returns:
        int64 [K], the rows of each class.
    """
    own = labels[:, None] == torch.arange(classes, device=labels.device)
    return (own if counted is None else own & counted[:, None]).sum(0)
