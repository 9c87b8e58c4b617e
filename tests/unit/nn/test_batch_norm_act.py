"""The op in place of nn.BatchNorm2d, add and ReLU."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state


class BatchNormAct2d(nn.BatchNorm2d):
    """A module whose forward is the op."""

    def forward(self, x, residual=None, *, residual_norm=None, relu=True):
        second = None if residual_norm is None else Norm.of(residual_norm)
        return batch_norm_act(x, Norm.of(self), relu=relu, residual=residual, residual_norm=second)


class Block(nn.Module):
    """A residual block that changes the shape, either way."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        norm = BatchNormAct2d if fused else nn.BatchNorm2d
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = norm(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = norm(8)
        self.conv3 = nn.Conv2d(3, 8, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(8)
        self.norm4 = norm(8)
        self.fused = fused

    def forward(self, x):
        if self.fused:
            y = self.norm2(self.conv2(self.norm1(self.conv1(x))), self.conv3(x), residual_norm=self.norm3)
            return self.norm4(y, y, relu=False)
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)) + self.norm3(self.conv3(x)))
        return self.norm4(y) + y


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_gives_the_same_bits_on_the_cpu(autocast, memory_format):
    torch.manual_seed(0)
    plain, fused = Block(False), Block(True)
    fused.load_state_dict(plain.state_dict())
    assert list(fused.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=memory_format)
    results = []
    for block in (plain, fused):
        for _ in range(2):
            block.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = block(x)
            y.float().square().sum().backward()
        block.eval()
        with torch.no_grad():
            evaluated = block(x)
        results.append([y, evaluated, *(p.grad for p in block.parameters()), *block.state_dict().values()])
        block.train()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_parameters_and_statistics():
    module = BatchNormAct2d(8, eps=1e-3, affine=False, track_running_stats=False)
    x = torch.randn(6, 8, 2, 2)
    wanted = F.batch_norm(x, None, None, training=True, eps=1e-3)
    assert torch.equal(module(x, relu=False), wanted) and torch.equal(module.eval()(x, relu=False), wanted)


def norms_of_pytorch() -> list[tuple[str, nn.BatchNorm2d]]:
    """Every way in which a module of PyTorch can be set, made so or changed later, with statistics
    of its own; and what to call it.
    """
    found = []
    for training, made, now, momentum in itertools.product((True, False), (True, False), (True, False), (0.3, None)):
        module = nn.BatchNorm2d(8, momentum=momentum, track_running_stats=made).train(training)
        module.track_running_stats = now
        with torch.no_grad():
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                if tensor is not None:
                    tensor.uniform_(0.5, 1.5)
        found.append((f"training={training}, track={made} then {now}, momentum={momentum}", module))
    return found


@pytest.mark.parametrize("how", ["whole", "padded", "state", "second"])
def test_each_setting_of_a_norm_means_what_it_means_to_pytorch(how):
    """Results and running statistics of a module's own forward, by each way into the ops."""
    torch.manual_seed(0)
    refused = 0
    for name, module in norms_of_pytorch():
        x = torch.randn(5, 8, 3, 3)
        twin = copy.deepcopy(module)
        if module.training and module.track_running_stats and module.momentum is None:
            refused += 1
            with pytest.raises(ValueError, match="momentum is None"):
                Norm.of(module)
            continue
        wanted, norm = twin(x), Norm.of(module)
        if how == "whole":
            found = batch_norm_act(x, norm, relu=False)
        elif how == "padded":
            found = batch_norm_act(torch.cat([x, torch.full_like(x, torch.nan)]), norm, relu=False, valid_rows=5)[:5]
        elif how == "state":
            mean, _, scale, shift = (row.view(1, -1, 1, 1) for row in norm_state(x, norm))
            found = (x - mean) * scale + shift
        else:
            plain = nn.BatchNorm2d(8)
            found = batch_norm_act(x, Norm.of(plain), relu=False, residual=x, residual_norm=norm)
            found = found - nn.BatchNorm2d(8)(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        for value, other in zip(module.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(value, other, msg=lambda text, name=name: f"{name}: {text}")
    assert refused == 2
