"""The step that bench/bench_step.py measures, with and without streams for its branches."""

from __future__ import annotations

import pytest
import torch

from bench.bench_step import make_call
from bench.common import Case
from mose_fast import _loader
from tests.races.simulated_gpu import SimulatedGpu

pytestmark = pytest.mark.skipif(_loader.native is None, reason="there is no native library, which has Adam")


@pytest.mark.parametrize("branches", [True, False])
def test_the_step_is_ordered(branches):
    case = Case("step", "native", "cuda", torch.float32, "forward+backward", {"N": 6, "K": 10, "E": 4, "W": 8})
    with SimulatedGpu() as gpu:
        call = make_call(case, branches)
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    assert not gpu.races, [*map(str, gpu.races)]
    assert (len(gpu.streams) > 1) == branches
