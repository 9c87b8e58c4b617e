"""Batch norm, add and ReLU at the shapes of the backbone: a first norm of a block, a second one
with its residual, and both of a block that changes the shape, whose result goes to two layers.
``reference`` on a card is PyTorch's own norm, cuDNN's where it takes it.

On the CPU the op is PyTorch's operations: there is no native row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.common import DIRECTIONS, HEADLINE, SIZES, Case, choose
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.reference.batch_norm_act import batch_norm_act as reference

#: Consumers, and maps read or written forward and backward, of each form.
FORMS = {"plain": (1, 3, 5), "residual": (2, 4, 7), "two_norms": (2, 5, 10)}
#: Channels and side of the backbone's stages at 32x32.
STAGES = ((64, 32), (128, 16), (256, 8), (512, 4))
#: Bytes a microsecond: three quarters of what a copy reached on an H200, and microseconds a launch.
BANDWIDTH, LAUNCH = 0.75 * 4.17e6, 3.0


def bytes_moved(elements: int, itemsize: int, form: str, consumers: int, backward: bool) -> int:
    """Bytes that this op moves, and needs to move: it must read the map twice, since the statistics
    must be known before the map can be normalised.

    Args:
        elements: The number of elements of the map.
        itemsize: Bytes of an element.
        form: One of :data:`FORMS`.
        consumers: The number of gradients of the result; each is read twice, or once if their sum
            is written as the residual's gradient.
        backward: Count the backward pass too.
    """
    usual, maps, back = FORMS[form]
    masks = 0
    if backward:
        maps += back + (consumers - usual) * (1 if form == "residual" else 2)
        masks = 2 if form == "residual" else 3
    return elements * maps * itemsize + elements * masks // 8


def moved(case: Case, form: str) -> int:
    """:func:`bytes_moved` of a case."""
    elements = case.shape["N"] * case.shape["C"] * case.shape["H"] ** 2
    return bytes_moved(elements, case.dtype.itemsize, form, case.shape["k"], case.direction != "forward")


def target(case: Case, form: str) -> float:
    """Microseconds for these bytes; the masks are a sixteenth of a map of 16 bits each time."""
    return round((2 if case.direction == "forward" else 4) * LAUNCH + moved(case, form) / BANDWIDTH, 1)


def make_call(case: Case, form: str) -> Callable[[], object]:
    function = choose(case, reference, batch_norm_act)
    images, channels, side, consumers = (case.shape[name] for name in "NCHk")
    trains = case.direction != "forward"

    def new_map() -> torch.Tensor:
        x = torch.randn(images, channels, side, side, device=case.device, dtype=case.dtype)
        return x.contiguous(memory_format=torch.channels_last)

    norms = [nn.BatchNorm2d(channels, device=case.device).requires_grad_(trains) for _ in range(2)]
    inputs = [new_map().requires_grad_(trains) for _ in range(1 if form == "plain" else 2)]
    options = {"residual": inputs[1]} if form != "plain" else {}
    if form == "two_norms":
        options["residual_norm"] = Norm.of(norms[1])
    norm = Norm.of(norms[0])

    def forward() -> torch.Tensor | tuple[torch.Tensor, ...]:
        return function(inputs[0], norm, consumers=consumers, **options)

    if not trains:
        return forward
    leaves = [*inputs, *norms[0].parameters(), *(norms[1].parameters() if form == "two_norms" else ())]
    grads = [new_map() for _ in range(consumers)]
    return lambda: torch.autograd.grad(forward(), leaves, grads if consumers > 1 else grads[0])


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage[0]}x{stage[1]}")
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_batch_norm_act(measure, impl, device, dtype, direction, form, rows, stage):
    if rows != HEADLINE and (form, stage) != ("plain", STAGES[0]):
        pytest.skip("other sizes than a full step: the first norm alone")
    if impl == "compiled" and stage != STAGES[0]:
        pytest.skip("torch.compile takes seconds a shape: the first stage alone")
    if device == "cpu" and (dtype != torch.float32 or impl == "native"):
        pytest.skip("CPU rows are float32, of PyTorch's operations")
    if device == "cuda" and dtype == torch.float32 and form != "plain":
        pytest.skip("float32 on a card: the first norm alone")
    shape = {"N": rows, "C": stage[0], "H": stage[1], "k": FORMS[form][0]}
    case = Case(f"batch_norm_act {form}", impl, device, dtype, direction, shape)
    case = replace(case, bytes_needed=moved(case, form), bytes_moved=moved(case, form))
    if dtype == torch.bfloat16 and rows == HEADLINE:
        case = replace(case, target_us=target(case, form))
    measure(case, lambda case: make_call(case, form))
