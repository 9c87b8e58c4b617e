"""align_conv on a GPU: against fp64 and PyTorch's own convolutions, twice, in graphs, on streams,
with padding; what it launches.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch

from mose_fast import _loader
from mose_fast.nn.alignment import AttentionGate, DownBlock
from mose_fast.ops import align_conv as ops
from mose_fast.ops.align_conv import Norm, align_conv
from mose_fast.reference.batch_norm import norm_state, normalised
from mose_fast.self_check.problems import AlignConv, Shape
from tests.gpu.comparison import check, results

DEVICE = _loader.gpu()

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    """A warning says that PyTorch's operations were taken: then a test would compare them with
    themselves.
    """
    ops.say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


#: All of the alignment modules and gates of a step, at 32 x 32.
STEP = (
    Shape(384, 64, 64, 32, 2),
    Shape(384, 64, 64, 16, 1, True),
    Shape(384, 64, 64, 32, 2, gate=True),
    Shape(384, 64, 128, 16, 1, True),
    Shape(384, 128, 128, 16, 2),
    Shape(384, 128, 128, 8, 1, True),
    Shape(384, 128, 128, 16, 2, True),
    Shape(384, 128, 256, 8, 1, True),
    Shape(384, 128, 128, 16, 2, gate=True),
    Shape(384, 256, 256, 8, 2),
    Shape(384, 256, 256, 4, 1, True),
    Shape(384, 256, 512, 4, 1, True),
    Shape(384, 256, 256, 8, 2, True),
    Shape(384, 256, 256, 8, 2, gate=True),
)
#: Odd batches, odd sides, other channels, 64 x 64 input, one image.
OTHERS = (
    Shape(37, 64, 64, 32, 2, gate=True),
    Shape(1, 64, 128, 16, 1, True),
    Shape(3, 16, 24, 7, 1, True),
    Shape(5, 8, 8, 6, 2, True),
    Shape(9, 24, 40, 5, 1, True),
    Shape(129, 64, 64, 64, 2, gate=True),
    Shape(1, 512, 512, 4, 1, True),
    Shape(11, 128, 256, 8, 1, True, width=12),
    Shape(2, 96, 200, 10, 2, gate=True, width=20),
    Shape(1024, 128, 128, 8, 1, True),
)
#: One for each of the two ways, with a gate and with a prologue.
SMALL = (Shape(9, 64, 64, 32, 2, gate=True), Shape(9, 128, 256, 8, 1, True), Shape(9, 256, 512, 4, 1, True))


def problem_of(shape, dtype, **options):
    return AlignConv(shape, dtype, DEVICE, seed=shape.images + shape.channels + shape.side, **options)


def largest(x):
    return x.double().abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*STEP, *OTHERS], ids=str)
def test_error_is_at_most_twice_that_of_pytorch(gpu, shape, dtype):
    if dtype != torch.bfloat16 and shape in STEP:
        shape = replace(shape, images=13)
    check(problem_of(replace(shape, images=gpu.few(shape.images)), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen(dtype):
    for shape in (Shape(7, 64, 64, 8, 2, gate=True), Shape(7, 256, 256, 4, 1, True)):
        check(problem_of(shape, dtype, training=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_padding_is_never_read(shape, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for valid in (1, 6, 9):
        problem, alone = problem_of(shape, dtype), problem_of(shape, dtype)
        for attribute in ("x", "gate"):
            value = getattr(problem, attribute)
            if value is not None:
                setattr(alone, attribute, value[:valid])
                padded = value.clone()
                padded[valid:] = torch.nan
                setattr(problem, attribute, padded)
        grads = problem.grads[0].clone(), problem.grads[1]
        wanted = results(alone, align_conv, grads=(grads[0][:valid], grads[1]))
        grads[0][valid:] = torch.nan
        for rows in (valid, torch.tensor(valid, dtype=torch.int32, device=DEVICE)):
            found = results(problem, align_conv, valid_rows=rows, grads=grads)
            for value, other in zip(found, wanted, strict=True):
                if value.dim() == 4 and len(value) == shape.images:
                    assert (value[valid:] == 0).all()
                    value = value[:valid]
                torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance * max(1.0, largest(other)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gated_module_is_that_of_pytorch(gpu, dtype):
    torch.manual_seed(3)
    gate, block = AttentionGate(64).to(DEVICE), DownBlock(64, 128).to(DEVICE)
    x = torch.randn(gpu.few(40), 64, 32, 32, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)

    def through(block, x, gate=None):
        first = align_conv(
            x, block.depthwise1.weight, block.pointwise1.weight, Norm.of(block.norm1), stride=2, gate=gate
        )
        return align_conv(
            first.y, block.depthwise2.weight, block.pointwise2.weight, Norm.of(block.norm2), prologue=first.state
        )

    def ours(x):
        z = normalised(*through(gate.down, x)).to(dtype)
        u = normalised(z, norm_state(z, Norm.of(gate.norm))).to(dtype)
        return normalised(*through(block, x, u.contiguous(memory_format=torch.channels_last)))

    def theirs(x):
        return block(gate(x))

    exact_modules = copy.deepcopy(gate).double(), copy.deepcopy(block).double()
    exact = exact_modules[1](exact_modules[0](x.double()))
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        values = [function(x).double() for function in (ours, theirs)]
    error, bound = (largest(value - exact) for value in values)
    assert error <= 2 * bound + 1e-5 * largest(exact)


@pytest.mark.needs("profiler")
def test_launches():
    problem = problem_of(Shape(384, 64, 64, 32, 2, gate=True), torch.bfloat16)
    results(problem, align_conv)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results(problem, align_conv)
        torch.cuda.synchronize()
    ours = [event.name for event in profile.events() if "align_conv_" in event.name]
    assert len(ours) == 6  # forward, finish, product, weights, backward, sums


def test_odd_channels_run_on_pytorch_and_say_so():
    problem = problem_of(Shape(3, 10, 12, 8, 2), torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="10 to 12 channels"):
        y = align_conv(problem.x, problem.depthwise, problem.pointwise, Norm.of(problem.module), stride=2).y
    assert y.shape == (3, 12, 4, 4)


@pytest.mark.parametrize(("stride", "prologue", "gate"), [(1, False, False), (1, True, True), (2, True, True)])
def test_a_form_that_no_module_has_runs_on_pytorch_and_says_so(stride, prologue, gate):
    problem = problem_of(Shape(3, 16, 24, 8, stride, prologue, gate), torch.float32)
    with pytest.warns(RuntimeWarning, match=f"align_conv of stride {stride} .* runs on PyTorch's own operations"):
        found = problem.run(align_conv)
    for name, wanted in problem.run(problem.form).items():
        torch.testing.assert_close(found[name], wanted)


def test_no_image():
    for shape in (Shape(0, 64, 64, 8, 2, gate=True), Shape(0, 256, 256, 4, 1, True)):
        found = problem_of(shape, torch.bfloat16).run(align_conv)
        assert len(found["y"]) == 0
        assert all((found[f"gradient of {name}"] == 0).all() for name in ("depthwise", "pointwise"))


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_without_gradients_nothing_is_saved_and_a_second_derivative_is_refused(shape):
    problem = problem_of(shape, torch.bfloat16)
    options = {"stride": shape.stride, "prologue": problem.state, "gate": problem.gate}
    y, state = align_conv(problem.x, problem.depthwise, problem.pointwise, Norm(None, None, None, None), **options)
    assert y.grad_fn is None and state.grad_fn is None
    leaf = problem.pointwise.requires_grad_()
    y, state = align_conv(problem.x, problem.depthwise, leaf, Norm(None, None, None, None), **options)
    (grad,) = torch.autograd.grad(y.float().square().sum() + state.sum(), leaf, create_graph=True)
    assert grad.shape == leaf.shape
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.float().sum().backward()


def test_autocast_changes_nothing_and_another_layout_is_copied_and_said_once():
    problem = problem_of(Shape(3, 16, 24, 8, 2), torch.float32)
    wanted = results(problem, align_conv)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = results(problem, align_conv)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    problem.x = problem.x.contiguous()
    with pytest.warns(RuntimeWarning, match="x of align_conv is not in channels_last memory"):
        found = results(problem, align_conv)
    for value, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, other)
    results(problem, align_conv)  # said once: the fixture makes a warning an error
