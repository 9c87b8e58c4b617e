"""Defines :mod:`mose_fast.ops.batch_norm_act` in plain PyTorch: norm, residual add, ReLU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mose_fast.reference.batch_norm import Norm, norm_state, normalised, without_padding


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

    def normed(y: Tensor, n: Norm) -> Tensor:
        if prologue is not None or valid_rows is not None:
            return normalised(y, norm_state(y, n, valid_rows), relu=False)
        if n.training and n.batches_tracked is not None:
            n.batches_tracked.add_(1)
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, n.training, n.momentum, n.eps)

    inner = without_padding(x, valid_rows)
    z = normed(inner if prologue is None else normalised(inner, prologue), norm)
    if residual is not None:
        other = without_padding(residual, valid_rows)
        z = z + (other if residual_norm is None else normed(other, residual_norm))
    y = without_padding(F.relu(z) if relu else z, valid_rows).to(x.dtype)
    return y if consumers == 1 else (y,) * consumers
