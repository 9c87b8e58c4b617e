"""A norm, its ReLU and the global average pool in one pass: the normalised map is never written.

Native code serves float32, bfloat16 and float16; it computes in float32 and rounds once. Autocast
changes nothing. Sums have a fixed order, so that two runs agree bit for bit. float64, and
everything where no library was built, is the reference's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mose_fast import _loader
from mose_fast.ops.maps import say_once
from mose_fast.reference import norm_pool as reference

__all__ = ["norm_pool"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def norm_pool(x: Tensor, state: Tensor | None = None, valid_rows: int | Tensor | None = None) -> Tensor:
    """The mean over the pixels of relu(scale (x - mean) + shift): last norm, ReLU and pool of the
    network (paper section 4.1).

    Args:
        x: [N, C, H, W], best in channels_last memory; other memory is copied first, which is said
        once.
        state: float32 [4, C] (float64 beside float64), rows mean, inverse deviation, scale and
            shift, as :func:`mose_fast.reference.batch_norm.norm_state` gives them. Its gradient
            flows; the inverse deviation's is 0. None: the mean of ``x`` itself.
        valid_rows: Images from this one on are padding: zero in the result and in every gradient,
            never read. An int, or an int32 scalar on the device of ``x``, read there at each call
            (and replay), cut to [0, N]. None: every image is valid.

    Returns:
        [N, C] in the dtype of ``x``; native code serves it differentiated once.

    Raises:
        TypeError: A dtype is not one of the above.
        ValueError: A shape, a device or ``valid_rows`` does not fit.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {x!r}; wanted a torch.Tensor")
    if x.dtype not in _FLOATS:
        raise TypeError(f"x has dtype {x.dtype}; wanted float32, float64, bfloat16 or float16")
    if x.dim() != 4 or x.shape[2] * x.shape[3] < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; wanted [N, C, H, W] with at least one pixel")
    if state is not None:
        wanted = torch.float64 if x.dtype == torch.float64 else torch.float32
        if not isinstance(state, Tensor) or state.dtype != wanted:
            raise TypeError(f"state is {getattr(state, 'dtype', state)!r}; wanted a {wanted} tensor or None")
        if tuple(state.shape) != (4, x.shape[1]):
            raise ValueError(f"state has shape {tuple(state.shape)}; wanted (4, {x.shape[1]})")
        _check_device("state", state, x)
    if isinstance(valid_rows, Tensor):
        if valid_rows.dtype != torch.int32 or valid_rows.dim() != 0:
            raise TypeError(
                f"valid_rows is {valid_rows.dtype} {tuple(valid_rows.shape)}; wanted an int or an int32 scalar"
            )
        _check_device("valid_rows", valid_rows, x)
    elif valid_rows is not None and (
        isinstance(valid_rows, bool) or not isinstance(valid_rows, int) or not 0 <= valid_rows <= len(x)
    ):
        raise ValueError(f"valid_rows is {valid_rows!r}; wanted 0 to {len(x)}")

    if x.dtype == torch.float64 or not _loader.serves(x):
        with torch.autocast(x.device.type, enabled=False):
            return reference.norm_pool(x, state, valid_rows)
    if x.numel() > 0 and not x.is_contiguous(memory_format=torch.channels_last):
        say_once(
            "a map is copied into channels_last memory at every call; keep the network and its input in channels_last",
            stacklevel=3,
        )
    return _NormPool.apply(x, state, valid_rows)


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}; wanted {x.device}, where x is")


class _NormPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor | None, valid_rows: int | Tensor | None) -> Tensor:
        on_device = isinstance(valid_rows, Tensor)
        ctx.rows = (-1 if valid_rows is None or on_device else valid_rows, valid_rows if on_device else None)
        # Copied here rather than by each pass.
        x = x.contiguous(memory_format=torch.channels_last)
        pooled, counts, sums = _loader.native.norm_pool(x, state, *ctx.rows, ctx.needs_input_grad[1])
        # A plain mean's gradient needs no values: memory of the map's size need not be kept for it.
        ctx.plain = (x.shape, x.dtype, x.device) if state is None else None
        ctx.save_for_backward(*(() if state is None else (x, state, counts, sums)))
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if ctx.plain is None:
            x, state, counts, sums = ctx.saved_tensors
        else:
            shape, dtype, device = ctx.plain
            x = torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
            state = counts = sums = None
        return *_loader.native.norm_pool_backward(
            grad, x, state, counts, sums, *ctx.rows, *ctx.needs_input_grad[:2]
        ), None
