"""Batch norm, add, ReLU and pool in one op where there is no GPU, and its checks of arguments;
tests/gpu/test_batch_norm_pool.py goes on with a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mose_fast.ops.batch_norm_act import Norm
from mose_fast.ops.batch_norm_pool import batch_norm_pool


def make(dtype=torch.float32, training=True):
    g = torch.Generator().manual_seed(0)
    x, residual = (
        torch.randn(5, 6, 4, 3, generator=g, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for _ in range(2)
    )
    weight, bias, mean, var = (torch.randn(6, generator=g, dtype=dtype) for _ in range(4))
    norm = Norm(weight.requires_grad_(), bias.requires_grad_(), mean, var.abs() + 0.5, torch.tensor(3))
    return x.requires_grad_(), residual.requires_grad_(), norm._replace(training=training)


@pytest.mark.parametrize("training", [True, False])
def test_equal_to_pytorch(training):
    x, residual, norm = make(training=training)
    leaves = [x, norm.weight, norm.bias, residual]
    running = [norm.running_mean.clone(), norm.running_var.clone()]
    pooled = batch_norm_pool(x, norm, residual)
    wanted = F.relu(F.batch_norm(x, *running, norm.weight, norm.bias, training) + residual).mean(dim=(2, 3))
    torch.testing.assert_close(pooled, wanted)
    upstream = torch.randn(5, 6)
    ours, theirs = (torch.autograd.grad(y, leaves, upstream) for y in (pooled, wanted))
    for grad, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(norm.running_mean, running[0]) and torch.equal(norm.running_var, running[1])
    assert norm.batches_tracked == 3 + training


@pytest.mark.parametrize("valid", [None, 3, torch.tensor(3, dtype=torch.int32)], ids=str)
def test_gradcheck(valid):
    x, residual, norm = make(torch.float64)
    norm = norm._replace(running_mean=None, running_var=None, batches_tracked=None)

    def function(x, residual, weight, bias):
        return batch_norm_pool(x, norm._replace(weight=weight, bias=bias), residual, valid)

    assert torch.autograd.gradcheck(function, (x, residual, norm.weight, norm.bias))


def test_padding_counts_nowhere():
    x, residual, norm = make()
    leaves = [x, norm.weight, norm.bias, residual]
    alone = batch_norm_pool(x[:3], norm, residual[:3], 3)
    wanted = torch.autograd.grad(alone.square().sum(), leaves)
    with torch.no_grad():
        x[3:] = residual[3:] = torch.nan
    pooled = batch_norm_pool(x, norm, residual, 3)
    assert torch.equal(pooled[:3], alone) and (pooled[3:] == 0).all()
    for grad, other in zip(torch.autograd.grad(pooled.square().sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(grad, other)


def test_errors():
    x, residual, norm = make()
    with pytest.raises(TypeError, match="norm is 3"):
        batch_norm_pool(x, 3, residual)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(6,\); wanted \(3,\)"):
        batch_norm_pool(x[:, :3], norm, residual[:, :3])
    with pytest.raises(ValueError, match="with at least one pixel"):
        batch_norm_pool(x[:, :, :0], norm, residual[:, :, :0])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batch_norm_pool(x[:1, :, :1, :1], norm, residual[:1, :, :1, :1])
