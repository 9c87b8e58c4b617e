"""The replay memory's work in one step: it stores 10 new images, then draws 22 slots of the current
task and 64 of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import Case, choose
from mose_fast.ops import reservoir
from mose_fast.reference import reservoir as reference

#: torch.compile takes minutes over the reference's rounds of Philox (see
#: bench_augment_parameters.py).
IMPLEMENTATIONS = ("reference", "native")

BATCH, OF_TASK, OF_OTHERS = 10, 22, 64


def make_call(case: Case) -> Callable[[], object]:
    insert = choose(case, reference.insert, reservoir.insert)
    draw = choose(case, reference.draw, reservoir.draw)
    slots, side = case.shape["M"], case.shape["H"]
    images = torch.zeros(slots, side, side, 3, dtype=torch.uint8)
    tasks = torch.arange(slots) % 10
    memory = [images, torch.zeros_like(tasks), tasks, torch.arange(slots), torch.tensor([7, 0, 2 * slots])]
    batch = torch.randint(0, 256, (BATCH, side, side, 3), dtype=torch.uint8)
    images, labels, tasks, indices, state, x = (tensor.to(case.device) for tensor in [*memory, batch])
    numbers = torch.arange(BATCH, device=case.device)

    def step() -> None:
        insert(images, labels, tasks, indices, state, x, numbers, 3, numbers)
        draw(tasks, state, OF_TASK, reservoir.SlotFilter.ONLY, 3)
        draw(tasks, state, OF_OTHERS, reservoir.SlotFilter.OTHERS, 3)

    return step


@pytest.mark.parametrize(("slots", "side"), [(1000, 32), (5000, 32), (5000, 64)])
def bench_reservoir(measure, impl, device, slots, side):
    target = 15.0 if (slots, side) == (5000, 32) else None
    shape, captured = {"M": slots, "H": side}, impl == "native"
    case = Case("reservoir", impl, device, torch.uint8, shape=shape, target_us=target, captured=captured)
    measure(case, make_call)
