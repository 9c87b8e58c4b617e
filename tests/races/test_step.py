"""The step that bench/bench_step.py measures, with and without streams for its branches; a captured
step of Adam.
"""

from __future__ import annotations

import pytest
import torch

from bench.bench_step import make_call
from bench.common import Case
from mose_fast import _loader
from mose_fast.optim import FlatAdam
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


def test_a_captured_step_of_adam_moves_the_averages():
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = torch.randn(4, 7, 3, generator=generator)

    def optimiser_on(device):
        parameter = torch.nn.Parameter(weights.clone().to(device))
        return FlatAdam([parameter], lr=0.1, shadow_dtype=torch.bfloat16, average_rate=0.3)

    on_cpu = optimiser_on("cpu")
    for gradient in gradients:
        on_cpu.step([gradient])
    with SimulatedGpu() as gpu:
        optimiser, static, graph = optimiser_on("cuda"), gradients[0].to("cuda"), torch.cuda.CUDAGraph()
        optimiser.step([static])
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            optimiser.step([static])
        for gradient in gradients[1:]:
            static.copy_(gradient)
            graph.replay()
        torch.cuda.synchronize()
        found = [x.cpu() for x in (*optimiser.averages, *optimiser.average_leaves)]
    assert not gpu.races, [*map(str, gpu.races)]
    wanted = [*on_cpu.averages, *on_cpu.average_leaves]
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
