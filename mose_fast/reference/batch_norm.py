"""Batch norm in two halves, in plain PyTorch: the state that statistics leave behind, and its use
while a map is read.

A state is [4, C]: mean, inverse deviation, scale (weight x inverse deviation) and shift (bias),
float32 or the map's float64; norm(y) = scale (y - mean) + shift. csrc/core/batch_norm.h says how
kernels combine the two halves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Norm(NamedTuple):
    """A batch norm's parameters and running statistics, each [C] in float32 (float64 beside float64
    maps); None where it has none. ``training``: use the batch's statistics and let them enter the
    running ones; else use the running ones as they are.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    batches_tracked: Tensor | None = None
    momentum: float = 0.1
    eps: float = 1e-5
    training: bool = True

    @classmethod
    def of(cls, module: nn.BatchNorm2d) -> Norm:
        """The norm that a PyTorch module computes at this moment, by its own settings:
        ``track_running_stats``, which may be set for a while, too. Raises ValueError if it updates
        its running statistics and its momentum is None (a cumulative average).
        """
        tracks = module.training and module.track_running_stats
        if tracks and module.momentum is None:
            raise ValueError("momentum is None (a cumulative average); wanted a number")
        uses_running = tracks or not module.training
        return cls(
            module.weight,
            module.bias,
            module.running_mean if uses_running else None,
            module.running_var if uses_running else None,
            module.num_batches_tracked if tracks else None,
            0.0 if module.momentum is None else module.momentum,
            module.eps,
            module.training or (module.running_mean is None and module.running_var is None),
        )


def without_padding(y: Tensor, valid_rows: int | Tensor | None) -> Tensor:
    """Returns ``y`` with zeros in its padded rows, forward and backward, whatever they held."""
    if valid_rows is None:
        return y
    valid = torch.arange(len(y), device=y.device) < valid_rows
    return torch.where(valid.view(-1, *[1] * (y.dim() - 1)), y, 0)


def norm_state(y: Tensor, norm: Norm, valid_rows: int | Tensor | None = None) -> Tensor:
    """Computes the state [4, C] of a norm over a map [N, C, H, W], differentiable; in training it
    updates the running statistics as PyTorch does. Raises ValueError for one element a channel in
    training, as PyTorch does.

    Statistics are those of ``y`` as it is stored, computed in float32 (float64 for float64). Padded
    rows do not count.
    """
    wide = without_padding(y, valid_rows).to(torch.float64 if y.dtype == torch.float64 else torch.float32)
    if norm.training:
        rows = len(y) if valid_rows is None else valid_rows
        rows = rows.clamp(0, len(y)) if isinstance(rows, Tensor) else rows
        count = rows * wide.shape[2] * wide.shape[3]
        if not isinstance(count, Tensor) and count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {y.shape}")
        mean = wide.sum(dim=(0, 2, 3)) / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
        deviations = without_padding(wide - mean.view(1, -1, 1, 1), valid_rows)
        squares = deviations.square().sum(dim=(0, 2, 3))
        total = torch.as_tensor(count, device=y.device)
        variance = squares / total.clamp(min=1)
        if norm.running_mean is not None:
            with torch.no_grad():
                share = norm.momentum * (total > 0).to(wide.dtype)
                norm.running_mean.add_(share * (mean - norm.running_mean))
                norm.running_var.add_(share * (squares / (total - 1).clamp(min=1) - norm.running_var))
        if norm.batches_tracked is not None:
            norm.batches_tracked.add_(1)
    else:
        mean, variance = norm.running_mean.to(wide.dtype), norm.running_var.to(wide.dtype)
    inverse = (variance + norm.eps).rsqrt()
    scale = inverse if norm.weight is None else norm.weight * inverse
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias.to(wide.dtype)
    return torch.stack([mean, inverse, scale, shift])


def normalised(y: Tensor, state: Tensor, *, relu: bool = True) -> Tensor:
    """norm(y), rectified if ``relu``, in the state's dtype (float32 or float64)."""
    mean, _, scale, shift = (row.view(1, -1, 1, 1) for row in state)
    z = (y.to(state.dtype) - mean) * scale + shift
    return F.relu(z) if relu else z
