"""The pooled norm on a card: against the CPU and fp64, in graphs, on streams."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.reference import norm_pool as reference

DEVICE = _loader.card()

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(384, 512, 4, 4), (1, 512, 4, 4), (37, 160, 4, 4), (383, 512, 8, 8), (5, 67, 3, 5)]


def make(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))

    def coarse(
        *sizes,
    ):  # multiples of 1/64: what is normalised is exact in float32, so that no sign depends on rounding
        return torch.randn(sizes, generator=generator).mul(64).round().div(64)

    x = coarse(*shape).to(dtype).to(DEVICE).contiguous(memory_format=torch.channels_last)
    return x, coarse(4, shape[1]).to(DEVICE), coarse(*shape[:2]).to(dtype).to(DEVICE)


def run(function, x, state, grad, valid_rows=None):
    leaves = [
        t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, state) if t is not None
    ]
    pooled = function(leaves[0], leaves[1] if state is not None else None, valid_rows)
    return [pooled.detach(), *torch.autograd.grad(pooled, leaves, grad)]


def in_the_maps_own_type(x, state, valid_rows):
    """As plain PyTorch would run it in half precision."""
    if state is None:
        return x.mean(dim=(2, 3))
    mean, _, scale, shift = (row.view(1, -1, 1, 1).to(x.dtype) for row in state)
    return F.relu((x - mean) * scale + shift).mean(dim=(2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_error_is_at_most_twice_that_of_pytorch(card, dtype, shape, with_state):
    x, state, grad = make((card.few(shape[0], 20), *shape[1:]), dtype)
    state = state if with_state else None
    exact = run(reference.norm_pool, x.double(), None if state is None else state.double(), grad.double())
    ours, theirs = (run(function, x, state, grad) for function in (norm_pool, in_the_maps_own_type))
    for wanted, value, other in zip(exact, ours, theirs, strict=True):
        error, bound = (value.double() - wanted).abs().max(), (other.double() - wanted).abs().max()
        assert error <= 2 * bound + 1e-6 * wanted.abs().max() + 1e-7, f"error {error:.3g}, PyTorch's {bound:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_equal_to_the_cpu(card, dtype, shape, with_state):
    shape = (card.few(shape[0], 20), *shape[1:])
    x, state, grad = make(shape, dtype)
    state = state if with_state else None
    valid = max(1, shape[0] - 3)
    on_card = run(norm_pool, x, state, grad, valid)
    with card.spared():
        on_cpu = run(norm_pool, x.cpu(), None if state is None else state.cpu(), grad.cpu(), valid)
    for card, cpu in zip(on_card, on_cpu, strict=True):
        assert card.dtype == cpu.dtype and card.stride() == cpu.stride()
        tolerance = 1e-5 if cpu.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(card.cpu(), cpu, rtol=tolerance, atol=tolerance * max(1.0, cpu.abs().max().item()))


def test_padding_is_never_read():
    x, state, grad = make((40, 512, 4, 4), torch.bfloat16)
    wanted = run(norm_pool, x, state, grad, 30)
    x[30:], grad[30:] = torch.nan, torch.nan
    results = run(norm_pool, x, state, grad, torch.tensor(30, dtype=torch.int32, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    assert (results[0][30:] == 0).all() and (results[1][30:] == 0).all()


def test_memory_that_is_not_aligned():
    x, state, grad = make((6, 64, 4, 4), torch.bfloat16)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE).as_strided(x.shape, x.stride(), 1).copy_(x)
    assert shifted.data_ptr() % 16
    leaf = shifted.requires_grad_()  # as it lies: a clone would be aligned
    pooled = norm_pool(leaf, state)
    (dx,) = torch.autograd.grad(pooled, leaf, grad)
    wanted = run(norm_pool, x, state, grad)
    assert torch.equal(pooled, wanted[0]) and torch.equal(dx, wanted[1])


@pytest.mark.needs("graphs")
@pytest.mark.parametrize("with_state", [True, False])
def test_replays_of_a_graph_equal_eager_and_read_the_row_count_anew(with_state):
    x, state, grad = make((384, 512, 4, 4), torch.bfloat16)
    state = state if with_state else None
    valid = torch.tensor(384, dtype=torch.int32, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(norm_pool, x, state, grad, valid)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(norm_pool, x, state, grad, valid)
    for rows in (384, 296, 0, 40):
        valid.fill_(rows)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, run(norm_pool, x, state, grad, rows), strict=True))


@pytest.mark.needs("streams")
def test_runs_on_the_current_stream():
    x, state, grad = make((64, 512, 4, 4))
    wanted = run(norm_pool, x, state, grad)
    moved = [torch.zeros_like(t) for t in (x, state, grad)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for target, source in zip(moved, (x, state, grad), strict=True):
            target.copy_(source)
        results = run(norm_pool, *moved)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.needs("profiler")
def test_two_launches_and_little_memory():
    x, state, grad = make((384, 512, 4, 4), torch.bfloat16)
    leaves = [x.requires_grad_(), state.requires_grad_()]
    torch.autograd.grad(norm_pool(*leaves), leaves, grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pooled = norm_pool(*leaves)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        torch.autograd.grad(pooled, leaves, grad)
        torch.cuda.synchronize()
    assert sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()) == 2
    assert held <= 384 * 512 * (2 + 4 + 4) + 4096  # the result, counts and sums
