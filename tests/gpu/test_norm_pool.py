"""The pooled norm on a GPU: against the CPU and fp64, in graphs, on streams."""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.maps import say_once
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.self_check.problems import NormPool
from tests.gpu.comparison import check, results

DEVICE = _loader.gpu()

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(384, 512, 4, 4), (1, 512, 4, 4), (37, 160, 4, 4), (383, 512, 8, 8), (5, 72, 3, 5)]


def make(shape, dtype=torch.float32, device=DEVICE, **options):
    return NormPool(shape, dtype, device, seed=sum(shape), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_error_is_at_most_twice_that_of_pytorch(gpu, dtype, shape, with_state):
    check(make((gpu.few(shape[0], 20), *shape[1:]), dtype, with_state=with_state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_equal_to_the_cpu(gpu, dtype, shape, with_state):
    shape = (gpu.few(shape[0], 20), *shape[1:])
    valid = max(1, shape[0] - 3)
    on_gpu = results(make(shape, dtype, with_state=with_state), norm_pool, valid_rows=valid)
    with gpu.spared():
        on_cpu = results(make(shape, dtype, "cpu", with_state=with_state), norm_pool, valid_rows=valid)
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert gpu.dtype == cpu.dtype and gpu.stride() == cpu.stride()
        tolerance = 1e-5 if cpu.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=tolerance, atol=tolerance * max(1.0, cpu.abs().max().item()))


def test_padding_is_never_read():
    wanted = results(make((40, 512, 4, 4), torch.bfloat16), norm_pool, valid_rows=30)
    found = list(make((40, 512, 4, 4), torch.bfloat16, valid=30).ours().values())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert (found[0][30:] == 0).all() and (found[1][30:] == 0).all()


def test_memory_that_is_not_aligned():
    problem = make((6, 64, 4, 4), torch.bfloat16)
    x = problem.x
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE).as_strided(x.shape, x.stride(), 1).copy_(x)
    assert shifted.data_ptr() % 16
    leaf = shifted.requires_grad_()  # as it lies: a clone would be aligned
    pooled = norm_pool(leaf, problem.state)
    (dx,) = torch.autograd.grad(pooled, leaf, problem.grad)
    wanted = results(problem, norm_pool)
    assert torch.equal(pooled, wanted[0]) and torch.equal(dx, wanted[1])


def test_odd_channels_run_on_pytorch_and_say_so():
    problem = make((5, 67, 3, 5), torch.float32)
    say_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="a map has 67 channels"):
        found = results(problem, norm_pool)
    for value, wanted in zip(found, results(problem, problem.form), strict=True):
        torch.testing.assert_close(value, wanted)


@pytest.mark.needs("profiler")
def test_two_launches_and_little_memory():
    problem = make((384, 512, 4, 4), torch.bfloat16)
    leaves, grad = [problem.x.requires_grad_(), problem.state.requires_grad_()], problem.grad
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
