"""One training step of MOSE on prepared views: forward, losses, backward, Adam; for the whole
network and for its backbone alone.

``reference`` is PyTorch's own modules under autocast with its Adam, ``compiled`` the same with
network and losses compiled, ``native`` the fused ops, on a GPU with bf16 copies of the float32
weights. The row ``backbone`` is the network without alignment modules, gates and the first three
experts; the difference is the cost of what MOSE adds. ``one_stream`` is the whole step without
streams for the branches of the first three experts (``ExpertNetwork.side_streams``).

``--cudnn-search=N`` lets cuDNN search for algorithms (``cudnn.benchmark``) among N candidates a
convolution, 0: among all. It wants a process of its own, since PyTorch keeps the algorithm that it
first took for a shape, whether it has searched or not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from bench.common import HEADLINE, Case, choose
from mose_fast.losses import ExpertLosses
from mose_fast.methods.mose import MoseOptions
from mose_fast.nn import ExpertNetwork
from mose_fast.optim import FlatAdam

#: The target for a whole step in bf16 on a Hopper GPU, in microseconds.
TARGET = 6000.0


def make_call(case: Case, branches: bool = True) -> Callable[[], object]:
    """Returns a call that takes one step, the experts' branches on streams of their own or not."""
    rows, classes, experts = (case.shape[name] for name in "NKE")
    options = MoseOptions(
        experts=experts, attention=experts > 1, adapter=experts > 1, distillation="rsd" if experts > 1 else "off"
    )
    network = ExpertNetwork(
        classes, width=case.shape["W"], experts=experts, attention=options.attention, adapter=options.adapter
    )
    network.use_kernels("fused" if case.impl == "native" else "torch")
    network = network.to(case.device, memory_format=torch.channels_last)
    network.side_streams.on = branches
    views = torch.randn(rows, 3, 32, 32, device=case.device).contiguous(memory_format=torch.channels_last)
    new_rows, current = rows // 3, classes // 10
    labels = torch.cat([torch.randint(0, current, (new_rows,)), torch.randint(0, classes, (rows - new_rows,))]).to(
        case.device
    )
    mask = (torch.arange(classes) < current).to(case.device)
    losses = ExpertLosses(options)
    adam = {"lr": options.lr, "weight_decay": options.weight_decay}
    half = case.dtype == torch.bfloat16

    if case.impl == "native":
        optimiser = FlatAdam(network.parameters(), **adam, shadow_dtype=case.dtype if half else None)
        names = [name for name, _ in network.named_parameters()]
        views = views.to(case.dtype)

        def forward() -> Tensor:
            outputs = functional_call(network, dict(zip(names, optimiser.leaves, strict=True)), (views,))
            return losses(outputs, labels, new_rows, mask).sum()
    else:
        optimiser = torch.optim.Adam(network.parameters(), **adam, capturable=case.device == "cuda")

        def forward() -> Tensor:
            with torch.autocast(case.device, torch.bfloat16, enabled=half):
                outputs = network(views)
            return losses(outputs, labels, new_rows, mask).sum()

    forward = choose(case, forward, forward)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        forward().backward()
        optimiser.step()

    return step


@pytest.mark.parametrize("part", ["whole", "backbone", "one_stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_step(request, measure, impl, device, dtype, part):
    whole, op = part != "backbone", "step"
    # The CPU shows the same code at a size that takes a second, not a minute.
    rows, width = (HEADLINE, 64) if device == "cuda" else (48, 16)
    if device == "cpu" and (dtype != torch.float32 or impl == "compiled"):
        pytest.skip("CPU rows are float32, eager")
    if part == "one_stream":
        op = "step on one stream"
        if (device, impl) != ("cuda", "native"):
            pytest.skip("only the native step on a GPU has streams for its branches")
    searched = request.config.getoption("--cudnn-search")
    if searched is not None:
        op += f", cuDNN's search among {searched or 'all'}"
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, searched
    target = TARGET if whole and dtype == torch.bfloat16 else None
    shape = {"N": rows, "K": 100, "E": 4 if whole else 1, "W": width}
    case = Case(op, impl, device, dtype, "forward+backward", shape, target)
    measure(case, lambda case: make_call(case, branches=part != "one_stream"))
