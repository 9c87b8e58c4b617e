"""Batch norm, add and ReLU at the shapes of the backbone: a first norm of a block, a second one
with its residual, and both of a block that changes the shape, whose result goes to two layers.
``reference`` on a GPU is PyTorch's own norm, cuDNN's where it takes it.

On the CPU the op is PyTorch's operations: there is no native row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.common import DIRECTIONS, HEADLINE, SIZES, Case, choose, new_map, skip_on_cpu, target_us
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.reference.batch_norm_act import batch_norm_act as reference

#: Consumers, and maps read or written forward and backward, of each form.
FORMS = {"plain": (1, 3, 5), "residual": (2, 4, 7), "two_norms": (2, 5, 10)}
#: Channels and side of the backbone's stages at 32x32.
STAGES = ((64, 32), (128, 16), (256, 8), (512, 4))


def bytes_moved(case: Case, form: str) -> int:
    """Bytes that this op moves, and needs to move: it must read the map twice, since the statistics
    must be known before the map can be normalised. The masks have a bit an element.
    """
    elements = case.shape["N"] * case.shape["C"] * case.shape["H"] ** 2
    _, maps, back = FORMS[form]
    masks = 0
    if case.backward:
        maps += back
        masks = 2 if form == "residual" else 3
    return elements * maps * case.dtype.itemsize + elements * masks // 8


def make_call(case: Case, form: str) -> Callable[[], object]:
    function = choose(case, reference, batch_norm_act)
    images, channels, side, consumers = (case.shape[name] for name in "NCHk")
    trains = case.backward
    norms = [nn.BatchNorm2d(channels, device=case.device).requires_grad_(trains) for _ in range(2)]
    inputs = [new_map(case, images, channels, side).requires_grad_(trains) for _ in range(1 if form == "plain" else 2)]
    options = {"residual": inputs[1]} if form != "plain" else {}
    if form == "two_norms":
        options["residual_norm"] = Norm.of(norms[1])
    norm = Norm.of(norms[0])

    def forward() -> torch.Tensor | tuple[torch.Tensor, ...]:
        return function(inputs[0], norm, consumers=consumers, **options)

    if not trains:
        return forward
    leaves = [*inputs, *norms[0].parameters(), *(norms[1].parameters() if form == "two_norms" else ())]
    grads = [new_map(case, images, channels, side) for _ in range(consumers)]
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
    skip_on_cpu(device, dtype, impl)
    if device == "cuda" and dtype == torch.float32 and form != "plain":
        pytest.skip("float32 on a GPU: the first norm alone")
    shape = {"N": rows, "C": stage[0], "H": stage[1], "k": FORMS[form][0]}
    case = Case(f"batch_norm_act {form}", impl, device, dtype, direction, shape)
    moved = bytes_moved(case, form)
    case = replace(case, bytes_needed=moved, bytes_moved=moved)
    if dtype == torch.bfloat16 and rows == HEADLINE:
        case = replace(case, target_us=target_us(4 if case.backward else 2, moved))
    measure(case, lambda case: make_call(case, form))
