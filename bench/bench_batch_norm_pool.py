"""The backbone's last norm with residual, ReLU and pool: 512 channels of 4x4 (8x8 for 64x64 images)
pixels. ``reference`` is PyTorch's own operations.

On the CPU the op is other ops: there is no native row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench.common import DIRECTIONS, HEADLINE, SIZES, Case, choose, new_map, skip_on_cpu
from mose_fast.ops.batch_norm_pool import Norm, batch_norm_pool
from mose_fast.reference.batch_norm_act import batch_norm_act as reference_norm
from mose_fast.reference.norm_pool import norm_pool as reference_pool

#: Microseconds wanted on a Hopper GPU for forward and backward at N = 384, 4x4, in bf16: six maps
#: at three quarters of the rate of a copy, four launches.
TARGET = 24.0


def reference(x: Tensor, norm: Norm, residual: Tensor) -> Tensor:
    return reference_pool(reference_norm(x, norm, residual=residual))


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, batch_norm_pool)
    rows, channels, side = (case.shape[name] for name in "NCH")
    trains = case.backward
    x, residual = (new_map(case, rows, channels, side).requires_grad_(trains) for _ in range(2))
    module = nn.BatchNorm2d(channels, device=case.device).requires_grad_(trains)
    norm = Norm.of(module)
    grad = torch.randn(rows, channels, device=case.device, dtype=case.dtype)
    if not trains:
        return lambda: function(x, norm, residual)
    leaves = [x, residual, *module.parameters()]
    return lambda: torch.autograd.grad(function(x, norm, residual), leaves, grad)


@pytest.mark.parametrize("side", [4, 8])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_batch_norm_pool(measure, impl, device, dtype, direction, rows, side):
    skip_on_cpu(device, dtype, impl)
    if impl == "compiled" and side != 4:
        pytest.skip("torch.compile is measured at 4x4 alone")
    headline = (dtype, direction, rows, side) == (torch.bfloat16, DIRECTIONS[1], HEADLINE, 4)
    elements, backward = rows * 512 * side**2, direction != "forward"
    # Forward x twice, the residual and a mask of one bit an element; backward x and the mask, and
    # two gradients.
    moved = elements * (6 if backward else 3) * dtype.itemsize + elements * (2 if backward else 0) // 8
    shape = {"N": rows, "C": 512, "H": side}
    target = TARGET if headline else None
    measure(
        Case("batch_norm_pool", impl, device, dtype, direction, shape, target, bytes_needed=moved, bytes_moved=moved),
        make_call,
    )
