"""A norm, its ReLU and the global average pool in one pass; the normalised map is never written.

Native code serves float32 and bfloat16: it computes in float32, rounds once, and sums in a
fixed order, so that two runs agree bit for bit. The reference serves float64, on a GPU channels
that are no multiple of 8, and everything where there is no library. Autocast changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mose_fast import _loader
from mose_fast.ops.checks import FLOATS, MAP, check_rows, check_tensor, wide_dtype
from mose_fast.ops.maps import aligned, aligned_row, say_once, split_rows
from mose_fast.reference import norm_pool as reference


def norm_pool(x: Tensor, state: Tensor | None = None, valid_rows: int | Tensor | None = None) -> Tensor:
    """Averages relu(norm(x)) over the pixels: last norm, ReLU and pool of the network.

    The same in PyTorch::

        mean, _, scale, shift = state[:, None, :, None, None]
        F.relu(scale * (x - mean) + shift).mean(dim=(2, 3))  # without a state: x.mean(dim=(2, 3))

    Args:
        x: [N, C, H, W], best in channels_last memory; other memory is copied first, with a warning.
        state: float32 [4, C] (float64 beside float64): mean, inverse deviation, scale and shift, as
            :func:`mose_fast.ops.batch_norm_act.norm_state` returns them. It receives a gradient,
            in which that of the inverse deviation is 0. None: the mean of ``x`` itself.
        valid_rows: The number of valid images, as for
            :func:`~mose_fast.ops.batch_norm_act.batch_norm_act`.

    Returns:
        [N, C] in the dtype of ``x``; native code can be differentiated once.

    Raises:
        TypeError: A dtype is not one of the above.
        ValueError: A shape, a device or ``valid_rows`` does not fit.

    Source: paper section 4.1; mose_fast/reference/norm_pool.py.
    """
    check_tensor("x", x, FLOATS, MAP, filled=(2, 3), because=" with at least one pixel")
    if state is not None:
        check_tensor("state", state, (wide_dtype(x),), (4, x.shape[1]), beside=("x", x))
    if valid_rows is not None:
        check_rows("valid_rows", valid_rows, len(x), ("x", x))
    if x.dtype == torch.float64 or not _serves(x):
        with torch.autocast(x.device.type, enabled=False):
            return reference.norm_pool(x, state, valid_rows)
    if x.numel() > 0 and not x.is_contiguous(memory_format=torch.channels_last):
        say_once(
            "a map is copied into channels_last memory at every call; keep the network and its input in channels_last",
            stacklevel=3,
        )
    return _NormPool.apply(x, state, valid_rows)


def _serves(x: Tensor) -> bool:
    if _loader.on_gpu("norm_pool", x) and x.shape[1] % 8 != 0:
        # In the words of batch_norm_act, which the same network calls: so it is said once.
        say_once(
            "batch norm runs as PyTorch's operations, which is slower:"
            f" a map has {x.shape[1]} channels; kernels take multiples of 8"
        )
        return False
    return _loader.serves("norm_pool", x)


class _NormPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor | None, valid_rows: int | Tensor | None) -> Tensor:
        ctx.rows = split_rows(valid_rows)
        # Copied here rather than by each pass.
        x = aligned(x)
        state = None if state is None else aligned_row(state)
        pooled, counts, sums = _loader.ops().norm_pool(x, state, *ctx.rows, ctx.needs_input_grad[1])
        # A plain mean's gradient needs no values: memory of the map's size need not be kept for it.
        ctx.plain = (x.shape, x.dtype, x.device) if state is None else None
        ctx.save_for_backward(*(() if state is None else (x, state, counts, sums)))
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if ctx.plain is None:
            saved = ctx.saved_tensors
        else:
            shape, dtype, device = ctx.plain
            x = torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
            saved = (x, None, None, None)
        return *_loader.ops().norm_pool_backward(aligned_row(grad), *saved, *ctx.rows, ctx.needs_input_grad[:2]), None


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::norm_pool")
    def _fake(x, state, valid_rows_tensor, valid_rows, for_backward):
        images, channels = x.shape[:2]
        kept = images if for_backward and state is not None else 0
        counts, sums = (x.new_empty(kept, channels, dtype=torch.float32) for _ in range(2))
        return x.new_empty(images, channels), counts, sums

    @torch.library.register_fake("mose_fast::norm_pool_backward")
    def _fake_backward(grad, x, state, counts, sums, valid_rows_tensor, valid_rows, wants):
        return (
            torch.empty_like(x, memory_format=torch.channels_last) if wants[0] else None,
            x.new_empty(4, x.shape[1], dtype=torch.float32) if wants[1] else None,
        )
