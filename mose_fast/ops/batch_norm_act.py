"""Batch norm with what surrounds it in a residual network: an add and a ReLU behind, the norm and ReLU of another layer before.

The statistics and everything else are computed in float32 (float64 for float64 maps), whatever autocast says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.reference import batch_norm as reference_norm
from mose_fast.reference import batch_norm_act as reference
from mose_fast.reference.batch_norm import Norm

__all__ = ["MOST_CONSUMERS", "Norm", "batch_norm_act", "norm_state"]

#: Gradients that one backward pass adds up.
MOST_CONSUMERS = 8

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _check_map(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {x!r}; wanted a torch.Tensor")
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype}; wanted float32, float64, bfloat16 or float16")
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted [N, C, H, W]")


def _check_norm(name: str, norm: Norm, x: Tensor) -> None:
    if not isinstance(norm, Norm):
        raise TypeError(f"{name} is {norm!r}; wanted a Norm, as Norm.of(module) returns it")
    for part in ("weight", "bias", "running_mean", "running_var"):
        vector = getattr(norm, part)
        if vector is not None and tuple(vector.shape) != (x.shape[1],):
            raise ValueError(f"{name}.{part} has shape {tuple(vector.shape)}; wanted ({x.shape[1]},), the map's channels")
        if vector is not None and vector.device != x.device:
            raise ValueError(f"{name}.{part} is on {vector.device}; wanted {x.device}, where the map is")
    if not norm.training and (norm.running_mean is None or norm.running_var is None):
        raise ValueError(f"{name}.training is False without running statistics; wanted both")


def _check_rows(valid_rows: int | Tensor | None, x: Tensor) -> None:
    if isinstance(valid_rows, Tensor):
        if valid_rows.dtype != torch.int32 or valid_rows.dim() != 0:
            raise TypeError(f"valid_rows is {valid_rows.dtype} {tuple(valid_rows.shape)}; wanted None, an int or an int32 scalar")
        if valid_rows.device != x.device:
            raise ValueError(f"valid_rows is on {valid_rows.device}; wanted {x.device}, where x is")
    elif valid_rows is not None and (isinstance(valid_rows, bool) or not isinstance(valid_rows, int) or not 0 <= valid_rows <= len(x)):
        raise ValueError(f"valid_rows is {valid_rows!r}; wanted 0 to {len(x)}, the images of x")


def _check_elements(norm: Norm, x: Tensor, valid_rows: int | Tensor | None) -> None:
    rows = len(x) if valid_rows is None else valid_rows
    if norm.training and not isinstance(rows, Tensor) and rows * x.shape[2] * x.shape[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


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
    """y = relu(norm(x') + r), with batch norm as Ioffe and Szegedy 2015 define it (running statistics as PyTorch's).

    Args:
        x: [N, C, H, W], float32, bfloat16 or float16; float64 is computed by the reference.
        norm: Parameters and running statistics; in training the latter are updated in place.
        relu: Without, y = norm(x') + r.
        residual: r, of the shape of ``x``; another dtype is cast to that of ``x``.
        residual_norm: r is this norm of ``residual``: the two norms of a block that changes the shape, in one pass.
        prologue: The state [4, C], float32, of the norm of the layer before: x' = relu(scale (x - mean) + shift) instead of x,
            computed while ``x`` is read and never rounded to its dtype. Not together with ``residual``.
        consumers: How many results are wanted, 1 to 8. They are the same values in the same memory; autograd sends each its own
            gradient, and the backward pass adds them up while it loads them. Do not change one in place.
        valid_rows: Images from this one on are padding: never read, never counted, zero in the result and in every gradient. None: there
            is none. An int32 scalar on the device of ``x`` is read by the kernel, so that a captured graph serves any number.

    Returns:
        y, of the shape and dtype of ``x``; a tuple of them if ``consumers`` is not 1.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or a number does not fit; one element a channel in training.
    """
    _check_map("x", x)
    _check_norm("norm", norm, x)
    _check_rows(valid_rows, x)
    _check_elements(norm, x, valid_rows)
    if residual is not None:
        _check_map("residual", residual)
        if residual.shape != x.shape or residual.device != x.device:
            raise ValueError(
                f"residual has shape {tuple(residual.shape)} on {residual.device}; wanted {tuple(x.shape)} on {x.device}, as x has"
            )
    if residual_norm is not None:
        if residual is None:
            raise ValueError("residual is None with a residual_norm; wanted the map that it normalises")
        _check_norm("residual_norm", residual_norm, x)
        _check_elements(residual_norm, x, valid_rows)
    if prologue is not None:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if not isinstance(prologue, Tensor) or prologue.dtype != wide:
            raise TypeError(f"prologue is {getattr(prologue, 'dtype', prologue)}; wanted a state of {wide}")
        if tuple(prologue.shape) != (4, x.shape[1]) or prologue.device != x.device:
            raise ValueError(
                f"prologue has shape {tuple(prologue.shape)} on {prologue.device}; wanted (4, {x.shape[1]}) on {x.device}"
            )
        if residual is not None:
            raise ValueError("prologue and residual are both given; wanted at most one of them")
    if isinstance(consumers, bool) or not isinstance(consumers, int) or not 1 <= consumers <= MOST_CONSUMERS:
        raise ValueError(f"consumers is {consumers!r}; wanted 1 to {MOST_CONSUMERS}")
    return reference.batch_norm_act(
        x,
        norm,
        relu=relu,
        residual=residual,
        residual_norm=residual_norm,
        prologue=prologue,
        consumers=consumers,
        valid_rows=valid_rows,
    )


def norm_state(x: Tensor, norm: Norm, valid_rows: int | Tensor | None = None) -> Tensor:
    """The statistics' half alone: the state that :func:`batch_norm_act` and the alignment ops take as a prologue.

    Args:
        x: [N, C, H, W], float32, bfloat16 or float16; float64 is computed by the reference.
        norm: As in :func:`batch_norm_act`.
        valid_rows: As in :func:`batch_norm_act`.

    Returns:
        float32 (float64) [4, C]: mean, inverse deviation, scale (weight x inverse deviation), shift (bias). Differentiable.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or a number does not fit; one element a channel in training.
    """
    _check_map("x", x)
    _check_norm("norm", norm, x)
    _check_rows(valid_rows, x)
    _check_elements(norm, x, valid_rows)
    return reference_norm.norm_state(x, norm, valid_rows)
