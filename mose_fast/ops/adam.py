"""One step of Adam over flat buffers.

Native code serves the CPU and CUDA and never waits for the device. On CUDA a call is one small
launch (the latch, counts of steps, bias corrections) and one launch for every 160 tensors.
:class:`mose_fast.optim.FlatAdam` is the optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops.checks import check_tensor, require
from mose_fast.reference import adam as reference

#: The largest number of gradients in one call.
MOST_TENSORS = 24576

_GRADIENTS = (torch.float32, torch.bfloat16)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory without gaps, in any order of dimensions."""
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
    average: Tensor | None = None,
    average_shadow: Tensor | None = None,
    average_rate: float = 0.0,
) -> None:
    """Takes one step of Adam with coupled weight decay, in place: ``torch.optim.Adam`` over all
    parameters at once.

    For each parameter with gradient g, after t <- t + 1 and g <- g + weight_decay w::

        m <- m + (1 - beta1) (g - m)
        v <- beta2 v + (1 - beta2) g^2
        w <- w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        a <- a + average_rate (w - a)

    Args:
        master: float32 [P], the weights w.
        exp_avg: float32 [P], the first moments m.
        exp_avg_sq: float32 [P], the second moments v.
        gradients: One per parameter, float32 or bfloat16, of any shape, in dense memory;
            elements are read in memory order. None leaves the parameter, its moments, its average
            and its count of steps unchanged.
        offsets: The parameters' first positions in the flat buffers, ascending, without overlap.
            Elements between parameters are not changed.
        steps: float32, one count t per parameter; each advances by 1.
        lr: float32 scalar, the learning rate.
        beta1: Decay of the first moments, in [0, 1).
        beta2: Decay of the second moments, in [0, 1).
        eps: Term added to the root of the second moment, at least 0.
        weight_decay: Factor of the weight that is added to its gradient, at least 0.
        shadow: bfloat16 [P], receives the new weights, rounded; None: no copy.
        loss: float32, one element; if it is not finite, nothing is written and ``latch`` is set.
        latch: bool scalar; while it is set, nothing is written, whatever the loss.
        average: float32 [P], the moving average a of the weights; None: there is none.
        average_shadow: bfloat16 [P], receives the new average, rounded; None: no copy.
        average_rate: How far the average moves towards the new weight, from 0 to 1.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device, an offset or a number does not fit, a gradient is not dense,
            there are more than :data:`MOST_TENSORS` parameters, or ``average_shadow`` comes without
            ``average``.

    Source: Kingma and Ba 2015, algorithm 1; mose_fast/reference/adam.py.
    """
    check_tensor("master", master, (torch.float32,), ("P",), contiguous=True)
    size, beside = len(master), ("master", master)
    flat = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    flat |= {} if average is None else {"average": average}
    for name, buffer in flat.items():
        check_tensor(name, buffer, (torch.float32,), (size,), beside=beside, contiguous=True)
    for name, copy in (("shadow", shadow), ("average_shadow", average_shadow)):
        if copy is not None:
            check_tensor(name, copy, (torch.bfloat16,), (size,), beside=beside, contiguous=True)
    if average is None and average_shadow is not None:
        raise ValueError("average_shadow is given and average is None; wanted the average that it rounds")
    require(0 <= average_rate <= 1, "average_rate", average_rate, "0 to 1")
    if len(gradients) != len(offsets) or len(gradients) > MOST_TENSORS:
        raise ValueError(
            f"there are {len(gradients)} gradients and {len(offsets)} offsets; wanted as many of both, at most"
            f" {MOST_TENSORS}"
        )
    check_tensor("steps", steps, (torch.float32,), (len(gradients),), beside=beside, contiguous=True)
    check_tensor("lr", lr, (torch.float32,), (), beside=beside)
    if latch is not None:
        check_tensor("latch", latch, (torch.bool,), (), beside=beside)
    if loss is not None:
        check_tensor("loss", loss, (torch.float32,), beside=beside)
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {tuple(loss.shape)}; wanted one element")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        require(0 <= beta < 1, name, beta, "0 to below 1")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        require(value >= 0, name, value, "at least 0")
    end = 0
    for position, (gradient, start) in enumerate(zip(gradients, offsets, strict=True)):
        if start < end:
            raise ValueError(
                f"offsets[{position}] is {start}; wanted at least {end}, where the parameter before it ends"
            )
        end = start
        if gradient is None:
            continue
        check_tensor(f"gradients[{position}]", gradient, _GRADIENTS, beside=beside)
        end += gradient.numel()
        if end > size:
            raise ValueError(f"parameter {position} ends at {end}; wanted at most {size}, the size of master")
        if not _is_dense(gradient):
            raise ValueError(
                f"gradients[{position}] has shape {tuple(gradient.shape)} and strides {gradient.stride()}; wanted dense"
                " memory"
            )
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    options |= {"shadow": shadow, "loss": loss, "latch": latch}
    options |= {"average": average, "average_shadow": average_shadow, "average_rate": average_rate}
    with torch.no_grad():
        if _loader.serves("adam", master):
            _loader.native.adam_step(master, exp_avg, exp_avg_sq, list(gradients), list(offsets), steps, lr, **options)
        else:
            reference.adam_step(master, exp_avg, exp_avg_sq, gradients, offsets, steps, lr, **options)
