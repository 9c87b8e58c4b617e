"""Heads as batched products against the experts' own linear maps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mose_fast.nn import ExpertNetwork
from mose_fast.nn.heads import LinearMaps, linear_maps


def linears(modules, x):
    return linear_maps(x, [LinearMaps.of(modules)])[0]


def make(experts=4, rows=7, size=24, classes=5):
    torch.manual_seed(0)
    modules = [nn.Linear(size, classes) for _ in range(experts)]
    return modules, torch.randn(experts, rows, size, requires_grad=True)


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("experts", [1, 4])
def test_equal_to_each_experts_linear(rows, experts):
    modules, x = make(experts, rows)
    leaves = [x, *(p for m in modules for p in m.parameters())]
    wanted = torch.stack([module(part) for module, part in zip(modules, x, strict=True)])
    weights = torch.randn(wanted.shape)
    result = linears(modules, x)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
    grads, others = (torch.autograd.grad((y * weights).sum(), leaves) for y in (result, wanted))
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-6)


def test_equal_to_the_networks_heads():
    torch.manual_seed(0)
    network = ExpertNetwork(6, width=4, projection=9)
    features = torch.randn(4, 5, network.feature_size)
    for name, wanted in (("classifier", network.classify(features)), ("projection", network.project(features))):
        modules = [getattr(network, f"{name}{e}") for e in range(1, 5)]
        torch.testing.assert_close(linears(modules, features), wanted, rtol=1e-5, atol=1e-6)


def test_half_precision_features_shadows_and_float32_biases():
    dtype = torch.bfloat16
    modules, x = make()
    weights = [m.weight.detach().to(dtype).requires_grad_() for m in modules]
    biases = [m.bias for m in modules]
    low = x.detach().to(dtype).requires_grad_()
    result = linear_maps(low, [LinearMaps(weights, biases)])[0]
    assert result.dtype == dtype
    exact = torch.stack([p.float() @ w.float().T + b for p, w, b in zip(low, weights, biases, strict=True)])
    torch.testing.assert_close(result.float(), exact, rtol=2**-6, atol=2**-6)
    grads = torch.autograd.grad(result.float().sum(), [low, *weights, *biases])
    assert [g.dtype for g in grads] == [dtype] * 5 + [torch.float32] * 4


def test_under_autocast_as_linear():
    modules, x = make()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.stack([module(part) for module, part in zip(modules, x, strict=True)])
        result = linears(modules, x)
    assert result.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), wanted.float(), rtol=2**-6, atol=2**-6)


def test_gradcheck():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    parameters = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (5, 4), (5,), (5,))]
    assert torch.autograd.gradcheck(
        lambda x, v, w, a, b: linear_maps(x, [LinearMaps([v, w], [a, b])])[0], (x, *parameters)
    )
