"""batch_norm_pool on a GPU: against fp64 and the two ops that it replaces, and in graphs."""

from __future__ import annotations

import warnings

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops import batch_norm_act as norm_ops
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.ops.batch_norm_pool import batch_norm_pool
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.self_check.problems import BatchNormPool, by_reference
from tests.gpu.comparison import results

DEVICE = _loader.gpu()
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(384, 512, 4, 4), (1, 512, 4, 4), (37, 160, 4, 4), (24, 512, 8, 8), (5, 72, 3, 5)]


@pytest.fixture(autouse=True)
def no_fallback():
    """A warning says that PyTorch's operations were taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        norm_ops.say_once.cache_clear()
        yield


def by_two_ops(x, norm, residual, valid_rows=None):
    return norm_pool(batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows), valid_rows=valid_rows)


def problem_of(shape, dtype=torch.float32, **options):
    return BatchNormPool(shape, dtype, DEVICE, seed=sum(shape), **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_that_of_two_ops(gpu, dtype, shape, training):
    problem = problem_of((gpu.few(shape[0], 20), *shape[1:]), dtype, training=training)
    exact = results(problem, by_reference, torch.float64)
    ours, theirs = results(problem, batch_norm_pool), results(problem, by_two_ops)
    for wanted, value, other in zip(exact, ours, theirs, strict=True):
        assert value.dtype == other.dtype and value.stride() == other.stride()
        error, bound = (value.double() - wanted).abs().max(), (other.double() - wanted).abs().max()
        assert error <= 1.1 * bound + 1e-6 * wanted.abs().max() + 1e-7, f"error {error:.3g}, of two ops {bound:.3g}"


def test_a_large_mean_costs_no_more_than_in_two_ops(gpu):
    problem = problem_of((gpu.few(384, 20), 512, 4, 4), offset=300.0)
    exact = results(problem, by_reference, torch.float64)
    ours, theirs = results(problem, batch_norm_pool), results(problem, by_two_ops)
    for wanted, value, other in zip(exact, ours, theirs, strict=True):
        error, bound = (value.double() - wanted).abs().max(), (other.double() - wanted).abs().max()
        assert error <= 1.5 * bound + 1e-6 * wanted.abs().max(), f"error {error:.3g}, of two ops {bound:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_is_never_read_and_counts_nowhere(dtype):
    problem = problem_of((8, 64, 4, 4), dtype)
    wanted = results(problem, batch_norm_pool, valid_rows=5)
    for t in (*problem.maps, problem.grad):
        t[5:] = torch.nan
    found = results(problem, batch_norm_pool, valid_rows=torch.tensor(5, dtype=torch.int32, device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all((found[i][5:] == 0).all() for i in (0, 1, 4))
    problem.maps, problem.grad = [t[:5] for t in problem.maps], problem.grad[:5]
    for value, alone in zip(found, results(problem, batch_norm_pool), strict=True):
        torch.testing.assert_close(value[:5] if value.dim() > 1 else value, alone)


def test_only_some_gradients():
    problem = problem_of((4, 32, 4, 4))
    _, to_x, _, _, to_residual, *_ = results(problem, batch_norm_pool)
    norm = Norm(problem.weight, problem.bias, None, None)
    for wanted, needs in ((to_x, (True, False)), (to_residual, (False, True))):
        leaves = [t.detach().requires_grad_(need) for t, need in zip(problem.maps, needs, strict=True)]
        pooled = batch_norm_pool(leaves[0], norm, leaves[1])
        (grad,) = torch.autograd.grad(pooled, [t for t in leaves if t.requires_grad], problem.grad)
        assert torch.equal(grad, wanted)
    assert not batch_norm_pool(problem.maps[0], norm, problem.maps[1]).requires_grad


def test_channels_that_no_kernel_takes_are_said_once_and_served():
    problem = problem_of((4, 12, 4, 4))
    with pytest.warns(RuntimeWarning, match="a map has 12 channels"):
        found = results(problem, batch_norm_pool)
    wanted = results(problem, by_reference, torch.float64)
    for value, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("profiler")
def test_four_launches():
    problem = problem_of((384, 512, 4, 4), torch.bfloat16)
    leaves = [t.requires_grad_() for t in (*problem.maps, problem.weight, problem.bias)]
    x, residual, weight, bias = leaves
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pooled = batch_norm_pool(x, Norm(weight, bias, None, None), residual)
        torch.autograd.grad(pooled, leaves, problem.grad)
        torch.cuda.synchronize()
    assert sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()) == 4
