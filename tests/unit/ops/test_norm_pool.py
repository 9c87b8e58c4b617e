"""The pooled norm on the CPU, native and reference, against PyTorch's own ops;
tests/gpu/test_norm_pool.py goes on with a GPU.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.ops import norm_pool as norm_pool_module
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.reference import norm_pool as reference
from mose_fast.reference.batch_norm import Norm, norm_state

needs_library = pytest.mark.skipif(_loader.native is None, reason="the native library was not built")

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}
SHAPES = [(1, 8, 1, 1), (3, 20, 4, 4), (5, 129, 3, 7), (2, 512, 4, 4), (7, 64, 8, 8)]


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "fallback"])
def path(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return request.param


def make(shape, dtype=torch.float32, mean=0.0):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (
        (torch.randn(shape, generator=generator) + mean)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    channels = shape[1]
    rows = [mean + 0.1 * torch.randn(channels, generator=generator), torch.ones(channels)]
    rows += [torch.randn(channels, generator=generator), 0.5 * torch.randn(channels, generator=generator)]
    state = torch.stack(rows).to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    return x, state, torch.randn(shape[:2], generator=generator).to(dtype)


def run(function, x, state, grad, valid_rows=None):
    leaves = [t.detach().requires_grad_() for t in (x, state) if t is not None]
    pooled = function(leaves[0], leaves[1] if state is not None else None, valid_rows)
    return [pooled, *torch.autograd.grad(pooled, leaves, grad)]


def compare(x, state, grad, valid_rows=None):
    ours, wanted = (run(function, x, state, grad, valid_rows) for function in (norm_pool, reference.norm_pool))
    scale = x.shape[0] ** 0.5
    for name, value, other in zip(("pooled", "dx", "dstate"), ours, wanted, strict=False):
        assert value.dtype == other.dtype and value.shape == other.shape, name
        # The state's gradient is float32 whatever x is, and both sides sum the same products.
        tolerance = TOLERANCE[value.dtype]
        torch.testing.assert_close(
            value, other, rtol=tolerance, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_is_equal_to_the_reference(dtype, shape):
    x, state, grad = make(shape, dtype)
    compare(x, state, grad)
    compare(x, None, grad)
    compare(x, state, grad, valid_rows=shape[0] - 1)
    compare(x, None, grad, valid_rows=torch.tensor(max(1, shape[0] - 2), dtype=torch.int32))


def test_equal_to_batch_norm_relu_and_mean(path):
    torch.manual_seed(0)
    x = torch.randn(6, 24, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(24)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
    weights = torch.randn(6, 24)
    ours = norm_pool(x, norm_state(x, Norm.of(norm)))
    got = torch.autograd.grad((ours * weights).sum(), [x, norm.weight, norm.bias])
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias)]
    wanted = F.relu(F.batch_norm(exact[0], None, None, exact[1], exact[2], training=True)).mean(dim=(2, 3))
    grads = torch.autograd.grad((wanted * weights).sum(), exact)
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)
    for value, other in zip(got, grads, strict=True):
        torch.testing.assert_close(value.double(), other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


def test_without_a_state_it_is_the_mean(path):
    x, _, grad = make((5, 24, 4, 4))
    ours = run(norm_pool, x, None, grad)
    torch.testing.assert_close(ours[0], x.mean(dim=(2, 3)))
    torch.testing.assert_close(
        ours[1], (grad / 16)[:, :, None, None].expand(x.shape).contiguous(memory_format=torch.channels_last)
    )


def test_worked_values(path):
    x = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 2, 2)
    state = torch.tensor([[2.0], [9.0], [2.0], [1.0]])  # z = 2 (x - 2) + 1 = -1, 1, 3, 9
    pooled, dx, dstate = run(norm_pool, x, state, torch.tensor([[4.0]]))
    assert pooled.item() == 13 / 4
    assert dx.flatten().tolist() == [0.0, 2.0, 2.0, 2.0]
    assert dstate.flatten().tolist() == [-6.0, 0.0, 5.0, 3.0]


@pytest.mark.parametrize("valid", [None, 2, torch.tensor(1, dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_gradcheck(valid, with_state):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(4, 4, dtype=torch.float64, requires_grad=True) if with_state else None
    assert torch.autograd.gradcheck(lambda x, s: norm_pool(x, s, valid), (x, state))


@needs_library
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_float32_is_as_good_as_float64_about_a_large_mean_too(mean):
    x, state, grad = make((9, 40, 5, 3), mean=mean)
    ours = run(norm_pool, x, state, grad)
    exact = run(reference.norm_pool, x.double(), state.double(), grad.double())
    for value, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(value.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_state", [True, False])
def test_padding_is_zero_and_never_read(path, dtype, with_state):
    x, state, grad = make((5, 16, 4, 4), dtype)
    state = state if with_state else None
    alone = run(norm_pool, x[:3].contiguous(memory_format=torch.channels_last), state, grad[:3])
    with torch.no_grad():
        x[3:] = torch.nan
    grad[3:] = torch.nan
    for valid in (3, torch.tensor(3, dtype=torch.int32)):
        pooled, dx, *dstate = run(norm_pool, x, state, grad, valid)
        assert (pooled[3:] == 0).all() and (dx[3:] == 0).all()
        assert torch.equal(pooled[:3], alone[0]) and torch.equal(dx[:3], alone[1])
        if with_state:
            torch.testing.assert_close(dstate[0], alone[2])


@pytest.mark.parametrize("with_state", [True, False])
def test_no_images(path, with_state):
    x, state, grad = make((0, 16, 4, 4))
    pooled, dx, *dstate = run(norm_pool, x, state if with_state else None, grad)
    assert pooled.shape == (0, 16) and dx.shape == x.shape
    assert not with_state or (dstate[0] == 0).all()
    assert norm_pool(torch.zeros(3, 0, 2, 2), torch.zeros(4, 0)).shape == (3, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_a_number_is_not_hidden(path, dtype):
    x, state, grad = make((3, 8, 2, 2), dtype)
    with torch.no_grad():
        x[1, 3, 0, 1] = torch.nan
    pooled, _, dstate = run(norm_pool, x, state, grad)
    assert pooled.isnan().nonzero().tolist() == [[1, 3]]
    assert dstate[2].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
def test_any_layout_of_the_map(path, layout):
    x, state, grad = make((4, 16, 6, 6))
    x = x.detach()
    if layout == "expanded":
        x = x[:1].expand(4, -1, -1, -1)
    elif layout == "sliced":
        x = torch.randn(4, 32, 6, 6).contiguous(memory_format=torch.channels_last)[:, ::2]
    else:
        x = x.contiguous() if layout == "contiguous" else x.transpose(2, 3)
    kept = x.clone()
    results = run(norm_pool, x, state, grad)
    wanted = run(norm_pool, x.contiguous(memory_format=torch.channels_last), state, grad)
    assert torch.equal(x, kept)
    for value, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(value, other)


@needs_library
def test_a_copy_into_channels_last_is_said_once():
    norm_pool_module.say_once.cache_clear()
    x, state, _ = make((4, 16, 6, 6))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        norm_pool(x, state)
        assert not said
        for _ in range(2):
            norm_pool(x.contiguous(), state)
    assert [str(warning.message)[:26] for warning in said] == ["mose_fast: a map is copied"]
    assert said[0].filename == __file__


@pytest.mark.parametrize("with_state", [True, False])
def test_any_strides_of_the_gradient(path, with_state):
    x, state, _ = make((4, 16, 2, 2))
    state = state if with_state else None
    for grad in (
        torch.randn(16, 4).T,
        torch.randn(1, 16).expand(4, 16),
        torch.randn(4, 32)[:, ::2],
        torch.zeros(()).expand(4, 16),
    ):
        for value, other in zip(
            run(norm_pool, x, state, grad), run(norm_pool, x, state, grad.contiguous()), strict=True
        ):
            assert torch.equal(value, other)


def test_only_one_gradient(path):
    x, state, grad = make((4, 16, 2, 2))
    both = run(norm_pool, x, state, grad)
    pooled = norm_pool(x, state.detach())
    assert torch.equal(torch.autograd.grad(pooled, x, grad)[0], both[1])
    pooled = norm_pool(x.detach(), state)
    assert torch.equal(torch.autograd.grad(pooled, state, grad)[0], both[2])
    assert not norm_pool(x.detach(), state.detach()).requires_grad


def test_autocast_changes_nothing(path):
    x, state, grad = make((4, 16, 2, 2))
    wanted = run(norm_pool, x, state, grad)
    with torch.autocast("cpu", torch.bfloat16):
        values = run(norm_pool, x, state, grad)
    assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))


@needs_library
def test_any_number_of_threads_gives_the_same():
    x, state, grad = make((40, 64, 8, 8))
    results = []
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            results.append(run(norm_pool, x, state, grad))
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_library
def test_a_plain_mean_keeps_no_map_for_backward():
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    assert norm_pool(x).grad_fn.saved_tensors == ()


@needs_library
def test_refuses_to_be_differentiated_twice():
    x, state, _ = make((2, 4, 2, 2))
    (gradient,) = torch.autograd.grad(norm_pool(x, state).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x is 3", (3,)),
        (ValueError, "with at least one pixel", (torch.zeros(1, 2, 0, 3),)),
        (
            TypeError,
            r"state has dtype torch\.bfloat16; wanted torch\.float32",
            (torch.zeros(1, 2, 3, 3), torch.zeros(4, 2, dtype=torch.bfloat16)),
        ),
        (
            TypeError,
            r"state has dtype torch\.float32; wanted torch\.float64",
            (torch.zeros(1, 2, 3, 3, dtype=torch.float64), torch.zeros(4, 2)),
        ),
        (ValueError, r"state has shape \(4, 3\); wanted \(4, 2\)", (torch.zeros(1, 2, 3, 3), torch.zeros(4, 3))),
    ],
)
def test_errors(path, error, message, arguments):
    with pytest.raises(error, match=message):
        norm_pool(*arguments)
