"""batch_norm_act on a GPU: against fp64 and PyTorch's own kernels, twice, in graphs, on streams;
what it launches.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.ops import batch_norm_act as ops
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.reference import batch_norm as reference_norm
from mose_fast.reference import batch_norm_act as reference
from mose_fast.self_check.problems import FORMS, BatchNormAct
from tests.gpu.comparison import check, results

DEVICE = _loader.gpu()

DTYPES = (torch.float32, torch.bfloat16)
STAGES = ((64, 32), (128, 16), (256, 8), (512, 4))
SHAPES = (*((384, channels, side) for channels, side in STAGES), (37, 64, 32), (1, 512, 4), (3, 24, 5), (9, 136, 7))


@pytest.fixture(autouse=True)
def no_fallback():
    """A warning says that PyTorch's operations were taken: then the test would compare them with
    themselves.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ops.say_once.cache_clear()
        yield


class BatchNormAct2d(nn.BatchNorm2d):
    """A module whose forward is the op."""

    def forward(self, x, residual=None, **options):
        return batch_norm_act(x, Norm.of(self), residual=residual, **options)


def problem_of(form, images, channels, side, dtype, **options):
    return BatchNormAct(form, (images, channels, side, side), dtype, DEVICE, seed=images + channels, **options)


def largest(x):
    return x.double().abs().max().item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("images", "channels", "side"), SHAPES)
def test_error_is_at_most_twice_that_of_pytorch(gpu, form, dtype, images, channels, side):
    if dtype != torch.bfloat16 and images == 384 and channels != 128:
        pytest.skip("one large shape is enough for the other dtypes")
    check(problem_of(form, gpu.few(images), channels, side, dtype, consumers=2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_float32_is_the_reference(form, training):
    problem = problem_of(form, 33, 64, 9, torch.float32, consumers=3, training=training)
    exact = results(problem, reference.batch_norm_act, torch.float64)
    for value, wanted in zip(results(problem, batch_norm_act), exact, strict=True):
        torch.testing.assert_close(value.double(), wanted.double(), rtol=2e-5, atol=2e-5 * max(largest(wanted), 1))


def test_a_large_mean_with_a_small_deviation():
    problem = problem_of("plain", 64, 64, 16, torch.float32, offset=1e3, deviation=1e-2)
    problem.norms[0].running_var.zero_()
    ours = results(problem, batch_norm_act)
    exact = results(problem, reference.batch_norm_act, torch.float64)
    # The mean is a float32: off by up to 2^-15, of a deviation of 1e-2.
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(ours[-2].double(), exact[-2], rtol=1e-4, atol=0)  # the running variance, a tenth of 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_is_never_read_and_written_as_zero(form, dtype):
    valid, images = 29, 40
    whole, part = (problem_of(form, images, 64, 8, dtype, consumers=2) for _ in range(2))
    part.x, part.residual, part.grads = part.x[:valid], part.residual[:valid], [g[:valid] for g in part.grads]
    for tensor in (whole.x, whole.residual, *whole.grads):
        tensor[valid:] = torch.nan
    wanted = results(part, batch_norm_act)
    exact = results(part, reference.batch_norm_act, torch.float64)
    for count in (valid, torch.tensor(valid, dtype=torch.int32, device=DEVICE)):
        for value, other, near in zip(results(whole, batch_norm_act, valid_rows=count), wanted, exact, strict=True):
            if value.dim() == 4:
                assert value[valid:].count_nonzero() == 0
                value = value[:valid]
            # Another grid: another order of the sums.
            tolerance = 1e-4 if dtype == torch.float32 else 2.0**-6
            torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance * max(largest(near), 1))


@pytest.mark.needs("streams")
def test_two_streams_at_a_time():
    problems = [problem_of("two norms", 256, channels, 16, torch.bfloat16) for channels in (64, 128)]
    wanted = [results(problem, batch_norm_act) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(5):
        for problem, stream, kept in zip(problems, streams, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(results(problem, batch_norm_act))
    torch.cuda.synchronize()
    for kept, first in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for result in kept for a, b in zip(result, first, strict=True))


@pytest.mark.needs("graphs")
def test_graphs_of_one_stream_at_a_time():
    """Each has tickets of its own, though both were captured on the same stream."""
    problems = [problem_of("two norms", 256, channels, 16, torch.bfloat16) for channels in (64, 128)]
    wanted = [results(problem, batch_norm_act) for problem in problems]
    captured_on, streams = torch.cuda.Stream(), [torch.cuda.Stream() for _ in problems]
    graphs, found = [torch.cuda.CUDAGraph() for _ in problems], []
    for problem, graph in zip(problems, graphs, strict=True):
        with torch.cuda.graph(graph, stream=captured_on):
            found.append(results(problem, batch_norm_act))
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for result, first in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True))


def names_of(call):
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


@pytest.mark.needs("profiler")
@pytest.mark.parametrize(("form", "consumers"), [("plain", 1), ("residual", 2), ("two norms", 2), ("plain", 4)])
def test_four_launches_and_no_add(form, consumers):
    problem = problem_of(form, 64, 64, 16, torch.bfloat16, consumers=consumers)
    x, residual = problem.x.requires_grad_(), problem.residual.requires_grad_()
    norms = problem.norms

    def step():
        options = {"residual": residual} if form != "plain" else {}
        if form == "two norms":
            options["residual_norm"] = Norm.of(norms[1])
        y = batch_norm_act(x, Norm.of(norms[0]), consumers=consumers, **options)
        torch.autograd.grad(y, [x, norms[0].weight], problem.grads)

    names = names_of(step)
    assert len(names) == 4, names
    for part, name in zip(("statistics", "forward", "sums", "backward"), names, strict=True):
        assert part in name


@pytest.mark.needs("profiler")
@pytest.mark.parametrize("fused", [True, False])
def test_a_block_adds_no_gradients_of_its_own(fused):
    """The sum of what both consumers of a stage's output send back is a kernel of PyTorch's, but
    not of ours.
    """
    first, second = (BatchNormAct2d(64).to(DEVICE) for _ in range(2))
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False).to(DEVICE).bfloat16().to(memory_format=torch.channels_last)
    x = problem_of("plain", 32, 64, 16, torch.bfloat16).x.requires_grad_()
    inputs = [x, conv.weight, *first.parameters(), *second.parameters()]

    def step():
        if fused:
            y, shortcut = first(x, consumers=2)
            result = second(conv(y), shortcut)
        else:
            y = reference.batch_norm_act(x, Norm.of(first))
            result = reference.batch_norm_act(conv(y), Norm.of(second), residual=y)
        torch.autograd.grad(result, inputs, torch.ones_like(result))

    adds = [name for name in names_of(step) if "Functor_add" in name or "FunctorOnSelf_add" in name]
    assert bool(adds) != fused


def test_norm_state_and_its_gradient():
    for dtype in DTYPES:
        problem = problem_of("plain", 50, 72, 7, dtype)
        module, twin = copy.deepcopy(problem.norms[0]), copy.deepcopy(problem.norms[0]).double()
        x, wide = problem.x.requires_grad_(), problem.x.detach().double().requires_grad_()
        weights = torch.randn(4, 72, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        rows = torch.tensor(45, dtype=torch.int32, device=DEVICE)
        state = norm_state(x, Norm.of(module), rows)
        wanted = reference_norm.norm_state(wide[:45], Norm.of(twin))
        torch.testing.assert_close(state.double(), wanted, rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad((state * weights).sum(), [x, module.weight, module.bias])
        wanted_grads = torch.autograd.grad((wanted * weights.double()).sum(), [wide, twin.weight, twin.bias])
        assert grads[0][45:].count_nonzero() == 0
        for value, near in zip(grads, wanted_grads, strict=True):
            step = 1e-5 if value.dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(value.double(), near, rtol=step, atol=step * largest(near))


def test_what_kernels_do_not_take_runs_with_one_warning():
    problem = problem_of("plain", 8, 12, 4, torch.bfloat16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [results(problem, batch_norm_act) for _ in range(2)]
    assert [("12 channels" in str(w.message)) for w in said] == [True]
    for value, wanted in zip(found[0], results(problem, reference.batch_norm_act), strict=True):
        torch.testing.assert_close(value, wanted)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = torch.randn(4, 16, 5, 5, device=DEVICE).requires_grad_()
        module = BatchNormAct2d(16).to(DEVICE)
        module(x)
        y = module(x)
    assert ["channels_last" in str(w.message) for w in said] == [True]
    torch.testing.assert_close(y, F.relu(nn.BatchNorm2d(16).to(DEVICE)(x)), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert grad.shape == x.shape and grad.isfinite().all()


def test_under_autocast_and_with_an_empty_batch():
    module = BatchNormAct2d(16).to(DEVICE)
    x = torch.randn(6, 16, 5, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(module(x), module(x)) and module(x).dtype == torch.float32
        assert module(x.bfloat16()).dtype == torch.bfloat16
    empty = torch.zeros(0, 16, 5, 5, device=DEVICE, requires_grad=True)
    module(empty).sum().backward()
    assert module.weight.grad.count_nonzero() == 0 and empty.grad.shape == empty.shape


def test_nan_comes_through():
    module = BatchNormAct2d(16).to(DEVICE)
    x = torch.randn(6, 16, 5, 5, device=DEVICE).contiguous(memory_format=torch.channels_last)
    x[2, 3, 1, 1] = torch.nan
    y = module(x)
    assert y[:, 3].isnan().all() and y[:, :3].isfinite().all()


@pytest.mark.needs("memory statistics")
def test_memory_of_a_norm_is_its_result_and_one_bit_an_element():
    problem = problem_of("plain", 64, 64, 32, torch.bfloat16)
    x = problem.x.requires_grad_()
    batch_norm_act(x, Norm.of(problem.norms[0]))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = batch_norm_act(x, Norm.of(problem.norms[0]))
    assert torch.cuda.memory_allocated() - before <= y.nbytes * 17 / 16 + 2**16


def test_gradients_of_any_strides_and_dtype():
    problem = problem_of("plain", 5, 8, 4, torch.float32)
    x, module = problem.x.requires_grad_(), problem.norms[0]
    weights = torch.randn(5, 8, 4, 4, device=DEVICE)
    for strange in (
        lambda y: y.sum(),  # expanded: strides 0
        lambda y: (y.transpose(2, 3) * weights).sum(),
        lambda y: y.double().square().sum(),
        lambda y: y[:, 2:5].sum() + y[1:3].sum(),
    ):
        (grad,) = torch.autograd.grad(strange(batch_norm_act(x, Norm.of(module))), x)
        (wanted,) = torch.autograd.grad(strange(F.relu(copy.deepcopy(module)(x))), x)
        torch.testing.assert_close(grad, wanted, rtol=2e-5, atol=2e-5)


def test_parameters_of_another_dtype_get_gradients_of_theirs():
    problem = problem_of("plain", 5, 8, 4, torch.float32)
    module, twin = copy.deepcopy(problem.norms[0]), copy.deepcopy(problem.norms[0])
    module.weight.data = module.weight.data.bfloat16()
    twin.weight.data = module.weight.data.float()
    (grad,) = torch.autograd.grad(batch_norm_act(problem.x, Norm.of(module)).sum(), module.weight)
    (wanted,) = torch.autograd.grad(F.relu(twin(problem.x)).sum(), twin.weight)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_second_derivative_is_refused():
    problem = problem_of("plain", 5, 8, 4, torch.float32)
    x = problem.x.requires_grad_()
    y = batch_norm_act(x, Norm.of(problem.norms[0]))
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
