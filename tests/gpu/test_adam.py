"""Adam on a GPU: against the CPU and torch.optim.Adam, in graphs, on streams, frozen by its
latch.
"""

from __future__ import annotations

import copy

import pytest
import torch

from mose_fast import _loader
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.adam import adam_step
from mose_fast.optim import FlatAdam

DEVICE = _loader.gpu()


def make(width=8, device=DEVICE, **options):
    torch.manual_seed(0)
    network = ExpertNetwork(10, width=width).to(device, memory_format=torch.channels_last)
    return network, FlatAdam(
        network.parameters(), **{"lr": 1e-2, "weight_decay": 1e-3, "shadow_dtype": torch.bfloat16, **options}
    )


def random_gradients(optimiser):
    return [torch.randn(leaf.shape).to(leaf.dtype).to(DEVICE).contiguous() for leaf in optimiser.leaves]


def everything(optimiser):
    moments = (optimiser._exp_avg, optimiser._exp_avg_sq, optimiser._steps)
    averages = (optimiser._average, optimiser._average_shadow)
    return [x.detach().clone() for x in (optimiser._master, optimiser._shadow, *moments, *averages)]


@pytest.mark.slow
def test_equal_to_torch_over_a_hundred_steps_and_to_the_cpu(gpu):
    network, optimiser = make(shadow_dtype=None, average_rate=0.1)
    on_cpu, cpu_optimiser = make(device="cpu", shadow_dtype=None, average_rate=0.1)
    twin = copy.deepcopy(network)
    theirs = torch.optim.Adam(twin.parameters(), lr=1e-2, weight_decay=1e-3)
    for _ in range(100):
        gradients = random_gradients(optimiser)
        optimiser.step(gradients)
        with gpu.spared():
            cpu_optimiser.step([g.cpu() for g in gradients])
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient
        theirs.step()
    for ours, other, cpu in zip(network.parameters(), twin.parameters(), on_cpu.parameters(), strict=True):
        assert (ours - other).abs().max() <= 1e-6
        assert (ours.cpu() - cpu).abs().max() <= 1e-6
    for ours, cpu in zip(optimiser.averages, cpu_optimiser.averages, strict=True):
        assert (ours.cpu() - cpu).abs().max() <= 1e-6


def test_shadows_are_rounded_as_pytorch_rounds():
    network, optimiser = make(average_rate=0.1)
    optimiser.step(random_gradients(optimiser))
    for parameter, copied in zip(network.parameters(), optimiser.shadows, strict=True):
        assert copied is None or torch.equal(copied, parameter.bfloat16())
    for average, leaf in zip(optimiser.averages, optimiser.average_leaves, strict=True):
        assert torch.equal(leaf, average.to(leaf.dtype))


def test_averages_change_no_weight_and_follow_those_that_have_a_gradient():
    """Against float64."""
    network, optimiser = make(average_rate=0.3)
    other, without = make()
    wanted = [average.double() for average in optimiser.averages]
    for step in range(5):
        gradients = random_gradients(optimiser)
        gradients[step] = gradients[-1] = None
        loss = torch.tensor(torch.nan if step == 3 else 1.0, device=DEVICE)
        for each in (optimiser, without):
            each.step(gradients, loss=loss)
            each.latch.fill_(False)
        for average, weight, gradient in zip(wanted, network.parameters(), gradients, strict=True):
            if gradient is not None and step != 3:
                average += 0.3 * (weight.detach().double() - average)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))
    for average, exact in zip(optimiser.averages, wanted, strict=True):
        assert (average - exact).abs().max() <= 1e-6


@pytest.mark.needs("graphs")
def test_replays_of_a_graph_count_steps_and_read_rate_loss_and_latch_anew():
    runs = []
    for captured in (False, True):
        _, optimiser = make(average_rate=0.3)
        torch.manual_seed(1)
        gradients = random_gradients(optimiser)
        loss = torch.ones((), device=DEVICE)

        def step(optimiser=optimiser, gradients=gradients, loss=loss):
            optimiser.step(gradients, loss=loss)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        step()
        optimiser.param_groups[0]["lr"].fill_(1e-4)
        step()
        loss.fill_(torch.nan)
        step()
        loss.fill_(1.0)
        step()
        assert optimiser.latch and (optimiser._steps == 3).all()
        optimiser.latch.fill_(False)
        step()
        assert (optimiser._steps == 4).all()
        runs.append(everything(optimiser))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.needs("profiler")
def test_three_launches_and_no_copy_of_weights():
    for average_rate in (None, 0.1):
        _, optimiser = make(width=64, average_rate=average_rate)
        gradients = [torch.randn_like(leaf) for leaf in optimiser.leaves]
        optimiser.step(gradients)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            optimiser.step(gradients)
            torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 2**16
        assert sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()) == 3


@pytest.mark.needs("memory of its own")
def test_devices_are_checked():
    buffers = [torch.zeros(8, device=DEVICE) for _ in range(3)]
    with pytest.raises(ValueError, match=r"gradients\[0\] is on cpu; wanted cuda:0"):
        adam_step(
            *buffers,
            [torch.zeros(8)],
            [0],
            torch.zeros(1, device=DEVICE),
            torch.zeros((), device=DEVICE),
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.0,
        )
