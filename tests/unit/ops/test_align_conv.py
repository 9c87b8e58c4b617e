"""align_conv on the CPU against PyTorch's own modules; tests/gpu/test_align_conv.py goes on with a
GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.nn.alignment import AttentionGate, DownBlock
from mose_fast.ops import align_conv as op
from mose_fast.ops.align_conv import AlignedMap, Norm, align_conv
from mose_fast.reference.batch_norm import norm_state, normalised


def make(images=3, channels=8, out_channels=8, side=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, like=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = draw(images, channels, side, side)
    gate = draw(images, channels, side // 2, side // 2)
    prologue = torch.stack([draw(channels), draw(channels).abs() + 0.5, draw(channels), draw(channels)]).to(wide)
    depthwise, pointwise = draw(channels, 1, 3, 3), draw(out_channels, channels, 1, 1)
    weight, bias = draw(out_channels, like=wide), draw(out_channels, like=wide)
    norm = Norm(
        weight, bias, torch.zeros(out_channels, dtype=wide), torch.ones(out_channels, dtype=wide), torch.tensor(0)
    )
    return x, depthwise, pointwise, norm, prologue, gate


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=generator)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2, generator=generator)
    return module


def through_down_block(block: DownBlock, x, *, gate=None, valid_rows=None) -> AlignedMap:
    first = align_conv(
        x,
        block.depthwise1.weight,
        block.pointwise1.weight,
        Norm.of(block.norm1),
        stride=2,
        gate=gate,
        valid_rows=valid_rows,
    )
    return align_conv(
        first.y,
        block.depthwise2.weight,
        block.pointwise2.weight,
        Norm.of(block.norm2),
        prologue=first.state,
        valid_rows=valid_rows,
    )


def buffers(module: nn.Module) -> dict:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("images", [1, 2, 5])
@pytest.mark.parametrize("training", [True, False])
def test_two_in_a_row_are_a_down_block(images, training):
    block = randomised(DownBlock(8, 16)).double().train(training)
    x = torch.randn(
        images, 8, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(images), requires_grad=True
    )
    before = buffers(block)
    wanted = block(x)
    upstream = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, [x, *block.parameters()], upstream)
    wanted_buffers = buffers(block)
    block.load_state_dict(before, strict=False)
    last = through_down_block(block, x)
    y = normalised(*last)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, [x, *block.parameters()], upstream), wanted_grads)
    torch.testing.assert_close(buffers(block), wanted_buffers)
    assert wanted_buffers["norm1.num_batches_tracked"] == int(training)


def test_the_gate_of_the_attention_module():
    gate = randomised(AttentionGate(8)).double()
    after = randomised(DownBlock(8, 16)).double()
    x = torch.randn(3, 8, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    parameters = [*gate.parameters(), *after.parameters()]
    wanted = after(gate(x))
    upstream = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, [x, *parameters], upstream)
    last = through_down_block(gate.down, x)
    u = normalised(normalised(*last), norm_state(normalised(*last), Norm.of(gate.norm)))
    y = normalised(*through_down_block(after, x, gate=u))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, [x, *parameters], upstream), wanted_grads)


def test_up_sampling_and_padding_by_hand():
    # One channel, one image: a gate of ln(1/3) opens to a quarter everywhere; the taps that leave
    # the image count nothing.
    x = torch.arange(1.0, 17).view(1, 1, 4, 4)
    norm = Norm(None, None, None, None)
    state = torch.tensor([[2.0], [1.0], [1.0], [5.0]])  # relu(x + 3): zero padding must not become relu(5 - 2)
    gate = torch.full((1, 1, 2, 2), float(torch.tensor(1 / 3).log()))
    y, after = align_conv(
        x, torch.ones(1, 1, 3, 3), torch.full((1, 1, 1, 1), 2.0), norm, stride=2, prologue=state, gate=gate
    )
    sums = [
        [x[0, 0, :2, :2].sum() + 4 * 3, x[0, 0, :2, 1:].sum() + 6 * 3],
        [x[0, 0, 1:, :2].sum() + 6 * 3, x[0, 0, 1:, 1:].sum() + 9 * 3],
    ]
    torch.testing.assert_close(y[0, 0], torch.tensor(sums) / 2)
    torch.testing.assert_close(after[0, 0], y.mean())
    torch.testing.assert_close(after[2, 0], (y.var(unbiased=False) + 1e-5).rsqrt())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("with_prologue", [False, True])
@pytest.mark.parametrize("with_gate", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_gradcheck(stride, with_prologue, with_gate, training):
    x, depthwise, pointwise, norm, prologue, gate = make(2, 2, 3, 4)
    norm = norm._replace(training=training, running_mean=norm.weight * 0 + 0.3, running_var=norm.weight * 0 + 1.5)
    leaves = [x, depthwise, pointwise, norm.weight, norm.bias, *([prologue] * with_prologue), *([gate] * with_gate)]

    def function(x, depthwise, pointwise, weight, bias, *others):
        others = list(others)
        own = norm._replace(
            weight=weight, bias=bias, running_mean=norm.running_mean.clone(), running_var=norm.running_var.clone()
        )
        state = others.pop(0) if with_prologue else None
        u = others.pop(0) if with_gate else None
        return tuple(
            align_conv(x, depthwise, pointwise, own, stride=stride, prologue=state, gate=u, valid_rows=1 + stride % 2)
        )

    assert torch.autograd.gradcheck(function, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("valid", [0, 1, 2, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_padding_is_never_read(valid, stride, as_tensor):
    x, depthwise, pointwise, norm, prologue, gate = make(5)
    x[valid:] = gate[valid:] = torch.nan
    leaves = [leaf.requires_grad_() for leaf in (x, depthwise, pointwise, norm.weight, norm.bias, prologue, gate)]
    options = {"stride": stride, "prologue": prologue}
    rows = torch.tensor(valid, dtype=torch.int32) if as_tensor else valid
    padded = align_conv(x, depthwise, pointwise, norm, gate=gate, valid_rows=rows, **options)
    upstream = torch.randn(padded.y.shape, dtype=torch.float64)
    of_state = torch.randn(padded.state.shape, dtype=torch.float64)
    upstream_with_nan = upstream.clone()
    upstream_with_nan[valid:] = torch.nan
    grads = torch.autograd.grad(tuple(padded), leaves, (upstream_with_nan, of_state))
    running = norm.running_mean.clone(), norm.running_var.clone()
    assert (padded.y[valid:] == 0).all()
    assert (grads[0][valid:] == 0).all() and (grads[6][valid:] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    if valid == 0:
        assert all((grad == 0).all() for i, grad in enumerate(grads) if i not in (3, 4))
        assert (running[0] == 0).all() and (running[1] == 1).all()
        return
    norm.running_mean.zero_()
    norm.running_var.fill_(1)
    alone = align_conv(x[:valid], depthwise, pointwise, norm, gate=gate[:valid], **options)
    wanted = torch.autograd.grad(tuple(alone), leaves, (upstream[:valid], of_state))
    torch.testing.assert_close(padded.y[:valid], alone.y)
    torch.testing.assert_close(padded.state, alone.state)
    torch.testing.assert_close((norm.running_mean, norm.running_var), running)
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes(dtype, weights, autocast):
    x, depthwise, pointwise, norm, prologue, gate = make(dtype=dtype)
    leaves = [x, depthwise.to(weights), pointwise.to(weights), norm.weight, norm.bias, prologue, gate]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    norm = norm._replace(weight=leaves[3], bias=leaves[4])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = align_conv(*leaves[:3], norm, stride=2, prologue=prologue, gate=gate)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    grads = torch.autograd.grad((y, state), leaves, (torch.ones_like(y), torch.ones_like(state)))
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
    exact_norm = Norm(
        norm.weight.double(), norm.bias.double(), *(v.double() for v in (norm.running_mean, norm.running_var))
    )
    rounded = [leaf.detach().to(dtype).double() for leaf in leaves[:3]]
    exact = align_conv(*rounded, exact_norm, stride=2, prologue=prologue.double(), gate=gate.double())
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact.y, rtol=4 * step, atol=4 * step * exact.y.abs().max().item())


def test_layouts_give_the_same():
    x, depthwise, pointwise, norm, prologue, gate = make(dtype=torch.float32)
    wanted = align_conv(x, depthwise, pointwise, norm, prologue=prologue, gate=gate)
    for layout in (
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: torch.cat([t, t], dim=3)[..., : t.shape[3]],
    ):
        fresh = norm._replace(running_mean=torch.zeros(8), running_var=torch.ones(8))
        given = layout(x)
        kept = given.clone()
        result = align_conv(given, depthwise, layout(pointwise), fresh, prologue=prologue, gate=layout(gate))
        torch.testing.assert_close(tuple(result), tuple(wanted))
        assert torch.equal(given, kept)


def test_no_image():
    x, depthwise, pointwise, norm, _, _ = make(0, dtype=torch.float32)
    leaves = [leaf.requires_grad_() for leaf in (x, depthwise, pointwise, norm.weight, norm.bias)]
    y, state = align_conv(*leaves[:3], norm, stride=2)
    assert y.shape == (0, 8, 4, 4)
    grads = torch.autograd.grad((y, state), leaves, (torch.ones_like(y), torch.ones_like(state)))
    assert grads[0].shape == x.shape
    assert (grads[1] == 0).all() and (grads[2] == 0).all()
    assert (norm.running_mean == 0).all() and (norm.running_var == 1).all()


def test_a_scalar_count_is_cut_and_never_refused():
    """As in the other ops over maps: on a GPU the host does not know it."""
    x, depthwise, pointwise, norm, _, _ = make(dtype=torch.float32)
    state = align_conv(
        x[:1, :, :1, :1], depthwise, pointwise, norm, valid_rows=torch.tensor(1, dtype=torch.int32)
    ).state
    assert state.isfinite().all()
    for count in (-3, 9):
        rows = torch.tensor(count, dtype=torch.int32)
        cut = align_conv(x, depthwise, pointwise, norm, valid_rows=max(0, min(3, count)))
        torch.testing.assert_close(tuple(align_conv(x, depthwise, pointwise, norm, valid_rows=rows)), tuple(cut))


def test_statistics_of_a_large_mean():
    x, depthwise, _, norm, _, _ = make(4, dtype=torch.float32)
    depthwise = torch.zeros_like(depthwise)
    depthwise[:, :, 1, 1] = 1
    x = 1000 + 0.01 * x
    y, state = align_conv(x, depthwise, torch.eye(8).view(8, 8, 1, 1), norm)
    exact = y.double()
    torch.testing.assert_close(state[0].double(), exact.mean(dim=(0, 2, 3)), rtol=1e-7, atol=0)
    torch.testing.assert_close(
        state[1].double(), (exact.var(dim=(0, 2, 3), unbiased=False) + 1e-5).rsqrt(), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a: a.update(x=None), TypeError, "x is None"),
        (lambda a: a.update(x=a["x"].long()), TypeError, "x has dtype torch.int64"),
        (lambda a: a.update(x=a["x"][0]), ValueError, r"x has shape \(8, 8, 8\)"),
        (lambda a: a.update(x=a["x"][..., :7]), ValueError, "x has sides 8 x 7; wanted even ones for stride 2"),
        (lambda a: a.update(x=a["x"][..., :7], stride=1), ValueError, "x has sides 8 x 7; wanted even ones for a gate"),
        (lambda a: a.update(stride=3), ValueError, "stride is 3; wanted 1 or 2"),
        (
            lambda a: a.update(depthwise=a["depthwise"][:4]),
            ValueError,
            r"depthwise has shape \(4, 1, 3, 3\); wanted \(8, 1, 3, 3\)",
        ),
        (
            lambda a: a.update(pointwise=a["pointwise"][:, :4]),
            ValueError,
            r"pointwise has shape \(8, 4, 1, 1\); wanted \[out_channels, 8, 1, 1\]",
        ),
        (lambda a: a.update(pointwise=a["pointwise"].view(8, 8)), ValueError, r"pointwise has shape \(8, 8\)"),
        (lambda a: a.update(norm=nn.BatchNorm2d(8)), TypeError, "norm is BatchNorm2d"),
        (
            lambda a: a.update(norm=a["norm"]._replace(weight=torch.ones(4))),
            ValueError,
            r"norm.weight has shape \(4,\); wanted \(8,\)",
        ),
        (
            lambda a: a.update(norm=a["norm"]._replace(bias=torch.ones(8).half())),
            TypeError,
            "norm.bias has dtype torch.float16",
        ),
        (
            lambda a: a.update(norm=a["norm"]._replace(running_var=None)),
            ValueError,
            "one of running_mean and running_var",
        ),
        (
            lambda a: a.update(norm=Norm(None, None, None, None, training=False)),
            ValueError,
            "norm.training is False without running statistics",
        ),
        (lambda a: a.update(prologue=a["prologue"][:2]), ValueError, r"prologue has shape \(2, 8\); wanted \(4, 8\)"),
        (lambda a: a.update(prologue=a["prologue"].double()), TypeError, "prologue has dtype torch.float64"),
        (
            lambda a: a.update(gate=a["gate"][..., :2]),
            ValueError,
            r"gate has shape \(3, 8, 4, 2\); wanted \(3, 8, 4, 4\)",
        ),
        (lambda a: a.update(gate=a["gate"].half()), TypeError, "gate has dtype torch.float16"),
        (lambda a: a.update(valid_rows=4), ValueError, "valid_rows is 4; wanted an integer from 0 to 3"),
        (lambda a: a.update(valid_rows=True), ValueError, "valid_rows is True"),
        (lambda a: a.update(valid_rows=torch.tensor(2)), TypeError, "valid_rows is torch.int64"),
        (
            lambda a: a.update(x=a["x"][:1, :, :2, :2], gate=None),
            ValueError,
            "Expected more than 1 value per channel when training",
        ),
    ],
)
def test_errors_by_name(change, error, words):
    x, depthwise, pointwise, norm, prologue, gate = make(dtype=torch.float32)
    arguments = {
        "x": x,
        "depthwise": depthwise,
        "pointwise": pointwise,
        "norm": norm,
        "stride": 2,
        "prologue": prologue,
        "gate": gate,
    }
    change(arguments)
    with pytest.raises(error, match=words):
        align_conv(**arguments)


def test_against_convolutions_of_pytorch():
    x, depthwise, pointwise, norm, prologue, gate = make(5, 8, 16)
    for stride in (1, 2):
        entered = F.relu(
            (x - prologue[0].view(1, -1, 1, 1)) * prologue[2].view(1, -1, 1, 1) + prologue[3].view(1, -1, 1, 1)
        )
        entered = entered * F.interpolate(gate, scale_factor=2, mode="bilinear", align_corners=False).sigmoid()
        wanted = F.conv2d(F.conv2d(entered, depthwise, stride=stride, padding=1, groups=8), pointwise)
        result = align_conv(x, depthwise, pointwise, norm, stride=stride, prologue=prologue, gate=gate)
        torch.testing.assert_close(result.y, wanted)
        torch.testing.assert_close(
            normalised(*result, relu=False), F.batch_norm(wanted, None, None, norm.weight, norm.bias, training=True)
        )


@pytest.mark.skipif(
    not (_loader.record and _loader.record["backend"] == "cuda"), reason="the native library has no CUDA code"
)
def test_the_library_takes_these_arguments_and_refuses_memory_that_is_not_on_a_gpu():
    native = _loader.native
    x, depthwise, pointwise, norm, state, gate = make(dtype=torch.float32)
    matrix, rows = pointwise.view(8, 8), torch.tensor(2, dtype=torch.int32)
    for call in (
        lambda: native.align_conv(matrix, *norm, True, x, depthwise, 1, None, gate, rows, None),
        lambda: native.align_conv_depthwise(x, depthwise, 2, state, None, None, 2),
        lambda: native.align_conv_grad_y(x, None, x, state, None, None, True, True, None, None, None, None),
        lambda: native.align_conv_grad_y(None, state, x, state, state[0], norm[0], False, True, matrix, x, rows, None),
        lambda: native.align_conv_backward(x, (True, False, True, False), x, depthwise, 1, state, None, None, 3),
    ):
        with pytest.raises(RuntimeError, match="is on cpu; wanted the GPU where x is"):
            call()


@pytest.mark.skipif(_loader.gpu() is None, reason="the native library has no kernels")
def test_which_kernels():
    half, served = torch.bfloat16, op.align_conv_serves
    assert all(served(half, c, o).fused_forward for c, o in ((64, 64), (64, 128), (128, 128), (128, 256), (16, 8)))
    assert served(half, 128, 128, 2).fused_forward and not served(half, 128, 136, 2).fused_forward
    assert served(half, 64, 128).fused_backward
    assert not served(half, 128, 256).fused_backward
    assert served(half, 64, 128).fused_weights and not served(half, 128, 128).fused_weights
    assert not served(torch.float32, 64, 64).fused_backward
    for case in ((torch.float32, 64, 64), (half, 256, 256), (half, 128, 512), (half, 24, 64)):
        assert served(*case).any and not served(*case).fused_forward
    for case in ((torch.float64, 64, 64), (half, 12, 64), (half, 64, 12), (half, 64, 2056), (half, 0, 64)):
        assert served(*case) == (False,) * 4
    forms = {(stride, prologue, gate) for stride in (1, 2) for prologue in (False, True) for gate in (False, True)}
    served_forms = {(1, True, False), (2, False, False), (2, True, False), (2, False, True)}
    assert {form for form in forms if _loader.native.align_conv_serves_form(*form)} == served_forms


def test_no_kernels_without_a_library(monkeypatch):
    monkeypatch.setattr(_loader, "native", None)
    assert op.align_conv_serves(torch.bfloat16, 64, 64) == (False,) * 4
