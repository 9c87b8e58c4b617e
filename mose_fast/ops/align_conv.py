"""Depthwise 3x3 and pointwise 1x1 convolution that read the norm before them and leave behind the
statistics of the norm after them.

What the alignment modules and attention gates are made of: a chain of ``align_conv`` writes neither
a normalised nor a gated map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mose_fast import _loader
from mose_fast.ops.maps import aligned, aligned_row, say_once
from mose_fast.reference import align_conv as reference
from mose_fast.reference.align_conv import AlignedMap
from mose_fast.reference.batch_norm import Norm

__all__ = ["AlignedMap", "Norm", "align_conv"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}; wanted a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; wanted {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"
        )
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; wanted {device}, where x is")


def _check_rows(valid_rows: int | Tensor | None, rows: int, device: torch.device) -> None:
    if valid_rows is None:
        return
    if isinstance(valid_rows, Tensor):
        if valid_rows.dtype != torch.int32 or valid_rows.dim() != 0:
            raise TypeError(
                f"valid_rows is {valid_rows.dtype} {tuple(valid_rows.shape)}; wanted an int or an int32 scalar"
            )
        if valid_rows.device != device:
            raise ValueError(f"valid_rows is on {valid_rows.device}; wanted {device}, where x is")
    elif isinstance(valid_rows, bool) or not isinstance(valid_rows, int) or not 0 <= valid_rows <= rows:
        raise ValueError(f"valid_rows is {valid_rows!r}; wanted 0 to {rows}, the images of x")


def _check(
    x: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    norm: Norm,
    stride: int,
    prologue: Tensor | None,
    gate: Tensor | None,
    valid_rows: int | Tensor | None,
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {x!r}; wanted a torch.Tensor")
    if x.dtype not in _FLOATS or x.layout != torch.strided:
        raise TypeError(
            f"x has dtype {x.dtype} and layout {x.layout}; wanted float32, float64, bfloat16 or float16, strided"
        )
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; wanted [images, channels, height, width]")
    rows, channels, height, width = x.shape
    if min(channels, height, width) < 1:
        raise ValueError(f"x has shape {tuple(x.shape)}; wanted at least one channel and one pixel")
    if stride not in (1, 2):
        raise ValueError(f"stride is {stride!r}; wanted 1 or 2")
    if stride == 2 and (height % 2 or width % 2):
        raise ValueError(f"x has sides {height} x {width}; wanted even ones for stride 2")
    _check_tensor("depthwise", depthwise, (channels, 1, 3, 3), _FLOATS, x.device)
    if not isinstance(pointwise, Tensor) or pointwise.dim() != 4:
        raise ValueError(
            f"pointwise is {getattr(pointwise, 'shape', pointwise)!r}; wanted [out_channels, {channels}, 1, 1]"
        )
    out_channels = len(pointwise)
    if out_channels < 1:
        raise ValueError("pointwise has no rows; wanted at least one channel to put out")
    _check_tensor("pointwise", pointwise, (out_channels, channels, 1, 1), _FLOATS, x.device)
    wide = (torch.float64,) if x.dtype == torch.float64 else (torch.float32,)
    if not isinstance(norm, Norm):
        raise TypeError(f"norm is {norm!r}; wanted a Norm (of a module: Norm.of)")
    for name, vector in zip(("weight", "bias", "running_mean", "running_var"), norm[:4], strict=True):
        if vector is not None:
            _check_tensor(f"norm.{name}", vector, (out_channels,), wide, x.device)
    if (norm.running_mean is None) != (norm.running_var is None):
        raise ValueError("norm has one of running_mean and running_var; wanted both or neither")
    if not norm.training and norm.running_mean is None:
        raise ValueError("norm is not training and has no running statistics; wanted one of both")
    if prologue is not None:
        _check_tensor("prologue", prologue, (4, channels), wide, x.device)
    if gate is not None:
        if height % 2 or width % 2:
            raise ValueError(f"x has sides {height} x {width}; wanted even ones for a gate at half of them")
        _check_tensor("gate", gate, (rows, channels, height // 2, width // 2), (x.dtype,), x.device)
    _check_rows(valid_rows, rows, x.device)
    counted = rows if valid_rows is None else valid_rows
    if norm.training and not isinstance(counted, Tensor) and counted * (height // stride) * (width // stride) == 1:
        size = torch.Size((rows, out_channels, height // stride, width // stride))
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def align_conv(
    x: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    norm: Norm,
    *,
    stride: int = 1,
    prologue: Tensor | None = None,
    gate: Tensor | None = None,
    valid_rows: int | Tensor | None = None,
) -> AlignedMap:
    """y = pointwise(depthwise(x')) without biases, and the state of ``norm`` over y (paper's
    alignment modules; docs/specification/mose.md section 2).

    x' is ``x``, or with ``prologue`` relu(scale (x - mean) + shift), with ``gate`` times
    sigmoid(up(gate)), where ``up`` doubles both sides bilinearly (corners not aligned). Neither x'
    nor norm(y) is written: the next ``align_conv`` takes ``state`` as its prologue. Both results
    are differentiable, once, towards x, both weights, the norm's weight and bias, prologue and
    gate. In training the running statistics are updated in place. Autocast changes nothing; sums
    are in float32 (float64) and in a fixed order.

    Args:
        x: [N, C, H, W], float32, bfloat16, float16 or (on the CPU) float64; kernels want
        channels_last memory.
        depthwise: [C, 1, 3, 3], padding 1. A weight of another type than ``x`` is cast to it; its
        gradient comes in its own.
        pointwise: [O, C, 1, 1].
        norm: Of y; vectors [O] in float32 (float64 beside float64).
        stride: Of the depthwise convolution, 1 or 2; 2 wants even H and W.
        prologue: [4, C], the state of the norm over ``x`` (``AlignedMap.state`` or ``norm_state``),
        float32 (float64); None: x' = x.
        gate: [N, C, H/2, W/2] in the type of ``x``; wants even H and W.
        valid_rows: Images from this one on are padding: never read, zero in y and in every
            gradient, not counted. None, an int, or an int32 scalar tensor beside ``x``, which the
            kernel alone reads, at each call (and replay), cut to [0, N].

    Returns:
        AlignedMap(y [N, O, H/stride, W/stride] in the type of ``x``, state [4, O] in float32 or
        float64).

    Raises:
        TypeError: A dtype or layout does not fit.
        ValueError: A shape, a device, ``stride`` or ``valid_rows`` does not fit; one element a
            channel in training, PyTorch's own error.
    """
    _check(x, depthwise, pointwise, norm, stride, prologue, gate, valid_rows)
    if not _has_kernels(x, len(pointwise)):
        return reference.align_conv(
            x,
            depthwise,
            pointwise,
            norm,
            stride=stride,
            prologue=prologue,
            gate=gate,
            valid_rows=valid_rows,
        )
    tensors = (x, depthwise, pointwise, norm.weight, norm.bias, prologue, gate)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return AlignedMap(*_AlignConv.apply(*tensors, norm, stride, valid_rows, trains))


def _has_kernels(x: Tensor, out_channels: int) -> bool:
    """Kernels are for cards; PyTorch's convolutions serve the CPU, float64 and channels that are no
    multiple of 8.
    """
    if x.dtype == torch.float64 or not _loader.on_card(x):
        return False
    if x.shape[1] % 8 or out_channels % 8 or out_channels > 2048:
        say_once(
            f"align_conv of {x.shape[1]} to {out_channels} channels runs on PyTorch's own operations, which is slower: "
            "its kernels want multiples of 8, at most 2048 put out"
        )
        return False
    return True


def _is_fused_back(dtype: torch.dtype, channels: int, out_channels: int) -> bool:
    """Whether the product with the gradient of y is taken where that gradient is summed up."""
    return (
        dtype != torch.float32
        and channels % 8 == 0
        and channels <= 128
        and out_channels % 16 == 0
        and out_channels <= 128
    )


def _is_fused(dtype: torch.dtype, channels: int, out_channels: int) -> bool:
    """Whether one kernel does both convolutions and the statistics; else the product with the
    pointwise weights is cuBLAS's.
    """
    return dtype != torch.float32 and channels % 16 == 0 and channels <= 128 and out_channels <= 256


def _in_channels_last(name: str, x: Tensor) -> Tensor:
    if x.numel() and not x.is_contiguous(
        memory_format=torch.channels_last
    ):  # a map of no images may have lost its layout on the way
        say_once(f"{name} of align_conv is not in channels_last memory and is copied into it, each time")
    return aligned(x)


def _as_rows(x: Tensor) -> Tensor:
    """The pixels of a map in channels_last memory, [N * H * W, C], without a copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _as_map(rows: Tensor, like: Tensor) -> Tensor:
    """The map [N, channels of ``rows``, H, W] whose pixels ``rows`` holds, with the sides of
    ``like``.
    """
    images, _, height, width = like.shape
    return rows.view(images, height, width, rows.shape[1]).permute(0, 3, 1, 2)


class _AlignConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        depthwise: Tensor,
        pointwise: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        prologue: Tensor | None,
        gate: Tensor | None,
        norm: Norm,
        stride: int,
        valid_rows: int | Tensor | None,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        native = _loader.native
        ctx.set_materialize_grads(False)
        ctx.types = depthwise.dtype, pointwise.dtype
        x = _in_channels_last("x", x)
        gate = None if gate is None else _in_channels_last("gate", gate)
        prologue = None if prologue is None else aligned_row(prologue)
        taps = (depthwise.to(x.dtype) if depthwise.dtype == torch.float64 else depthwise).contiguous()
        matrix = aligned_row(pointwise.to(x.dtype).reshape(pointwise.shape[:2]))
        norm = norm._replace(
            weight=None if weight is None else weight.contiguous(),
            bias=None if bias is None else bias.contiguous(),
        )
        valid = (valid_rows, None) if isinstance(valid_rows, Tensor) else (None, valid_rows)
        entering = (x, taps, stride, prologue, gate, *valid)
        if _is_fused(x.dtype, *matrix.shape[::-1]):
            y, state, m = native.align_conv(matrix, norm, trains, *entering)
            mean_rest = None
        else:
            m = native.align_conv_depthwise(*entering)
            with torch.autocast(x.device.type, enabled=False):
                y = _as_map(torch.mm(_as_rows(m), matrix.t()), m)
            state, mean_rest = native.norm_state(y, norm, *valid)
        if trains:
            rows = valid_rows if isinstance(valid_rows, Tensor) else None
            ctx.save_for_backward(x, taps, matrix, norm.weight, prologue, gate, m, y, state, mean_rest, rows)
            ctx.norm = norm._replace(weight=None)
            ctx.stride, ctx.valid_rows = stride, valid[1]
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None) -> tuple:
        native = _loader.native
        x, taps, matrix, weight, prologue, gate, m, y, state, mean_rest, rows = ctx.saved_tensors
        wants_x, wants_depthwise, wants_pointwise, _, _, wants_prologue, wants_gate = ctx.needs_input_grad[:7]
        grads: list[Tensor | None] = [None] * 11
        if grad is None and grad_state is None:
            return tuple(grads)
        valid = (rows, ctx.valid_rows)
        total, of_map = None if grad is None else aligned(grad), None
        wants = (wants_x, wants_depthwise, wants_prologue, wants_gate)
        if grad_state is not None or valid != (None, None):
            norm = ctx.norm._replace(weight=weight)
            of_state = None if grad_state is None else aligned_row(grad_state)
            factor = matrix if any(wants) and _is_fused_back(x.dtype, *matrix.shape[::-1]) else None
            results = native.align_conv_grad_y(total, of_state, y, state, mean_rest, norm, factor, *valid)
            total, of_map, grads[3], grads[4] = results
        with torch.autocast(x.device.type, enabled=False):
            if wants_pointwise:
                grads[2] = torch.mm(_as_rows(total).t(), _as_rows(m)).to(ctx.types[1]).view(*matrix.shape, 1, 1)
            if any(wants):
                if of_map is None:
                    of_map = _as_map(torch.mm(_as_rows(total), matrix), m)
                results = native.align_conv_backward(of_map, wants, x, taps, ctx.stride, prologue, gate, *valid)
                grads[0], grads[1], grads[5], grads[6] = results
                if wants_depthwise:
                    grads[1] = grads[1].to(ctx.types[0])
        return tuple(grads)
