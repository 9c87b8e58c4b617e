"""All losses of a step of MOSE after the first task: a third of the N rows is new, four experts,
released settings.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import CLASSES, DIRECTIONS, HEADLINE, SIZES, Case, choose, skip_on_cpu, with_gradients
from mose_fast.ops.expert_losses import expert_losses
from mose_fast.reference.expert_losses import expert_losses as reference

#: Microseconds wanted on a Hopper GPU for forward and backward at N = 384, K = 100.
TARGETS = {torch.bfloat16: 40.0, torch.float32: 80.0}


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, expert_losses)
    experts, rows, projection, classes, features = (case.shape[name] for name in "ENPKD")
    current = classes // 10
    student, *others = (
        torch.randn(shape, device=case.device, dtype=case.dtype, requires_grad=case.backward)
        for shape in ((rows, features), (experts, rows, projection), (experts, rows, classes))
    )
    teachers = torch.randn(experts, rows, features, device=case.device, dtype=case.dtype)
    new_rows = rows // 3
    labels = torch.cat([torch.randint(0, current, (new_rows,)), torch.randint(0, classes, (rows - new_rows,))]).to(
        case.device
    )
    mask = (torch.arange(classes) < current).to(case.device)

    def losses() -> torch.Tensor:
        return function(*others, teachers, student, labels, new_rows, mask)

    return with_gradients(losses, [student, *others]) if case.backward else losses


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_expert_losses(measure, impl, device, dtype, direction, rows, classes):
    headline = (direction, rows, classes) == (DIRECTIONS[1], HEADLINE, CLASSES[0])
    shape = {"E": 4, "N": rows, "P": 128, "K": classes, "D": 512}
    skip_on_cpu(device, dtype)
    measure(
        Case("expert_losses", impl, device, dtype, direction, shape, TARGETS[dtype] if headline else None), make_call
    )
