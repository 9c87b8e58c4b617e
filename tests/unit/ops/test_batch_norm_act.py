"""batch_norm_act without a GPU, which is PyTorch's operations, against its modules.

tests/gpu/test_batch_norm_act.py goes on with a GPU, tests/kernels/cases_batch_norm_act.cpp with the
kernels on the CPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state

CHANNELS = 8


def make_map(images=5, channels=CHANNELS, height=3, width=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(images, channels, height, width, generator=generator, dtype=torch.float64) * 2 + 0.5
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def make_norm(channels=CHANNELS, dtype=torch.float32, seed=1, training=True, **options):
    generator = torch.Generator().manual_seed(seed)
    module = nn.BatchNorm2d(channels, **options).to(dtype)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(channels, generator=generator) + (0.5 if name != "bias" else -0.5))
    return module.train(training)


def buffers(*modules):
    return [b.clone() for m in modules for b in m.buffers()]


def gradients(results, weights, inputs):
    loss = sum((w * r.double()).sum() for w, r in zip(weights, results, strict=True))
    return torch.autograd.grad(loss, inputs)


FORMS = ("plain", "residual", "two norms")


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("consumers", [1, 3])
def test_values_gradients_and_statistics_are_those_of_modules(form, relu, training, consumers):
    x, residual = make_map().requires_grad_(), make_map(seed=2).requires_grad_()
    norm, other = make_norm(training=training), make_norm(seed=3, training=training)
    twins = copy.deepcopy((norm, other))
    inputs = [x, norm.weight, norm.bias]
    twin_inputs = [x, twins[0].weight, twins[0].bias]
    wanted = twins[0](x)
    options = {}
    if form != "plain":
        inputs.append(residual)
        twin_inputs.append(residual)
        options["residual"] = residual
        wanted = wanted + (twins[1](residual) if form == "two norms" else residual)
    if form == "two norms":
        inputs += [other.weight, other.bias]
        twin_inputs += [twins[1].weight, twins[1].bias]
        options["residual_norm"] = Norm.of(other)
    wanted = F.relu(wanted) if relu else wanted

    y = batch_norm_act(x, Norm.of(norm), relu=relu, consumers=consumers, **options)
    results = (y,) if consumers == 1 else y
    assert isinstance(results, tuple) and len(results) == consumers
    weights = [make_map(seed=10 + k) for k in range(consumers)]
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        assert result.is_contiguous(memory_format=torch.channels_last) and result.data_ptr() == results[0].data_ptr()
    for a, b in zip(
        gradients(results, weights, inputs), gradients([wanted] * consumers, weights, twin_inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    for a, b in zip(buffers(norm, other), buffers(*twins), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert norm.num_batches_tracked == (1 if training else 0)


def chain(x, before, norm, relu=True):
    z = norm(F.relu(before(x)))
    return F.relu(z) if relu else z


@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
def test_a_prologue_is_the_norm_before(training):
    x = make_map().requires_grad_()
    modules = make_norm(training=training), make_norm(seed=3, training=training)
    twins = copy.deepcopy(modules)
    state = norm_state(x, Norm.of(modules[0]))
    y = batch_norm_act(x, Norm.of(modules[1]), prologue=state)
    wanted = chain(x, *twins)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    inputs = [x, *(p for m in modules for p in m.parameters())]
    twin_inputs = [x, *(p for m in twins for p in m.parameters())]
    weights = [make_map(seed=9)]
    for a, b in zip(gradients([y], weights, inputs), gradients([wanted], weights, twin_inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-5, atol=5e-5)
    for a, b in zip(buffers(*modules), buffers(*twins), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_every_row_of_a_state_has_a_gradient():
    x, module = make_map().requires_grad_(), make_norm()
    mean, var = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)
    inverse = (var + module.eps).rsqrt()
    wanted = torch.stack([mean, inverse, module.weight * inverse, module.bias])
    state = norm_state(x, Norm.of(module))
    torch.testing.assert_close(state, wanted, rtol=1e-6, atol=1e-6)
    weights = [torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(4))]
    inputs = [x, module.weight, module.bias]
    for a, b in zip(gradients([state], weights, inputs), gradients([wanted], weights, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [True, False], ids=["scalar on the device", "int"])
@pytest.mark.parametrize("form", [*FORMS, "prologue"])
def test_padding_does_not_count_and_is_not_read(form, as_tensor):
    valid, rows = 3, 5
    norm, other, before = make_norm(), make_norm(seed=3), make_norm(seed=4)
    results = []
    for padded in (True, False):
        modules = copy.deepcopy((norm, other, before))
        leaves = [make_map(seed=s)[:valid] for s in (0, 2)]
        if padded:
            leaves = [torch.cat([leaf, torch.full_like(leaf[: rows - valid], torch.nan)]) for leaf in leaves]
        x, residual = (leaf.contiguous(memory_format=torch.channels_last).requires_grad_() for leaf in leaves)
        count = (torch.tensor(valid, dtype=torch.int32) if as_tensor else valid) if padded else None
        options = {"residual": residual} if form in ("residual", "two norms") else {}
        if form == "two norms":
            options["residual_norm"] = Norm.of(modules[1])
        if form == "prologue":
            options["prologue"] = norm_state(x, Norm.of(modules[2]), count)
        y = batch_norm_act(x, Norm.of(modules[0]), valid_rows=count, **options)
        grad = make_map(seed=7)[:valid]
        grad = torch.cat([grad, torch.full_like(grad[: rows - valid], torch.nan)]) if padded else grad
        inputs = [x, residual, *(p for m in modules for p in m.parameters())]
        grads = torch.autograd.grad(y, inputs, grad, allow_unused=True)
        zeros = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)]
        if padded:
            assert y[valid:].count_nonzero() == 0 and all(g[valid:].count_nonzero() == 0 for g in zeros[:2])
        results.append([y[:valid], *(g[:valid] for g in zeros[:2]), *zeros[2:], *buffers(*modules)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_gradients_of_some_consumers_only():
    x, module = make_map().requires_grad_(), make_norm()
    first, _, third = batch_norm_act(x, Norm.of(module), consumers=3)
    weights = [make_map(seed=s) for s in (5, 6)]
    grads = gradients([first, third], weights, [x])
    wanted = F.relu(copy.deepcopy(module)(x))
    torch.testing.assert_close(grads, gradients([wanted] * 2, weights, [x]), rtol=2e-5, atol=2e-5)


def test_maps_of_bfloat16_with_float32_parameters():
    dtype, step = torch.bfloat16, 2.0**-7
    x, residual = make_map(dtype=dtype).requires_grad_(), make_map(seed=2).requires_grad_()  # the residual is float32
    module = make_norm()
    with torch.autocast("cpu", torch.bfloat16):
        y = batch_norm_act(x, Norm.of(module), residual=residual)
    assert y.dtype == dtype
    wide = x.detach().double().requires_grad_()
    twin = copy.deepcopy(module).double()
    wanted = F.relu(twin(wide) + residual.to(dtype))
    torch.testing.assert_close(y.double(), wanted, rtol=step, atol=2 * step)
    grads = torch.autograd.grad(y.float().square().sum(), [x, residual, module.weight])
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [wide, residual, twin.weight])
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=8 * step, atol=8 * step * b.abs().max().item())


@pytest.mark.parametrize("shape", [(1, 8, 5, 3), (7, 8, 1, 1), (3, 16, 1, 5), (0, 8, 4, 4), (2, 3, 2, 2)], ids=str)
def test_shapes(shape):
    x = make_map(*shape).requires_grad_()
    module = make_norm(shape[1])
    twin = copy.deepcopy(module)
    y = batch_norm_act(x, Norm.of(module))
    wanted = F.relu(twin(x))
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        gradients([y], [1.0], [x, module.weight]), gradients([wanted], [1.0], [x, twin.weight]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    for a, b in zip(buffers(module), buffers(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_what_needs_no_gradient_gets_none():
    x, residual, module = make_map(), make_map(seed=2).requires_grad_(), make_norm()
    module.weight.requires_grad_(False)
    y = batch_norm_act(x, Norm.of(module), residual=residual)
    grads = torch.autograd.grad(y.sum(), [residual, module.bias])
    assert x.grad is None and all(g.isfinite().all() for g in grads)
    with torch.no_grad():
        quiet = batch_norm_act(x, Norm.of(module), residual=residual)
    assert not quiet.requires_grad and torch.equal(quiet, y)


def test_inputs_stay_as_they_are():
    x, residual, module = make_map().requires_grad_(), make_map(seed=2), make_norm()
    kept = x.detach().clone(), residual.clone(), module.weight.detach().clone()
    batch_norm_act(x, Norm.of(module), residual=residual).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip((x.detach(), residual, module.weight.detach()), kept, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("form", [*FORMS, "prologue", "padding"])
def test_gradcheck(form, training):
    x, residual = (make_map(3, 2, 2, 3, dtype=torch.float64, seed=s).requires_grad_() for s in (0, 2))
    modules = [make_norm(2, torch.float64, seed=s, training=training) for s in (1, 3, 4)]

    def function(x, residual, *parameters):
        norms = [
            Norm.of(m)._replace(weight=w, bias=b)
            for m, w, b in zip(modules, parameters[::2], parameters[1::2], strict=True)
        ]
        norms = [n._replace(running_mean=n.running_mean.clone(), running_var=n.running_var.clone()) for n in norms]
        rows = 2 if form == "padding" else None
        return batch_norm_act(
            x,
            norms[0],
            residual=residual if form in ("residual", "two norms", "padding") else None,
            residual_norm=norms[1] if form in ("two norms", "padding") else None,
            prologue=norm_state(x, norms[2]) if form == "prologue" else None,
            consumers=2,
            valid_rows=rows,
        )

    parameters = [p for m in modules for p in m.parameters()]
    torch.autograd.gradcheck(function, (x, residual, *parameters))
    torch.autograd.gradgradcheck(function, (x, residual, *parameters))


def test_a_large_mean_with_a_small_deviation():
    x = (make_map(64, dtype=torch.float64, height=8, width=8) / 200 + 1000).float().requires_grad_()
    module = make_norm()
    twin = copy.deepcopy(module).double()
    y = batch_norm_act(x, Norm.of(module), relu=False, valid_rows=64)  # the reference's own statistics
    wanted = twin(x.double())
    assert wanted.std() > 0.3
    # The mean is a float32: off by up to 2^-15, of a deviation of 1e-2.
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=2e-2)
    torch.testing.assert_close(module.running_var.double(), twin.running_var, rtol=1e-5, atol=1e-5)


def test_padding_alone():
    for rows in (0, torch.tensor(0, dtype=torch.int32)):
        x, module = make_map().requires_grad_(), make_norm()
        kept = buffers(module)[:2]
        y = batch_norm_act(x, Norm.of(module), valid_rows=rows)
        grads = torch.autograd.grad(y.sum(), [x, module.weight, module.bias])
        assert all(t.count_nonzero() == 0 for t in (y, *grads))
        assert all(torch.equal(a, b) for a, b in zip(buffers(module), kept, strict=False))


@pytest.mark.skipif(
    not (_loader.record and _loader.record["backend"] == "cuda"), reason="the native library has no CUDA code"
)
def test_the_library_takes_these_arguments_and_refuses_memory_that_is_not_on_a_gpu():
    native, x, norm, state = _loader.native, make_map(), Norm.of(make_norm()), torch.zeros(4, CHANNELS)
    rows = torch.tensor(3, dtype=torch.int32)
    for call in (
        lambda: native.batch_norm_act(x, *norm, True, None, False, *norm, None, None, None, True),
        lambda: native.batch_norm_act(x, *norm, True, x, True, *norm, state, rows, 3, False),
        lambda: native.batch_norm_act_backward(
            [x], None, x, norm[0], True, x, norm[0], True, state, None, None, None, (True, False, True)
        ),
        lambda: native.norm_state(x, *norm, rows, None),
        lambda: native.norm_state_backward(state, x, norm[0], True, state, state[0], None, 2, True),
    ):
        with pytest.raises(RuntimeError, match="x is on cpu; wanted the GPU where x is"):
            call()


def test_errors():
    x, module = make_map(), make_norm()
    norm = Norm.of(module)
    with pytest.raises(TypeError, match="norm is BatchNorm2d"):
        batch_norm_act(x, module)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(8,\); wanted \(4,\)"):
        batch_norm_act(x[:, :4], norm)
    with pytest.raises(ValueError, match=r"norm\.training is False without running statistics"):
        batch_norm_act(x, norm._replace(training=False, running_mean=None))
    with pytest.raises(ValueError, match="residual has shape"):
        batch_norm_act(x, norm, residual=x[:2])
    with pytest.raises(ValueError, match="residual is None with a residual_norm"):
        batch_norm_act(x, norm, residual_norm=norm)
    with pytest.raises(TypeError, match=r"prologue has dtype torch\.float64; wanted torch\.float32"):
        batch_norm_act(x, norm, prologue=torch.zeros(4, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"prologue has shape \(3, 8\)"):
        batch_norm_act(x, norm, prologue=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="prologue and residual are both given"):
        batch_norm_act(x, norm, prologue=torch.zeros(4, 8), residual=x)
    for consumers in (0, 9, True, 2.0):
        with pytest.raises(ValueError, match="consumers is"):
            batch_norm_act(x, norm, consumers=consumers)
    for call in (batch_norm_act, norm_state):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            call(torch.zeros(1, 8, 1, 1), norm)
    batch_norm_act(torch.zeros(1, 8, 1, 1), norm._replace(training=False))
