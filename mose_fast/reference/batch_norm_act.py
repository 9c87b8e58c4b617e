"""Defines :mod:`mose_fast.ops.batch_norm_act` in plain PyTorch: norm, residual add, ReLU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mose_fast.reference.batch_norm import Norm, norm_state, normalised, without_padding

__all__ = ["batch_norm_act"]


def _plain(x: Tensor, norm: Norm) -> Tensor:
    """Computes what ``nn.BatchNorm2d`` does."""
    if norm.training and norm.batches_tracked is not None:
        norm.batches_tracked.add_(1)
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, norm.momentum, norm.eps
    )


def batch_norm_act(
    x: Tensor,
    norm: Norm,
    *,
    relu: bool = True,
    residual: Tensor | None = None,
    residual_norm: Norm | None = None,
    prologue: Tensor | None = None,
    consumers: int = 1,
    valid_rows: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes y = relu(norm(x') + residual);
    :func:`mose_fast.ops.batch_norm_act.batch_norm_act` describes the arguments.

    Without ``prologue`` and ``valid_rows`` these are PyTorch's own operations, each rounded to the
    map's dtype, so that a network gives the same bits as one of ``nn.BatchNorm2d``; else everything
    is computed in float32 (float64) and rounded once.
    """
    residual = None if residual is None else residual.to(x.dtype)
    if prologue is None and valid_rows is None:
        y = _plain(x, norm)
        if residual is not None:
            y = y + (residual if residual_norm is None else _plain(residual, residual_norm))
        y = F.relu(y) if relu else y
    else:
        inner = without_padding(x, valid_rows)
        inner = inner if prologue is None else normalised(inner, prologue)
        z = normalised(inner, norm_state(inner, norm, valid_rows), relu=False)
        if residual is not None:
            other = without_padding(residual, valid_rows)
            z = z + (
                other
                if residual_norm is None
                else normalised(other, norm_state(other, residual_norm, valid_rows), relu=False)
            )
        y = without_padding(F.relu(z) if relu else z, valid_rows).to(x.dtype)
    return y if consumers == 1 else (y,) * consumers
