"""The ops over feature maps as torch.compile and opcheck see them: the same bits as in eager mode,
without a graph break, and schemas and fakes that are true.

The ops of tests/unit/ops that have code for the CPU are checked there.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.align_conv import Norm, align_conv
from mose_fast.ops.batch_norm_act import batch_norm_act, norm_state
from mose_fast.ops.batch_norm_pool import batch_norm_pool
from mose_fast.ops.norm_pool import norm_pool

DEVICE = _loader.gpu()
IMAGES, CHANNELS, SIDE = 3, 16, 4


def make(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def make_norm(channels=CHANNELS, *, training=True):
    running = make(channels, seed=3), make(channels, seed=4).abs()
    return Norm(
        make(channels, seed=1), make(channels, seed=2), *running, torch.tensor(3, device=DEVICE), 0.1, 1e-5, training
    )


def make_state():
    return make(4, CHANNELS, seed=5)


def rows(kind):
    return {"all": None, "int": 2, "tensor": torch.tensor(2, dtype=torch.int32, device=DEVICE)}[kind]


def another(norm):
    """A norm with tensors of its own: the compiler takes no tensor twice."""
    running = norm.running_mean.clone(), norm.running_var.clone()
    return Norm(norm.weight * 2, norm.bias + 1, *running, norm.batches_tracked.clone())


def activation(x, norm, valid, weights):
    a, b = batch_norm_act(x, norm, consumers=2, valid_rows=valid)
    return a * 2, b


def two_norms(x, norm, valid, weights):
    return (batch_norm_act(x, norm, residual=x * 2, residual_norm=another(norm), valid_rows=valid),)


def residual(x, norm, valid, weights):
    return (batch_norm_act(x, norm, relu=False, residual=x * 2, valid_rows=valid),)


def with_prologue(x, norm, valid, weights):
    return (batch_norm_act(x, norm, prologue=norm_state(x, another(norm), valid), valid_rows=valid),)


def pool(x, norm, valid, weights):
    return norm_pool(x, norm_state(x, norm, valid), valid), norm_pool(x, None, valid)


def last_pool(x, norm, valid, weights):
    return (batch_norm_pool(x, norm, x * 2, valid),)


def convolutions(x, norm, valid, weights):
    depthwise, pointwise, gate = weights
    first = align_conv(x, depthwise, pointwise, norm, stride=2, gate=gate.to(x.dtype), valid_rows=valid)
    return align_conv(first.y, depthwise, pointwise, another(norm), prologue=first.state, valid_rows=valid)


@pytest.mark.slow
@pytest.mark.parametrize("valid", ["all", "int", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [activation, two_norms, residual, with_prologue, pool, last_pool, convolutions])
def test_compiles_without_a_graph_break(function, dtype, valid):
    results = []
    weights = make(CHANNELS, 1, 3, 3, seed=6), make(CHANNELS, CHANNELS, 1, 1, seed=7), make(IMAGES, CHANNELS, 2, 2)
    torch.compiler.reset()
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        x, norm = make(IMAGES, CHANNELS, SIDE, SIDE, dtype=dtype).requires_grad_(), make_norm()
        leaves = [x, norm.weight.requires_grad_(), norm.bias.requires_grad_()]
        outputs = call(x, norm, rows(valid), weights)
        grads = torch.autograd.grad(sum(y.float().square().sum() for y in outputs), leaves)
        results.append([*outputs, *grads, norm.running_mean, norm.running_var, norm.batches_tracked])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def arguments(name, valid, training):
    """Arguments of a registered op, and whether a gradient is asked for or not."""
    x, norm, state = make(IMAGES, CHANNELS, SIDE, SIDE), make_norm(training=training), make_state()
    half, half_norm = make(IMAGES, CHANNELS, SIDE // 2, SIDE // 2, seed=8), make_norm(training=training)
    valid = (valid, None) if isinstance(valid, torch.Tensor) else (None, valid)
    taps, matrix, rest = make(CHANNELS, 1, 3, 3, seed=6), make(CHANNELS, CHANNELS, seed=7), make(CHANNELS, seed=9)
    wide = x.to(torch.bfloat16)
    normed, gated = ((wide, taps, 2, *given, *valid) for given in ((state, None), (None, half.to(torch.bfloat16))))
    mask = torch.ones(x.numel() // 8, dtype=torch.uint8, device=DEVICE)
    kept = make(2, IMAGES, CHANNELS, seed=10)
    return {
        "norm_pool": [(x, state, *valid, True), (x, None, *valid, False)],
        "norm_pool_backward": [
            (
                x[:, :, 0, 0].contiguous(),
                x,
                state,
                *(x[:, :, 0, 0].contiguous() for _ in range(2)),
                *valid,
                [True, True],
            ),
            (x[:, :, 0, 0].contiguous(), x, None, None, None, *valid, [True, False]),
        ],
        "batch_norm_act": [
            (x, *norm, True, None, False, *Norm(None, None, None, None), state, *valid, True),
            (x, *norm, False, x * 2, True, *half_norm, None, *valid, False),
        ],
        "batch_norm_act_backward": [
            ([x, x * 2], mask, x, norm.weight, training, None, None, False, state, state, *valid, [True, True, True]),
            (
                [x],
                None,
                x,
                None,
                training,
                x * 2,
                norm.bias,
                True,
                torch.stack([state, state]),
                None,
                *valid,
                [False, True, False],
            ),
            ([x], None, x, None, training, None, None, False, state, None, *valid, [False, False, False]),
        ],
        "batch_norm_pool": [(x, *norm, x * 2, *valid, for_backward) for for_backward in (True, False)],
        "batch_norm_pool_backward": [
            (x[:, :, 0, 0].contiguous(), mask, kept, x, weight, training, state, *valid, wants)
            for weight, wants in ((norm.weight, [True, True]), (None, [False, False]))
        ],
        "norm_state": [(x, *norm, *valid)],
        "norm_state_backward": [
            (state, x, norm.weight, training, state, rest, *valid, wants) for wants in (True, False)
        ],
        "align_conv": [
            (matrix.to(torch.bfloat16), *norm, True, *normed),
            (matrix.to(torch.bfloat16), *norm, False, *gated),
        ],
        "align_conv_depthwise": [normed, gated],
        "align_conv_grad_y": [
            (wide, state, wide, state, None, norm.weight, True, training, matrix.to(torch.bfloat16), None, *valid),
            (wide, state, wide, state, None, norm.weight, True, training, matrix.to(torch.bfloat16), wide, *valid),
            (None, state, x, state, rest, None, False, training, None, None, *valid),
            (x, None, x, state, rest, norm.weight, True, training, None, None, *valid),
        ],
        "align_conv_backward": [
            (half.to(torch.bfloat16), [True, True, True, False], *normed),
            (half.to(torch.bfloat16), [True, True, False, True], *gated),
            (half.to(torch.bfloat16), [False] * 4, *gated),
        ],
    }[name]


NAMES = (
    "norm_pool",
    "norm_pool_backward",
    "batch_norm_act",
    "batch_norm_act_backward",
    "batch_norm_pool",
    "batch_norm_pool_backward",
    "norm_state",
    "norm_state_backward",
    "align_conv",
    "align_conv_depthwise",
    "align_conv_grad_y",
    "align_conv_backward",
)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen"])
@pytest.mark.parametrize("valid", ["all", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, valid, training):
    op = getattr(torch.ops.mose_fast, name).default
    for call in arguments(name, rows(valid), training):
        assert set(torch.library.opcheck(op, call).values()) == {"SUCCESS"}


def moved(x, elements):
    """``x`` in its layout, that many elements behind an address that any kernel takes."""
    buffer = torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)
    return torch.as_strided(buffer, x.shape, x.stride(), elements).copy_(x)


def places(call):
    """Where the arguments have floats: an index, or one with the index in a list."""
    for i, value in enumerate(call):
        for at, x in [((i, j), x) for j, x in enumerate(value)] if isinstance(value, list) else [((i,), value)]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                yield at


@pytest.mark.parametrize("name", NAMES)
def test_what_starts_elsewhere_is_refused_or_gives_the_same_bits(name):
    """An emulated GPU notices an access that a GPU would refuse; under torch.compile nothing but
    the glue looks at addresses.
    """
    for number in range(len(arguments(name, None, True))):
        expected = getattr(_loader.native, name)(*arguments(name, None, True)[number])
        for at in places(arguments(name, None, True)[number]):
            for elements in (1, 2, 4):
                call = list(arguments(name, None, True)[number])  # anew: some arguments are written
                if len(at) == 2:
                    call[at[0]] = list(call[at[0]])
                    call[at[0]][at[1]] = moved(call[at[0]][at[1]], elements)
                else:
                    call[at[0]] = moved(call[at[0]], elements)
                try:
                    found = getattr(_loader.native, name)(*call)
                except RuntimeError as refusal:
                    assert "from a multiple of 16 bytes" in str(refusal), f"argument {at}, {elements} elements further"
                else:
                    both = [[x] if isinstance(x, torch.Tensor) else x for x in (expected, found)]
                    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*both, strict=True))
