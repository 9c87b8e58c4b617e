"""The native Adam step on the CPU against torch.optim.Adam and the reference;
tests/gpu/test_adam.py goes on with a GPU.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.adam import adam_step
from mose_fast.reference import adam as reference

needs_library = pytest.mark.skipif(_loader.native is None, reason="the native library was not built")

SHAPES = [(64, 3, 3, 3), (64,), (7, 5), (), (20000,), (0,), (3, 1)]
SETTINGS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-4}


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "fallback"])
def path(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return request.param


class Flat:
    """Weights in flat buffers as the op wants them; ``gap`` elements lie between two parameters."""

    def __init__(self, shapes=SHAPES, gap=3, lr=1e-2, shadow=None, average_rate=0.0):
        generator = torch.Generator().manual_seed(len(shapes))
        self.shapes = shapes
        self.offsets, size = [], 1
        for shape in shapes:
            self.offsets.append(size)
            size += torch.Size(shape).numel() + gap
        self.master = torch.randn(size, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(size), torch.zeros(size)
        self.steps, self.lr = torch.zeros(len(shapes)), torch.tensor(lr)
        self.shadow = None if shadow is None else self.master.to(shadow)
        self.average_rate = average_rate
        self.average = None if average_rate == 0 else torch.randn(size, generator=torch.Generator().manual_seed(size))
        self.average_shadow = None if shadow is None or self.average is None else self.average.to(shadow)
        self.generator = generator

    def parts(self, buffer):
        return [buffer[o : o + torch.Size(s).numel()].view(s) for o, s in zip(self.offsets, self.shapes, strict=True)]

    def gradients(self, dtype=torch.float32):
        return [torch.randn(shape, generator=self.generator).to(dtype) for shape in self.shapes]

    def step(self, gradients, function=adam_step, **options):
        buffers = (self.master, self.exp_avg, self.exp_avg_sq)
        names = ("shadow", "average", "average_shadow", "average_rate")
        options = {**SETTINGS, **{name: getattr(self, name) for name in names}, **options}
        function(*buffers, gradients, self.offsets, self.steps, self.lr, **options)

    def everything(self):
        buffers = (self.master, self.exp_avg, self.exp_avg_sq, self.steps, self.average)
        return [x.clone() for x in (*buffers, self.shadow, self.average_shadow) if x is not None]


def assert_rounded(flat, copied, buffer):
    """As PyTorch rounds."""
    for part, values in zip(flat.parts(copied), flat.parts(buffer), strict=True):
        assert torch.equal(part, values.to(part.dtype))


def theirs(flat, lr=1e-2, **settings):
    weights = [torch.nn.Parameter(part.clone()) for part in flat.parts(flat.master)]
    s = {**SETTINGS, **settings}
    betas = (s["beta1"], s["beta2"])
    return weights, torch.optim.Adam(weights, lr=lr, betas=betas, eps=s["eps"], weight_decay=s["weight_decay"])


@pytest.mark.parametrize("settings", [{}, {"beta1": 0.0, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_to_torch_over_a_hundred_steps(path, dtype, settings):
    flat = Flat(shadow=torch.bfloat16)
    weights, optimiser = theirs(flat, **settings)
    for step in range(100):
        gradients = flat.gradients(dtype)
        if step == 50:
            flat.lr.fill_(1e-3)
            optimiser.param_groups[0]["lr"] = 1e-3
        flat.step(gradients, **settings)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.float()
        optimiser.step()
    for name, buffer in (("exp_avg", flat.exp_avg), ("exp_avg_sq", flat.exp_avg_sq)):
        for part, weight in zip(flat.parts(buffer), weights, strict=True):
            torch.testing.assert_close(part, optimiser.state[weight][name], rtol=1e-5, atol=1e-6)
    for part, weight in zip(flat.parts(flat.master), weights, strict=True):
        assert part.numel() == 0 or (part - weight).abs().max() <= 1e-6
    assert flat.steps.tolist() == [100] * len(SHAPES)
    assert_rounded(flat, flat.shadow, flat.master)


@needs_library
@pytest.mark.parametrize("shadow", [None, torch.bfloat16], ids=str)
def test_native_is_equal_to_the_reference(shadow):
    ours, wanted = (Flat(shadow=shadow, average_rate=0.3) for _ in range(2))
    ours.master.mul_(torch.logspace(-9, 7, len(ours.master)))  # denormal and infinite shadows too
    wanted.master.copy_(ours.master)
    for _ in range(3):
        gradients = ours.gradients()
        ours.step(gradients)
        wanted.step(gradients, reference.adam_step)
    for value, other in zip(ours.everything()[:5], wanted.everything()[:5], strict=True):
        torch.testing.assert_close(value, other, rtol=2e-6, atol=1e-7)
    if shadow is not None:
        assert_rounded(ours, ours.shadow, ours.master)
        assert_rounded(ours, ours.average_shadow, ours.average)


def test_averages_follow_the_weights_that_have_a_gradient(path):
    """Against the same sum in float64; all else is as without averages, bit for bit."""
    flat, without = Flat(shadow=torch.bfloat16, average_rate=0.3), Flat(shadow=torch.bfloat16)
    wanted, latch = flat.average.double(), torch.tensor(False)
    for step in range(7):
        gradients, loss = flat.gradients(), torch.tensor(torch.nan if step == 4 else 1.0)
        gradients[step % 3] = gradients[4 if step < 3 else 5] = None
        for each in (flat, without):
            each.step(gradients, loss=loss, latch=latch)
            latch.fill_(False)
        for average, weight, gradient in zip(*map(flat.parts, (wanted, flat.master)), gradients, strict=True):
            if gradient is not None and step != 4:
                average += 0.3 * (weight.double() - average)
    assert (flat.average - wanted).abs().max() <= 1e-6
    for name in ("master", "exp_avg", "exp_avg_sq", "steps", "shadow"):
        assert torch.equal(getattr(flat, name), getattr(without, name)), name
    assert_rounded(flat, flat.average_shadow, flat.average)


def test_averages_by_hand(path):
    """The first step of Adam is -lr sign(g) where eps is negligible."""
    flat = Flat([(3,)], lr=0.5, average_rate=0.25)
    flat.parts(flat.master)[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
    flat.parts(flat.average)[0].copy_(torch.tensor([0.0, 1.0, 3.5]))
    flat.step([torch.tensor([1.0, -1.0, -2.0])], eps=0.0, weight_decay=0.0)
    torch.testing.assert_close(flat.parts(flat.master)[0], torch.tensor([0.5, 2.5, 3.5]))
    torch.testing.assert_close(flat.parts(flat.average)[0], torch.tensor([0.125, 1.375, 3.5]))


def test_what_lies_between_parameters_stays(path):
    flat = Flat(shadow=torch.bfloat16, average_rate=0.3)
    before = flat.everything()
    inside = torch.zeros(len(flat.master), dtype=torch.bool)
    for part in flat.parts(inside):
        part.fill_(True)
    flat.step(flat.gradients())
    for value, old in zip(flat.everything(), before, strict=True):
        if len(value) == len(inside):
            assert torch.equal(value[~inside], old[~inside])


def test_a_parameter_without_gradient_is_skipped(path):
    flat = Flat()
    weights, optimiser = theirs(flat)
    for step in range(6):
        gradients = flat.gradients()
        for position in (0, 3) if step < 4 else (4,):
            gradients[position] = None
        flat.step(gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimiser.step()
    assert flat.steps.tolist() == [2, 6, 6, 2, 4, 6, 6]
    for part, weight in zip(flat.parts(flat.master), weights, strict=True):
        torch.testing.assert_close(part, weight.data, rtol=1e-6, atol=1e-6)
    before = flat.everything()
    flat.step([None] * len(SHAPES))
    assert all(torch.equal(a, b) for a, b in zip(flat.everything(), before, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_sets_the_latch_and_freezes_every_write(path, bad):
    flat, latch = Flat(shadow=torch.bfloat16, average_rate=0.3), torch.tensor(False)
    flat.step(flat.gradients(), loss=torch.tensor(1.5), latch=latch)
    assert not latch and flat.steps.tolist() == [1] * len(SHAPES)
    before = flat.everything()
    nonsense = [torch.full_like(g, torch.nan) for g in flat.gradients()]
    flat.step(nonsense, loss=torch.tensor(bad), latch=latch)
    assert latch
    flat.step(flat.gradients(), loss=torch.tensor(1.5), latch=latch)  # a later, finite loss changes nothing
    flat.step(flat.gradients(), latch=latch)
    assert latch and all(torch.equal(a, b) for a, b in zip(flat.everything(), before, strict=True))
    flat.step(flat.gradients(), loss=torch.tensor([bad]))  # without a latch: this call alone
    assert all(torch.equal(a, b) for a, b in zip(flat.everything(), before, strict=True))
    latch.fill_(False)
    flat.step(flat.gradients(), loss=torch.tensor(1.5), latch=latch)
    assert flat.steps.tolist() == [2] * len(SHAPES) and not torch.equal(flat.master, before[0])


def test_gradients_are_read_as_they_lie_and_left_as_they_are(path):
    flat = Flat([(4, 3, 5, 5), (6, 7)])
    images = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    matrix = torch.randn(7, 6).T
    kept = images.clone(), matrix.clone()
    flat.step([images, matrix])
    other = Flat([(4, 3, 5, 5), (6, 7)])
    other.step([images.permute(0, 2, 3, 1).contiguous(), matrix.T.contiguous()])
    assert torch.equal(flat.master, other.master)
    assert torch.equal(images, kept[0]) and torch.equal(matrix, kept[1])


def test_an_unaligned_gradient_serves_too(path):
    flat, other = Flat([(1001,)]), Flat([(1001,)])
    gradient = torch.randn(1002)
    flat.step([gradient[1:]])
    other.step([gradient[1:].clone()])
    assert torch.equal(flat.master, other.master)


def test_nan_in_one_gradient_reaches_its_weights_alone(path):
    flat = Flat()
    gradients = flat.gradients()
    gradients[2][0, 1] = torch.nan
    flat.step(gradients)
    assert flat.master.isnan().sum() == 1 and flat.parts(flat.master)[2][0, 1].isnan()


@needs_library
def test_any_number_of_threads_gives_the_same():
    results = []
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            flat = Flat([(300000,), (5, 5)], average_rate=0.3)
            flat.step(flat.gradients())
        finally:
            torch.set_num_threads(threads)
        results.append(flat.everything())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "exp_avg has shape", {"exp_avg": torch.zeros(39)}),
        (ValueError, "exp_avg_sq has strides", {"exp_avg_sq": torch.zeros(80)[::2]}),
        (TypeError, "shadow has dtype torch.float32", {"shadow": torch.zeros(40)}),
        (
            TypeError,
            r"gradients\[1\] has dtype torch.float64",
            {"gradients": [torch.zeros(4), torch.zeros(4, dtype=torch.float64)]},
        ),
        (
            ValueError,
            r"gradients\[0\] has shape \(4,\) and strides \(0,\)",
            {"gradients": [torch.zeros(1).expand(4), None]},
        ),
        (ValueError, r"offsets\[1\] is 3; wanted at least 4", {"offsets": [0, 3]}),
        (ValueError, "parameter 1 ends at 42; wanted at most 40", {"offsets": [0, 38]}),
        (ValueError, r"offsets\[0\] is -1; wanted at least 0", {"offsets": [-1, 20]}),
        (ValueError, "2 gradients and 1 offsets", {"offsets": [0]}),
        (ValueError, "steps has shape", {"steps": torch.zeros(())}),
        (TypeError, "lr is 0.1", {"lr": 0.1}),
        (ValueError, "beta2 is 1.0", {"beta2": 1.0}),
        (ValueError, "eps is -1", {"eps": -1}),
        (ValueError, "weight_decay is nan", {"weight_decay": float("nan")}),
        (ValueError, "average has shape", {"average": torch.zeros(39)}),
        (TypeError, "average_shadow has dtype torch.float32", {"average_shadow": torch.zeros(40)}),
        (
            ValueError,
            "average_shadow is given and average is None",
            {"average_shadow": torch.zeros(40, dtype=torch.bfloat16)},
        ),
        (ValueError, r"average_rate is 1\.5; wanted 0 to 1", {"average_rate": 1.5}),
        (ValueError, "average_rate is nan", {"average_rate": float("nan")}),
        (TypeError, "latch has dtype torch.int32", {"latch": torch.zeros((), dtype=torch.int32)}),
        (ValueError, "loss has shape", {"loss": torch.zeros(2)}),
    ],
)
def test_errors(path, error, message, change):
    arguments = {
        "master": torch.zeros(40),
        "exp_avg": torch.zeros(40),
        "exp_avg_sq": torch.zeros(40),
        "gradients": [torch.zeros(4), torch.zeros(4)],
        "offsets": [0, 20],
        "steps": torch.zeros(2),
        "lr": torch.tensor(0.1),
        **SETTINGS,
        **change,
    }
    with pytest.raises(error, match=message):
        adam_step(**arguments)
