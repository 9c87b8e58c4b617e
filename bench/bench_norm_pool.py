"""The last norm's ReLU and the average pool of MOSE's four aligned maps' shape: 512 channels of 4x4
(8x8 for 64x64 images) pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import DIRECTIONS, HEADLINE, SIZES, Case, choose, new_map, skip_on_cpu
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.reference.norm_pool import norm_pool as reference

#: Microseconds wanted on a Hopper GPU for forward and backward at N = 384, 4x4: the map read twice
#: and written once, two launches.
TARGETS = {torch.bfloat16: 14.0, torch.float32: 22.0}


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, norm_pool)
    rows, channels, side = (case.shape[name] for name in "NCH")
    x = new_map(case, rows, channels, side).requires_grad_(case.backward)
    state = torch.randn(4, channels, device=case.device).requires_grad_(case.backward)
    grad = torch.randn(rows, channels, device=case.device, dtype=case.dtype)
    if not case.backward:
        return lambda: function(x, state)
    return lambda: torch.autograd.grad(function(x, state), [x, state], grad)


@pytest.mark.parametrize("side", [4, 8])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_norm_pool(measure, impl, device, dtype, direction, rows, side):
    skip_on_cpu(device, dtype)
    if impl == "compiled" and side != 4:
        pytest.skip("torch.compile is measured at 4x4 alone")
    target = TARGETS[dtype] if (direction, rows, side) == (DIRECTIONS[1], HEADLINE, 4) else None
    # The map read once forward; once more and written backward.
    moved = rows * 512 * side**2 * dtype.itemsize * (1 if direction == "forward" else 3)
    shape = {"N": rows, "C": 512, "H": side}
    measure(
        Case("norm_pool", impl, device, dtype, direction, shape, target, bytes_needed=moved, bytes_moved=moved),
        make_call,
    )
