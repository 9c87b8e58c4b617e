"""Depthwise 3x3 and pointwise 1x1 convolution that read the norm before them and leave behind the statistics of the norm after them.

What the alignment modules and attention gates are made of: a chain of ``align_conv`` writes neither a normalised nor a gated map.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.reference import align_conv as reference
from mose_fast.reference.align_conv import AlignedMap
from mose_fast.reference.batch_norm import Norm

__all__ = ["AlignedMap", "Norm", "align_conv"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}; wanted a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; wanted {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; wanted {device}, where x is")


def _check_rows(valid_rows: int | Tensor | None, rows: int, device: torch.device) -> None:
    if valid_rows is None:
        return
    if isinstance(valid_rows, Tensor):
        if valid_rows.dtype != torch.int32 or valid_rows.dim() != 0:
            raise TypeError(f"valid_rows is {valid_rows.dtype} {tuple(valid_rows.shape)}; wanted an int or an int32 scalar")
        if valid_rows.device != device:
            raise ValueError(f"valid_rows is on {valid_rows.device}; wanted {device}, where x is")
        if device.type != "cpu":
            return  # its value is known to the kernel alone
        valid_rows = int(valid_rows)
    if isinstance(valid_rows, bool) or not isinstance(valid_rows, int) or not 0 <= valid_rows <= rows:
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
        raise TypeError(f"x has dtype {x.dtype} and layout {x.layout}; wanted float32, float64, bfloat16 or float16, strided")
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
        raise ValueError(f"pointwise is {getattr(pointwise, 'shape', pointwise)!r}; wanted [out_channels, {channels}, 1, 1]")
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
    counted = rows if valid_rows is None or isinstance(valid_rows, Tensor) else valid_rows
    if norm.training and rows > 0 and counted * (height // stride) * (width // stride) <= 1:
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
    """y = pointwise(depthwise(x')) without biases, and the state of ``norm`` over y (paper's alignment modules; mose.md section 2).

    x' is ``x``, or with ``prologue`` relu(scale (x - mean) + shift), with ``gate`` times sigmoid(up(gate)), where ``up`` doubles both
    sides bilinearly (corners not aligned). Neither x' nor norm(y) is written: the next ``align_conv`` takes ``state`` as its prologue.
    Both results are differentiable, once, towards x, both weights, the norm's weight and bias, prologue and gate. In training the running
    statistics are updated in place. Autocast changes nothing; sums are in float32 (float64) and in a fixed order.

    Args:
        x: [N, C, H, W], float32, bfloat16, float16 or (on the CPU) float64; kernels want channels_last memory.
        depthwise: [C, 1, 3, 3], padding 1. A weight of another type than ``x`` is cast to it; its gradient comes in its own.
        pointwise: [O, C, 1, 1].
        norm: Of y; vectors [O] in float32 (float64 beside float64).
        stride: Of the depthwise convolution, 1 or 2; 2 wants even H and W.
        prologue: [4, C], the state of the norm over ``x`` (``AlignedMap.state`` or ``norm_state``), float32 (float64); None: x' = x.
        gate: [N, C, H/2, W/2] in the type of ``x``; wants even H and W.
        valid_rows: Images from this one on are padding: never read, zero in y and in every gradient, not counted. None, an int, or an
            int32 scalar tensor beside ``x``, whose value a captured graph reads anew at each replay.

    Returns:
        AlignedMap(y [N, O, H/stride, W/stride] in the type of ``x``, state [4, O] in float32 or float64).

    Raises:
        TypeError: A dtype or layout does not fit.
        ValueError: A shape, a device, ``stride`` or ``valid_rows`` does not fit; one element a channel in training, PyTorch's own error.
    """
    _check(x, depthwise, pointwise, norm, stride, prologue, gate, valid_rows)
    return reference.align_conv(
        x, depthwise, pointwise, norm, stride=stride, prologue=prologue, gate=gate, valid_rows=valid_rows,
    )  # fmt: skip
