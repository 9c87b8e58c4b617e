"""Depthwise 3x3 and pointwise 1x1 convolution that apply the norm before them while they load, and
return the statistics of the norm after them.

Alignment modules and attention gates are chains of ``align_conv``, which write neither a normalised
nor a gated map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mose_fast import _loader
from mose_fast.ops.checks import (
    FLOATS,
    MAP,
    check_choice,
    check_norm,
    check_rows,
    check_statistics,
    check_tensor,
    wide_dtype,
)
from mose_fast.ops.maps import aligned, aligned_row, say_once
from mose_fast.reference import align_conv as reference
from mose_fast.reference.align_conv import AlignedMap
from mose_fast.reference.batch_norm import Norm

__all__ = ["AlignedMap", "Norm", "align_conv"]


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
    check_tensor("x", x, FLOATS, MAP, filled=(1, 2, 3), because=" with at least one channel and one pixel")
    rows, channels, height, width = x.shape
    beside, wide = ("x", x), (wide_dtype(x),)
    check_choice("stride", stride, (1, 2))
    if stride == 2 and (height % 2 or width % 2):
        raise ValueError(f"x has sides {height} x {width}; wanted even ones for stride 2")
    check_tensor("depthwise", depthwise, FLOATS, (channels, 1, 3, 3), beside=beside)
    check_tensor(
        "pointwise",
        pointwise,
        FLOATS,
        ("out_channels", channels, 1, 1),
        beside=beside,
        filled=(0,),
        because=" with at least one channel",
    )
    check_norm("norm", norm, len(pointwise), x, wide)
    if prologue is not None:
        check_tensor("prologue", prologue, wide, (4, channels), beside=beside)
    if gate is not None:
        if height % 2 or width % 2:
            raise ValueError(f"x has sides {height} x {width}; wanted even ones for a gate at half of them")
        check_tensor("gate", gate, (x.dtype,), (rows, channels, height // 2, width // 2), beside=beside)
    if valid_rows is not None:
        check_rows("valid_rows", valid_rows, rows, beside)
    check_statistics(norm, (rows, len(pointwise), height // stride, width // stride), valid_rows)


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
    """Computes y = pointwise(depthwise(x')) without biases, and the state of ``norm`` over y.

    The same in PyTorch, without the lines whose argument is None::

        mean, _, scale, shift = prologue[:, None, :, None, None]
        x = F.relu(scale * (x - mean) + shift)
        x = x * F.interpolate(gate, scale_factor=2, mode="bilinear").sigmoid()
        y = F.conv2d(F.conv2d(x, depthwise, stride=stride, padding=1, groups=C), pointwise)
        state = norm_state(y, norm)

    Neither x' nor norm(y) is written: the next ``align_conv`` takes ``state`` as its prologue. Both
    results can be differentiated, once, towards x, both weights, the norm's weight and bias,
    prologue and gate. In training the running statistics are updated in place. Autocast changes
    nothing; sums are in float32 (float64 for float64) and in a fixed order. On a card kernels serve
    float32, bfloat16 and float16 with multiples of 8 channels; PyTorch's convolutions serve the
    rest.

    Args:
        x: [N, C, H, W], float32, bfloat16, float16 or float64; kernels want channels_last memory.
        depthwise: [C, 1, 3, 3]. A weight of another dtype than ``x`` is cast to it; its gradient
            has its own dtype.
        pointwise: [O, C, 1, 1].
        norm: The norm over y, with vectors [O] in float32 (float64 beside float64).
        stride: The depthwise convolution's stride, 1 or 2; 2 wants even H and W.
        prologue: [4, C], float32 (float64): the state of the norm over ``x``, which with its ReLU
            is still to be applied (``AlignedMap.state`` or ``norm_state``). None: x is taken as it
            is.
        gate: [N, C, H/2, W/2] in the dtype of ``x``; wants even H and W.
        valid_rows: The number of valid images; the images after them are padding: never read, zero
            in y and in every gradient, not counted by the norm. An int, or an int32 scalar on the
            device of ``x``, read there at each call (and replay) and cut to [0, N]. None: every
            image is valid.

    Returns:
        AlignedMap(y [N, O, H/stride, W/stride] in the dtype of ``x``, state [4, O] in float32 or
        float64).

    Raises:
        TypeError: A dtype or layout does not fit.
        ValueError: A shape, a device, ``stride`` or ``valid_rows`` does not fit; one element a
            channel in training, PyTorch's own error.

    Source: the paper's alignment modules; docs/specification/mose.md section 2;
    mose_fast/reference/align_conv.py.
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
