"""The last norm of a residual network with all that follows it, residual add, ReLU and global
average pool, in one pass; the normalised map is never written.

On a GPU kernels serve the maps that those of :mod:`mose_fast.ops.batch_norm_act` serve: they
compute in float32, round once, and sum in a fixed order, so that two runs agree bit for bit.
Everything else is computed by the ops of which this one is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mose_fast import _loader
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, check_norms, input_map, serves, with_floats
from mose_fast.ops.checks import FLOATS, MAP, check_tensor
from mose_fast.ops.maps import aligned_row, split_rows
from mose_fast.ops.norm_pool import norm_pool


def batch_norm_pool(x: Tensor, norm: Norm, residual: Tensor, valid_rows: int | Tensor | None = None) -> Tensor:
    """Averages relu(norm(x) + residual) over the pixels.

    The same in two ops, of which the first writes a map::

        y = batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows)
        norm_pool(y, valid_rows=valid_rows)

    Args:
        x: [N, C, H, W] with a pixel, float32 or bfloat16 (float64 by the reference).
        norm: Parameters and running statistics; in training the latter are updated in place.
        residual: A map of the shape of ``x``; another dtype is cast to that of ``x``.
        valid_rows: The number of valid images, as for
            :func:`~mose_fast.ops.batch_norm_act.batch_norm_act`.

    Returns:
        [N, C] in the dtype of ``x``; kernels can be differentiated once.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or a number does not fit; one element a channel in training,
            PyTorch's own error.

    Source: He et al. 2016; csrc/api/batch_norm_pool.h.
    """
    check_tensor("x", x, FLOATS, MAP, filled=(2, 3), because=" with at least one pixel")
    check_norms(x, {"norm": norm}, valid_rows)
    check_tensor("residual", residual, FLOATS, x.shape, beside=("x", x))
    if not serves("batch_norm_pool", x, norm):
        return norm_pool(batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows), valid_rows=valid_rows)
    x, residual, norm = input_map(x, x.dtype), input_map(residual, x.dtype), with_floats(norm)
    tensors = (x, norm.weight, norm.bias, residual)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _BatchNormPool.apply(*tensors, norm, *split_rows(valid_rows), trains)


class _BatchNormPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor,
        norm: Norm,
        valid_rows_tensor: Tensor | None,
        valid_rows: int | None,
        trains: bool,
    ) -> Tensor:
        pooled, state, mask, kept = _loader.ops().batch_norm_pool(
            x, *norm, residual, valid_rows_tensor, valid_rows, trains
        )
        ctx.save_for_backward(mask, kept, x, weight, state, valid_rows_tensor)
        ctx.training, ctx.valid_rows = norm.training, valid_rows
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, kept, x, weight, state, valid_rows_tensor = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rest = (weight, ctx.training, state, valid_rows_tensor, ctx.valid_rows, (needs[0], needs[3]))
        to_x, to_residual, to_norm = _loader.ops().batch_norm_pool_backward(aligned_row(grad), mask, kept, x, *rest)
        to_parameters = (row if need else None for row, need in zip(to_norm, needs[1:3], strict=False))
        return to_x, *to_parameters, to_residual, None, None, None, None


if _loader.gpu() is not None:

    @torch.library.register_fake("mose_fast::batch_norm_pool")
    def _fake(x, *arguments):
        images, channels = x.shape[:2]
        for_backward = arguments[-1]
        mask = x.new_empty(x.numel() // 8 if for_backward else 0, dtype=torch.uint8)
        state = x.new_empty(4, channels, dtype=torch.float32)
        kept = x.new_empty(2, images if for_backward else 0, channels, dtype=torch.float32)
        return x.new_empty(images, channels), state, mask, kept

    @torch.library.register_fake("mose_fast::batch_norm_pool_backward")
    def _fake_backward(grad, mask, kept, x, *arguments):
        maps = (torch.empty_like(x) if want else None for want in arguments[-1])
        return *maps, x.new_empty(4, x.shape[1], dtype=torch.float32)
