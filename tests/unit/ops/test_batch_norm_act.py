"""batch_norm_act without a GPU: PyTorch's operations against its modules, and the kernels'
autograd with a stand-in for the library.

tests/gpu/test_batch_norm_act.py goes on with a GPU, tests/kernels/cases_batch_norm_act.cpp with the
kernels on the CPU.
"""

from __future__ import annotations

import copy
import types
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.ops import batch_norm_act as ops
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.reference.batch_norm import normalised

CHANNELS = 8


class StandIn:
    """The library's four functions as api/batch_norm_act.h describes them, in PyTorch: what
    autograd does with them needs no GPU.
    """

    def __init__(self):
        self.calls = []

    @staticmethod
    def _padding(x, valid_tensor, valid):
        rows = (
            len(x) if valid_tensor is None and valid is None else valid if valid_tensor is None else int(valid_tensor)
        )
        return rows, (torch.arange(len(x)) >= rows).view(-1, 1, 1, 1)

    def _inner(self, x, prologue):
        return x.float() if prologue is None else normalised(x, prologue)

    def norm_state(self, x, *arguments):
        return self._state(x, Norm(*arguments[:8]), *arguments[8:]), torch.zeros(x.shape[1])

    def _state(self, x, norm, valid_tensor, valid, prologue=None):
        rows, _ = self._padding(x, valid_tensor, valid)
        inner = self._inner(x[:rows], prologue)
        mean, var = norm.running_mean, norm.running_var
        if norm.training:
            mean, var = inner.mean(dim=(0, 2, 3)), inner.var(dim=(0, 2, 3), correction=0)
            if norm.running_mean is not None:
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(inner.var(dim=(0, 2, 3)), norm.momentum)
            if norm.batches_tracked is not None:
                norm.batches_tracked.add_(1)
        inverse = (var + norm.eps).rsqrt()
        weight = torch.ones_like(mean) if norm.weight is None else norm.weight
        return torch.stack(
            [mean, inverse, weight * inverse, torch.zeros_like(mean) if norm.bias is None else norm.bias]
        ).detach()

    def batch_norm_act(self, x, *arguments):
        norm, (relu, residual, normed_residual) = Norm(*arguments[:8]), arguments[8:11]
        residual_norm, (prologue, valid_tensor, valid, wants_mask) = Norm(*arguments[11:19]), arguments[19:]
        self.calls.append(("forward", wants_mask))
        assert prologue is None or prologue.data_ptr() % 16 == 0
        assert all(t is None or t.is_contiguous(memory_format=torch.channels_last) for t in (x, residual))
        _, padding = self._padding(x, valid_tensor, valid)
        states = [self._state(x, norm, valid_tensor, valid, prologue)]
        z = normalised(self._inner(x, prologue), states[0], relu=False)
        if normed_residual:
            states.append(self._state(residual, residual_norm, valid_tensor, valid))
            z = z + normalised(residual, states[1], relu=False)
        elif residual is not None:
            z = z + residual.float()
        y = torch.where(padding, 0, F.relu(z) if relu else z).to(x.dtype)
        return y, (z > 0) & ~padding if wants_mask else torch.empty(0), torch.stack(states)

    def _rows(self, g, inner, training, state, count):
        sums = torch.stack([g.sum(dim=(0, 2, 3)), (g * (inner - state[0].view(1, -1, 1, 1))).sum(dim=(0, 2, 3))])
        slope = -sums[1] * state[1] ** 2 * state[2] / count if training else torch.zeros_like(state[0])
        offset = -sums[0] * state[2] / count if training else torch.zeros_like(state[0])
        return torch.stack([sums[1] * state[1], sums[0], slope, offset])

    def _through(self, g, inner, state, rows):
        mean, scale, slope, offset = (v.view(1, -1, 1, 1) for v in (state[0], state[2], rows[2], rows[3]))
        return scale * g + slope * (inner - mean) + offset

    def batch_norm_act_backward(
        self, grads, mask, x, weight, training, residual, second_weight, second_training, *more
    ):
        states, prologue, valid_tensor, valid, wants = more
        self.calls.append(("backward", len(grads)))
        assert all(g.dtype == x.dtype and g.is_contiguous(memory_format=torch.channels_last) for g in grads)
        rows, padding = self._padding(x, valid_tensor, valid)
        count = rows * x[0, 0].numel()
        g = torch.where(padding, 0, sum(g.float() for g in grads) * (1 if mask is None else mask))
        inner = torch.where(padding, 0, self._inner(x, prologue))
        norm_rows = [self._rows(g, inner, training, states[0], count)]
        to_x = self._through(g, inner, states[0], norm_rows[0])
        to_residual, to_prologue = g, None
        if residual is not None:
            other = torch.where(padding, 0, residual.float())
            norm_rows.append(self._rows(g, other, second_training, states[1], count))
            to_residual = self._through(g, other, states[1], norm_rows[1])
        if prologue is not None:
            scale = prologue[2].view(1, -1, 1, 1)
            z = torch.where(padding | (inner <= 0), 0, to_x)
            from_mean = torch.where(padding, 0, x.float() - prologue[0].view(1, -1, 1, 1))
            sums = z.sum(dim=(0, 2, 3))
            to_prologue = torch.stack([-prologue[2] * sums, 0 * sums, (z * from_mean).sum(dim=(0, 2, 3)), sums])
            to_x = scale * z
        maps = [
            torch.where(padding, 0, t).to(x.dtype) if w else None
            for t, w in zip((to_x, to_residual), wants, strict=False)
        ]
        return *maps, to_prologue, torch.stack(norm_rows)

    def norm_state_backward(self, grad, x, weight, training, state, mean_rest, valid_tensor, valid, wants_x):
        self.calls.append(("state backward", wants_x))
        rows, padding = self._padding(x, valid_tensor, valid)
        count = rows * x[0, 0].numel()
        weight = 1 if weight is None else weight
        slope = -(weight * grad[2] + grad[1]) * state[1] ** 3 / count
        out = torch.stack([grad[2] * state[1], grad[3], slope, grad[0] / count])
        to_x = (
            torch.where(padding, 0, self._through(torch.zeros_like(x), torch.where(padding, 0, x), state, out))
            if wants_x
            else None
        )
        return to_x, out


@pytest.fixture(params=["PyTorch", "stand-in"])
def path(request, monkeypatch):
    """PyTorch's operations, which serve the CPU, and the autograd function that the kernels sit
    behind.
    """
    if request.param == "stand-in":
        stand_in = StandIn()
        native = types.SimpleNamespace(
            **{name: getattr(stand_in, name) for name in dir(stand_in) if name.startswith(("batch", "norm_"))}
        )
        native.calls = stand_in.calls
        monkeypatch.setattr(_loader, "native", native)
        monkeypatch.setattr(ops, "serves", lambda op, x, *norms: x.numel() > 0 and x.dtype != torch.float64)
    return request.param


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
def test_values_gradients_and_statistics_are_those_of_modules(path, form, relu, training, consumers):
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
        torch.testing.assert_close(
            result, wanted, rtol=0 if path == "PyTorch" else 1e-5, atol=0 if path == "PyTorch" else 1e-5
        )
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
def test_a_prologue_is_the_norm_before(path, training):
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


def test_every_row_of_a_state_has_a_gradient(path):
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
def test_padding_does_not_count_and_is_not_read(path, form, as_tensor):
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


def test_gradients_of_some_consumers_only(path):
    x, module = make_map().requires_grad_(), make_norm()
    first, _, third = batch_norm_act(x, Norm.of(module), consumers=3)
    weights = [make_map(seed=s) for s in (5, 6)]
    grads = gradients([first, third], weights, [x])
    wanted = F.relu(copy.deepcopy(module)(x))
    torch.testing.assert_close(grads, gradients([wanted] * 2, weights, [x]), rtol=2e-5, atol=2e-5)


def test_gradients_of_any_strides_and_dtype(path):
    x, module = make_map(height=4).requires_grad_(), make_norm()
    for strange in (
        lambda y: y.sum(),  # expanded: strides 0
        lambda y: (y.transpose(2, 3) * make_map(height=4, seed=8).contiguous()).sum(),
        lambda y: y.double().square().sum(),
        lambda y: y[:, 2:5].sum() + y[1:3].sum(),
    ):
        y = batch_norm_act(x, Norm.of(module), consumers=1)
        (grad,) = torch.autograd.grad(strange(y), x)
        (wanted,) = torch.autograd.grad(strange(F.relu(copy.deepcopy(module)(x))), x)
        torch.testing.assert_close(grad, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_16_bits_with_float32_parameters(path, dtype):
    x, residual = make_map(dtype=dtype).requires_grad_(), make_map(seed=2).requires_grad_()  # the residual is float32
    module = make_norm()
    with torch.autocast("cpu", torch.bfloat16):
        y = batch_norm_act(x, Norm.of(module), residual=residual)
    assert y.dtype == dtype
    wide = x.detach().double().requires_grad_()
    twin = copy.deepcopy(module).double()
    wanted = F.relu(twin(wide) + residual.to(dtype))
    step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-9
    torch.testing.assert_close(y.double(), wanted, rtol=step, atol=2 * step)
    grads = torch.autograd.grad(y.float().square().sum(), [x, residual, module.weight])
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [wide, residual, twin.weight])
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=8 * step, atol=8 * step * b.abs().max().item())


def test_parameters_of_another_dtype_get_gradients_of_theirs(path):
    if path == "PyTorch":
        pytest.skip("PyTorch's CPU operations take no float16 parameters beside float32 maps")
    x, module = make_map(), make_norm()
    module.weight.data = module.weight.data.half()
    (grad,) = torch.autograd.grad(batch_norm_act(x, Norm.of(module)).sum(), module.weight)
    twin = make_norm()
    twin.weight.data = module.weight.data.float()
    (wanted,) = torch.autograd.grad(F.relu(twin(x)).sum(), twin.weight)
    assert grad.dtype == torch.float16
    torch.testing.assert_close(grad.float(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 8, 5, 3), (7, 8, 1, 1), (3, 16, 1, 5), (0, 8, 4, 4), (2, 3, 2, 2)], ids=str)
def test_shapes(path, shape):
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


def test_what_needs_no_gradient_gets_none(path):
    x, residual, module = make_map(), make_map(seed=2).requires_grad_(), make_norm()
    module.weight.requires_grad_(False)
    y = batch_norm_act(x, Norm.of(module), residual=residual)
    grads = torch.autograd.grad(y.sum(), [residual, module.bias])
    assert x.grad is None and all(g.isfinite().all() for g in grads)
    with torch.no_grad():
        quiet = batch_norm_act(x, Norm.of(module), residual=residual)
    assert not quiet.requires_grad and torch.equal(quiet, y)
    if path == "stand-in":  # the mask is written for a backward alone
        assert [c for c in _loader.native.calls if c[0] == "forward"] == [("forward", True), ("forward", False)]


def test_inputs_stay_as_they_are(path):
    x, residual, module = make_map().requires_grad_(), make_map(seed=2), make_norm()
    kept = x.detach().clone(), residual.clone(), module.weight.detach().clone()
    batch_norm_act(x, Norm.of(module), residual=residual).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip((x.detach(), residual, module.weight.detach()), kept, strict=True))


def test_another_memory_format_is_copied_and_said_once(path):
    if path == "PyTorch":
        pytest.skip("PyTorch's operations keep the format")
    ops.say_once.cache_clear()
    x, module = make_map().contiguous().requires_grad_(), make_norm()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            y = batch_norm_act(x, Norm.of(module))
    assert [str(w.message).count("channels_last") for w in said] == [2]
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_a_second_derivative_is_refused_by_the_kernels(path):
    x, module = make_map().requires_grad_(), make_norm()
    (grad,) = torch.autograd.grad(batch_norm_act(x, Norm.of(module)).square().sum(), x, create_graph=True)
    if path == "PyTorch":
        grad.square().sum().backward()
    else:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


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
def test_the_library_takes_these_arguments_and_refuses_memory_that_is_not_on_a_card():
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
