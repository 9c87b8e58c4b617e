"""One step of Adam for MOSE's network with half-precision copies of its weights: FlatAdam against
PyTorch's fused Adam and copies. With ``A=1`` also a moving average of the weights and its copies.

The gradients of convolutions and linear maps are bfloat16 for FlatAdam, as its shadows' are, and
float32 for PyTorch's, as its weights' are. ``P`` counts weights.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import Case, choose
from mose_fast.nn import ExpertNetwork
from mose_fast.optim import FlatAdam

#: There is nothing for torch.compile to do: PyTorch's step is fused already.
IMPLEMENTATIONS = ("reference", "native")

#: By the network's width and averages. 28 bytes a weight, 38 with averages, at 3/4 of an H200's
#: copy rate, and three launches.
TARGETS = {(64, False): 130.0, (64, True): 170.0, (20, False): None, (20, True): None}
RATE = 0.01


def network(width: int, device: str = "cpu") -> ExpertNetwork:
    return ExpertNetwork(100, width=width).to(device, memory_format=torch.channels_last)


def make_call(case: Case) -> Callable[[], object]:
    net = network(case.shape["W"], case.device)
    parameters = list(net.parameters())
    averaged = "A" in case.shape

    def flat() -> Callable[[], object]:
        average_rate = RATE if averaged else None
        optimiser = FlatAdam(parameters, weight_decay=1e-4, shadow_dtype=torch.bfloat16, average_rate=average_rate)
        for leaf in optimiser.leaves:
            leaf.grad = torch.randn_like(leaf)
        return optimiser.step

    def fused() -> Callable[[], object]:
        optimiser = torch.optim.Adam(parameters, weight_decay=1e-4, fused=True, capturable=case.device == "cuda")
        averages = [p.detach().clone() for p in parameters] if averaged else []
        copied = [x for x in [*parameters, *averages] if x.dim() > 1]
        copies = [torch.empty_like(x, dtype=torch.bfloat16) for x in copied]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)

        def step() -> None:
            optimiser.step()
            with torch.no_grad():
                if averaged:
                    torch._foreach_lerp_(averages, parameters, RATE)
                torch._foreach_copy_(copies, copied)

        return step

    return choose(case, fused, flat)()


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("width", [20, 64])
def bench_adam(measure, impl, device, width, averages):
    weights = sum(p.numel() for p in network(width).parameters())
    shape, moved = {"P": weights, "W": width} | ({"A": 1} if averages else {}), (38 if averages else 28) * weights
    target = TARGETS[width, averages]
    measure(
        Case("adam", impl, device, torch.float32, "forward", shape, target, bytes_needed=moved, bytes_moved=moved),
        make_call,
    )
