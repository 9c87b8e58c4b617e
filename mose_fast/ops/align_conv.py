"""Depthwise 3x3 and pointwise 1x1 convolution that apply the norm before them while they load, and
return the statistics of the norm after them.

Alignment modules and attention gates are chains of ``align_conv``, which write neither a normalised
nor a gated map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from mose_fast.ops.maps import aligned, aligned_row, say_once, split_rows
from mose_fast.reference import align_conv as reference
from mose_fast.reference.align_conv import AlignedMap
from mose_fast.reference.batch_norm import Norm


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
    sizes, because = ("out_channels", channels, 1, 1), " with at least one channel"
    check_tensor("pointwise", pointwise, FLOATS, sizes, beside=beside, filled=(0,), because=because)
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
    nothing; sums are in float32 (float64 for float64) and in a fixed order. On a GPU kernels serve
    float32 and bfloat16 with multiples of 8 channels, in the forms of alignment modules
    and gates: stride 1 with a prologue, stride 2 as it is, with a prologue or with a gate.
    PyTorch's convolutions serve the rest.

    Args:
        x: [N, C, H, W], float32, bfloat16 or float64; kernels want channels_last memory.
        depthwise: [C, 1, 3, 3]. A weight of another dtype than ``x`` is cast to it; its gradient
            has its own dtype.
        pointwise: [O, C, 1, 1].
        norm: The norm over y, with vectors [O] in float32 (float64 beside float64).
        stride: The depthwise convolution's stride, 1 or 2; 2 wants even H and W.
        prologue: [4, C], float32 (float64): the state of the norm over ``x``, which with its ReLU
            is still to be applied (``AlignedMap.state`` or ``norm_state``). None: x is taken as it
            is.
        gate: [N, C, H/2, W/2] in the dtype of ``x``; wants even H and W.
        valid_rows: The number of valid images, as for
            :func:`~mose_fast.ops.batch_norm_act.batch_norm_act`.

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
    if not _has_kernels(x, len(pointwise), stride, prologue is not None, gate is not None):
        return reference.align_conv(
            x, depthwise, pointwise, norm, stride=stride, prologue=prologue, gate=gate, valid_rows=valid_rows
        )
    tensors = (x, depthwise, pointwise, norm.weight, norm.bias, prologue, gate)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return AlignedMap(*_AlignConv.apply(*tensors, norm, stride, valid_rows, trains))


def _constant_when_compiled(function: Callable) -> Callable:
    # What torch.compiler.assume_constant_result does after importing torch._dynamo for two seconds.
    function._dynamo_marked_constant = True
    return function


class Serves(NamedTuple):
    """Which kernels take maps of a dtype with given numbers of channels: ``any`` at all,
    ``fused_forward``: one kernel for both convolutions and the statistics, else the product with
    the pointwise weights is cuBLAS's; ``fused_backward``: one kernel for the gradient of y and its
    product with the pointwise weights; ``fused_weights``: and for these weights' gradient.
    """

    any: bool
    fused_forward: bool
    fused_backward: bool
    fused_weights: bool


@_constant_when_compiled
def align_conv_serves(dtype: torch.dtype, channels: int, out_channels: int, stride: int = 1) -> Serves:
    """Asks the native library which kernels it has for maps of ``dtype`` with ``channels`` in and
    ``out_channels`` out; none without a library for GPUs.
    """
    if not hasattr(_loader.native, "align_conv_serves"):
        return Serves(False, False, False, False)
    return Serves(*_loader.native.align_conv_serves(dtype, channels, out_channels, stride))


@_constant_when_compiled
def _serves_form(stride: int, prologue: bool, gate: bool) -> bool:
    return _loader.native.align_conv_serves_form(stride, prologue, gate)


def _has_kernels(x: Tensor, out_channels: int, stride: int, prologue: bool, gate: bool) -> bool:
    """Whether kernels serve ``x``, which are for GPUs; PyTorch's convolutions serve the rest."""
    if x.dtype == torch.float64 or not _loader.on_gpu("align_conv", x):
        return False
    if not _serves_form(stride, prologue, gate):
        said = " and ".join(name for name, given in (("a prologue", prologue), ("a gate", gate)) if given) or "neither"
        say_once(
            f"align_conv of stride {stride} with {said} runs on PyTorch's own operations, which is slower: its kernels"
            " want stride 1 with a prologue, or stride 2 with at most one of prologue and gate"
        )
        return False
    if not align_conv_serves(x.dtype, x.shape[1], out_channels).any:
        say_once(
            f"align_conv of {x.shape[1]} to {out_channels} channels runs on PyTorch's own operations, which is slower: "
            "its kernels want multiples of 8, at most 2048 put out"
        )
        return False
    return True


def _in_channels_last(name: str, x: Tensor) -> Tensor:
    # A map of no images may have lost its layout on the way.
    if x.numel() and not x.is_contiguous(memory_format=torch.channels_last):
        say_once(f"{name} of align_conv is not in channels_last memory and is copied into it, each time")
    return aligned(x)


def _as_rows(x: Tensor) -> Tensor:
    """The pixels of a map in channels_last memory, [N * H * W, C], without a copy."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _as_map(rows: Tensor, like: Tensor) -> Tensor:
    """The map [N, channels, H, W] whose pixels ``rows`` holds, with the sides of ``like``."""
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
        native = _loader.ops()
        ctx.set_materialize_grads(False)
        ctx.types = depthwise.dtype, pointwise.dtype
        x = _in_channels_last("x", x)
        gate = None if gate is None else _in_channels_last("gate", gate)
        prologue = None if prologue is None else aligned_row(prologue)
        taps = (depthwise.to(x.dtype) if depthwise.dtype == torch.float64 else depthwise).contiguous()
        matrix = aligned_row(pointwise.to(x.dtype).reshape(pointwise.shape[:2]))
        weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
        norm = norm._replace(weight=weight, bias=bias)
        rows, count = split_rows(valid_rows)
        entering = (x, taps, stride, prologue, gate, rows, count)
        if align_conv_serves(x.dtype, *matrix.shape[::-1], stride).fused_forward:
            y, state, m = native.align_conv(matrix, *norm, trains, *entering)
            mean_rest = None
        else:
            m = native.align_conv_depthwise(*entering)
            with torch.autocast(x.device.type, enabled=False):
                y = _as_map(torch.mm(_as_rows(m), matrix.t()), m)
            state, mean_rest = native.norm_state(y, *norm, rows, count)
        if trains:
            ctx.save_for_backward(x, taps, matrix, norm.weight, prologue, gate, m, y, state, mean_rest, rows)
            ctx.norm = norm.bias is not None, norm.training
            ctx.stride, ctx.valid_rows = stride, count
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None) -> tuple:
        native = _loader.ops()
        x, taps, matrix, weight, prologue, gate, m, y, state, mean_rest, rows = ctx.saved_tensors
        wants_x, wants_depthwise, wants_pointwise, _, _, wants_prologue, wants_gate = ctx.needs_input_grad[:7]
        grads: list[Tensor | None] = [None] * 11
        if grad is None and grad_state is None:
            return tuple(grads)
        valid = (rows, ctx.valid_rows)
        total, of_map, of_matrix = None if grad is None else aligned(grad), None, None
        wants = (wants_x, wants_depthwise, wants_prologue, wants_gate)
        if grad_state is not None or rows is not None or ctx.valid_rows is not None:
            of_state = None if grad_state is None else aligned_row(grad_state)
            serves = align_conv_serves(x.dtype, *matrix.shape[::-1])
            fused = matrix if any(wants) and serves.fused_backward else None
            kept = m if wants_pointwise and any(wants) and serves.fused_weights else None
            total, of_map, of_matrix, grads[3], grads[4] = native.align_conv_grad_y(
                total, of_state, y, state, mean_rest, weight, *ctx.norm, fused, kept, *valid
            )
        with torch.autocast(x.device.type, enabled=False):
            if wants_pointwise:
                of_matrix = torch.mm(_as_rows(total).t(), _as_rows(m)) if of_matrix is None else of_matrix
                grads[2] = of_matrix.to(ctx.types[1]).view(*matrix.shape, 1, 1)
            if any(wants):
                if of_map is None:
                    of_map = _as_map(torch.mm(_as_rows(total), matrix), m)
                results = native.align_conv_backward(of_map, wants, x, taps, ctx.stride, prologue, gate, *valid)
                grads[0], grads[1], grads[5], grads[6] = results
                if wants_depthwise:
                    grads[1] = grads[1].to(ctx.types[0])
        return tuple(grads)


if _loader.gpu() is not None:

    def _new_map(x: Tensor, channels: int, stride: int) -> Tensor:
        height, width = x.shape[2:]
        return x.new_empty(len(x), height // stride, width // stride, channels).permute(0, 3, 1, 2)

    @torch.library.register_fake("mose_fast::align_conv")
    def _fake(pointwise, weight, bias, mean, var, batches, momentum, eps, training, keeps_map, x, _, stride, *others):
        out_channels, channels = pointwise.shape
        state = x.new_empty(4, out_channels, dtype=torch.float32)
        kept = _new_map(x, channels, stride) if keeps_map else x.new_empty(0)
        return _new_map(x, out_channels, stride), state, kept

    @torch.library.register_fake("mose_fast::align_conv_depthwise")
    def _fake_depthwise(x, depthwise, stride, *others):
        return _new_map(x, x.shape[1], stride)

    @torch.library.register_fake("mose_fast::align_conv_grad_y")
    def _fake_grad_y(grad, grad_state, y, state, mean_rest, weight, has_bias, training, pointwise, kept, *valid):
        vector = y.new_empty(y.shape[1], dtype=torch.float32)
        return (
            torch.empty_like(y) if kept is None else None,
            None if pointwise is None else _new_map(y, pointwise.shape[1], 1),
            None if kept is None else torch.empty_like(pointwise),
            None if grad_state is None or weight is None else vector,
            None if grad_state is None or not has_bias else torch.empty_like(vector),
        )

    @torch.library.register_fake("mose_fast::align_conv_backward")
    def _fake_backward(grad, wants, x, depthwise, stride, prologue, gate, *valid):
        inputs = (x, depthwise, prologue, gate)
        return tuple(torch.empty_like(t) if want else None for t, want in zip(inputs, wants, strict=True))
