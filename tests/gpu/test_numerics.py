"""What large means and large logits cost, maps without an image, memory that starts anywhere; for a
GPU, and the emulated one in CI.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops.align_conv import align_conv
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.ops.expert_losses import masked_cross_entropy
from mose_fast.reference import align_conv as plain_align_conv
from mose_fast.reference import batch_norm as plain_norm

DEVICE = _loader.gpu()

DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def misaligned(x: Tensor) -> Tensor:
    """The same in memory from 4 (2) bytes beyond a multiple of 16."""
    memory = torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)
    return torch.as_strided(memory, x.shape, x.stride(), 1).copy_(x)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).abs().amax(dim=(0, 2, 3)) / exact.abs().amax(dim=(0, 2, 3))).max().item()


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("size", [(2, 16, 1, 2), (3, 16, 5, 4), (8, 64, 16, 16)], ids=str)
def test_the_gradient_of_a_state_keeps_its_digits_beside_a_large_mean(offset, size):
    """x minus the mean is taken with what rounding left of the mean."""
    x = channels_last(normal(*size) + offset)
    weight, upstream = normal(size[1], seed=1), normal(4, size[1], seed=2)

    def run(function, dtype):
        leaf = x.to(dtype).requires_grad_()
        state = function(leaf, Norm(weight.to(dtype), None, None, None, eps=1e-3))
        return torch.autograd.grad(state, leaf, upstream.to(dtype))[0]

    exact, plain = run(plain_norm.norm_state, torch.float64), run(plain_norm.norm_state, torch.float32)
    assert relative_error(run(norm_state, torch.float32), exact) <= 4 * relative_error(plain, exact) + 4e-6


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_gradient_through_align_conv_keeps_its_digits_beside_a_large_mean(offset):
    """Where y has a large mean; pointwise is the unit matrix, and depthwise takes the middle, so
    that all y is exact.
    """
    x = channels_last(normal(3, 16, 6, 4) + offset)
    depthwise = torch.zeros(16, 1, 3, 3, device=DEVICE)
    depthwise[:, :, 1, 1] = 1
    pointwise, upstream = torch.eye(16, device=DEVICE).view(16, 16, 1, 1), normal(4, 16, seed=2)

    def run(function, dtype):
        leaf = x.to(dtype).requires_grad_()
        norm = Norm(None, None, None, None, eps=1e-3)
        state = function(leaf, depthwise.to(dtype), pointwise.to(dtype), norm, stride=2).state
        return torch.autograd.grad(state, leaf, upstream.to(dtype))[0]

    exact, plain = run(plain_align_conv.align_conv, torch.float64), run(plain_align_conv.align_conv, torch.float32)
    assert relative_error(run(align_conv, torch.float32), exact) <= 4 * relative_error(plain, exact) + 4e-6


@pytest.mark.parametrize("offset", [0.0, 3e4, -3e4])
def test_the_gradient_of_large_logits_keeps_its_digits(offset):
    logits = (normal(9, 33) + offset).requires_grad_()
    labels = torch.arange(9, device=DEVICE)
    loss = masked_cross_entropy(logits, labels)
    exact = logits.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, labels)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    for grad, other in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, exact), strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "out_channels"), [(16, 16), (24, 16), (136, 264)])
@pytest.mark.parametrize("training", [True, False])
def test_no_image_has_a_state_too(dtype, channels, out_channels, training):
    """Unwritten memory holds NaN here."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        x = channels_last(torch.empty(0, channels, 4, 4, dtype=dtype, device=DEVICE)).requires_grad_()
        weight = normal(out_channels).requires_grad_()
        results = []
        for function in (align_conv, plain_align_conv.align_conv):
            running = [normal(out_channels, seed=1), normal(out_channels, seed=2).abs()]
            norm = Norm(weight, None, *running, training=training)
            y, state = function(x, normal(channels, 1, 3, 3), normal(out_channels, channels, 1, 1), norm, stride=2)
            assert y.shape == (0, out_channels, 2, 2)
            results.append(
                (
                    state,
                    *running,
                    *torch.autograd.grad((y, state), weight, (torch.ones_like(y), torch.ones_like(state))),
                )
            )
        torch.testing.assert_close(*results)
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [16, 136])
def test_memory_may_start_anywhere(dtype, channels):
    """Vectors and weights are copied where the kernels want other addresses, as maps are."""
    x = channels_last(normal(2, channels, 4, 4).to(dtype))
    gate = channels_last(normal(2, channels, 2, 2).to(dtype))
    tensors = {
        "x": x,
        "depthwise": normal(channels, 1, 3, 3).to(dtype),
        "pointwise": normal(16, channels, 1, 1, seed=3).to(dtype),
        "weight": normal(16),
        "bias": normal(16, seed=1),
        "prologue": normal(4, channels).abs(),
        "gate": gate,
    }
    to_y, to_state = channels_last(normal(2, 16, 4, 4).to(dtype)), normal(4, 16, seed=4)

    def run(put):
        leaves = {name: put(t).detach().requires_grad_() for name, t in tensors.items()}
        norm = Norm(leaves["weight"], leaves["bias"], put(normal(16)), put(normal(16).abs()))
        convolutions = (leaves["x"], leaves["depthwise"], leaves["pointwise"], norm)
        y, state = align_conv(*convolutions, prologue=leaves["prologue"])
        gated = align_conv(*convolutions, stride=2, gate=leaves["gate"]).y
        upstream = (put(to_y), put(to_state), put(channels_last(to_y[:, :, ::2, ::2])))
        results = [y, state, gated, *torch.autograd.grad((y, state, gated), list(leaves.values()), upstream)]
        of_x = norm_state(leaves["x"], Norm(None, None, None, None))
        z = batch_norm_act(leaves["x"], Norm(None, None, None, None), prologue=leaves["prologue"])
        return [*results, of_x, z, *torch.autograd.grad((of_x, z), leaves["x"], (put(tensors["prologue"]), put(x)))]

    assert all(torch.equal(a, b) for a, b in zip(run(misaligned), run(lambda t: t), strict=True))


def test_a_scalar_count_is_cut_and_never_refused():
    """Its value lies on the GPU, where looking would wait for it."""
    for dtype in DTYPES:
        one = channels_last(normal(1, 16, 1, 1).to(dtype))
        depthwise, pointwise, norm = normal(16, 1, 3, 3), normal(16, 16, 1, 1), Norm(None, None, None, None)
        prologue = normal(4, 16, seed=5).abs()
        for count in (1, 0, -3, 9):
            rows = torch.tensor(count, dtype=torch.int32, device=DEVICE)
            y, state = align_conv(one, depthwise, pointwise, norm, prologue=prologue, valid_rows=rows)
            assert y.isfinite().all() and state.isfinite().all()
            assert batch_norm_act(one, norm, valid_rows=rows).isfinite().all()
        x = channels_last(normal(3, 16, 2, 2).to(dtype))
        for count in (-3, 9):
            rows, cut = torch.tensor(count, dtype=torch.int32, device=DEVICE), max(0, min(3, count))
            both = [
                [
                    *align_conv(x, depthwise, pointwise, norm, prologue=prologue, valid_rows=given),
                    norm_state(x, norm, given),
                ]
                for given in (rows, cut)
            ]
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
