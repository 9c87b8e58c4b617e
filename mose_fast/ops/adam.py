"""One step of Adam over flat buffers: every parameter, its half-precision copy and its moments in
one pass, nothing waits for the host.

Native code serves CPU and CUDA. On CUDA a call is one small launch (what freezes, counts of steps,
bias corrections) and one launch for every 108 tensors; gradients are read where they lie.
:class:`mose_fast.optim.FlatAdam` is the optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.reference import adam as reference

__all__ = ["MOST_TENSORS", "adam_step"]

#: Gradients that one call takes at most.
MOST_TENSORS = 24576

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_SHADOWS = (torch.bfloat16, torch.float16)


def _check(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None, device: torch.device
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}; wanted a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; wanted"
            f" {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
        )
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; wanted {device}, where master is")


def _check_buffer(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], size: int, device: torch.device) -> None:
    _check(name, tensor, dtypes, (size,), device)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has strides {tensor.stride()}; wanted contiguous memory, since it is changed in place"
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory without gaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradients: Sequence[Tensor | None],
    offsets: Sequence[int],
    steps: Tensor,
    lr: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    shadow: Tensor | None = None,
    loss: Tensor | None = None,
    latch: Tensor | None = None,
) -> None:
    """One step of Adam with coupled weight decay, in place, by the formulas of ``torch.optim.Adam``
    (mose_fast/reference/adam.py).

    Args:
        master: float32 [P], the weights.
        exp_avg: float32 [P], the first moments.
        exp_avg_sq: float32 [P], the second moments.
        gradients: One for each parameter, float32, bfloat16 or float16, of any shape, dense: it is
            read in the order in which it lies in memory. None: the parameter, its moments and its
            count of steps stay as they are.
        offsets: Where each parameter starts in the flat buffers, ascending; parameters do not
        overlap. What lies between stays as it is.
        steps: float32, one for each parameter: steps done so far; each advances by 1.
        lr: float32 scalar.
        beta1: Decay of the first moments, in [0, 1).
        beta2: Decay of the second moments, in [0, 1).
        eps: Added to the root of the second moment, at least 0.
        weight_decay: Times the weight is added to its gradient, at least 0.
        shadow: bfloat16 or float16 [P]: gets the new weights, rounded. None: there is none.
        loss: float32, one element: where it is not finite, nothing is written and ``latch`` is set.
        latch: bool scalar: where it is set, nothing is written, whatever the loss.

    Raises:
        TypeError: A dtype is not the one above.
        ValueError: A shape, a device, an offset or a number does not fit, a gradient is not dense,
            or there are more than :data:`MOST_TENSORS` parameters.
    """
    device = master.device if isinstance(master, Tensor) else torch.device("cpu")
    size = master.numel() if isinstance(master, Tensor) else 0
    for name, buffer in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check_buffer(name, buffer, (torch.float32,), size, device)
    if shadow is not None:
        _check_buffer("shadow", shadow, _SHADOWS, size, device)
    if len(gradients) != len(offsets) or len(gradients) > MOST_TENSORS:
        raise ValueError(
            f"there are {len(gradients)} gradients and {len(offsets)} offsets; wanted as many of both, at most"
            f" {MOST_TENSORS}"
        )
    _check_buffer("steps", steps, (torch.float32,), len(gradients), device)
    _check("lr", lr, (torch.float32,), (), device)
    if latch is not None:
        _check("latch", latch, (torch.bool,), (), device)
    if loss is not None:
        _check("loss", loss, (torch.float32,), None, device)
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {tuple(loss.shape)}; wanted one element")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta!r}; wanted 0 to below 1")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; wanted at least 0")
    end = 0
    for position, (gradient, start) in enumerate(zip(gradients, offsets, strict=True)):
        if start < end:
            raise ValueError(
                f"offsets[{position}] is {start}; wanted at least {end}, where the parameter before it ends"
            )
        end = start
        if gradient is None:
            continue
        _check(f"gradients[{position}]", gradient, _GRADIENTS, None, device)
        end += gradient.numel()
        if end > size:
            raise ValueError(f"parameter {position} ends at {end}; wanted at most {size}, the size of master")
        if not _is_dense(gradient):
            raise ValueError(
                f"gradients[{position}] has shape {tuple(gradient.shape)} and strides {gradient.stride()}; wanted dense"
                " memory"
            )
    options = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "shadow": shadow,
        "loss": loss,
        "latch": latch,
    }
    with torch.no_grad():
        if _loader.serves(master):
            _loader.native.adam_step(master, exp_avg, exp_avg_sq, list(gradients), list(offsets), steps, lr, **options)
        else:
            reference.adam_step(master, exp_avg, exp_avg_sq, gradients, offsets, steps, lr, **options)
