"""Every op at 200 random shapes and settings against its reference; written for a GPU, and run on
the emulated one in CI.

Each input lies inside a buffer filled with NaN, so that a read beyond it shows in the result, and
memory that a kernel should have written holds NaN before. Float results may be off by a few times
the error of plain PyTorch in the same type, and by a few roundings. Draws are seeded by their
number: ``case(random.Random(17))`` is the same case everywhere.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.augment import RECIPES
from mose_fast.ops import (
    adam,
    align_conv,
    augment,
    batch_norm_act,
    batch_norm_pool,
    expert_losses,
    norm_pool,
    reservoir,
)
from mose_fast.ops.augment_parameters import draw_augment_parameters
from mose_fast.ops.batch_norm_act import Norm
from mose_fast.reference import adam as plain_adam
from mose_fast.reference import align_conv as plain_align_conv
from mose_fast.reference import augment as plain_augment
from mose_fast.reference import augment_parameters as plain_parameters
from mose_fast.reference import batch_norm as plain_norm
from mose_fast.reference import batch_norm_act as plain_batch_norm_act
from mose_fast.reference import expert_losses as plain_losses
from mose_fast.reference import norm_pool as plain_norm_pool
from mose_fast.reference import reservoir as plain_reservoir

DEVICE = _loader.gpu()

CASES = 200
F32, BF16 = torch.float32, torch.bfloat16
#: Of the largest number of a result: what a few roundings cost.
CLOSE = {F32: 2e-5, BF16: 2e-2}
CHANNELS = (8, 8, 16, 16, 24, 32, 40, 64, 72, 104, 128, 136, 264, 520)
RUNS = [pytest.param(range(first, first + 25), id=f"{first}-{first + 24}") for first in range(0, CASES, 25)]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """Also: one thread, since there are many small calls."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other layouts are copied and odd channels are PyTorch's, which is said
        yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


def guarded(x: Tensor | None) -> Tensor | None:
    """``x`` on the GPU, in its layout, amid NaN; the padding of 64 elements keeps the
    alignment.
    """
    if x is None or not x.is_floating_point():
        return None if x is None else x.to(DEVICE)
    count = x.untyped_storage().nbytes() // x.element_size()
    buffer = torch.full((count + 128,), torch.nan, dtype=x.dtype, device=DEVICE)
    return torch.as_strided(buffer, x.shape, x.stride(), 64).copy_(x)


def channels_last(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous(memory_format=torch.channels_last)


def laid_out(x: Tensor | None, layout: str) -> Tensor | None:
    """A map as the kernels want it, contiguous, or some channels of a larger map."""
    if x is None or layout != "slice":
        return x if layout == "contiguous" else channels_last(x)
    larger = torch.full((x.shape[0], x.shape[1] + 8, *x.shape[2:]), torch.nan, dtype=x.dtype).contiguous(
        memory_format=torch.channels_last
    )
    larger[:, 8:] = x
    return larger[:, 8:]


def error(value: Tensor, exact: Tensor) -> float:
    value, exact = value.double(), exact.double()
    assert value.shape == exact.shape and torch.equal(value.isfinite(), exact.isfinite()), "shape or finiteness differ"
    difference = torch.where(exact.isfinite(), value - exact, 0)
    return difference.abs().max().item() if difference.numel() else 0.0


def check(what: str, ours: dict, plain: dict, exact: dict, tolerances: dict, floors: dict) -> None:
    """Compares results by name; None is a gradient of zero. ``tolerances``: by name, or for all
    others under ''; they are shares of the largest number, which is taken to be at least that of
    ``floors``."""
    assert ours.keys() == exact.keys()
    for name, truth in exact.items():
        values = [ours[name], plain[name], truth]
        shape = next((v for v in values if v is not None), None)
        if shape is None:
            continue
        value, other, truth = (torch.zeros(shape.shape) if v is None else v.detach().cpu() for v in values)
        largest = truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0
        largest = max(largest, floors.get(name, 0.0))
        bound = 8 * error(other, truth) + tolerances.get(name, tolerances[""]) * largest + 1e-9
        try:
            off = error(value, truth)
        except AssertionError as problem:
            pytest.fail(f"{what}: {name}: {problem}")
        assert off <= bound, f"{what}: {name} is off by {off:.3g}; wanted at most {bound:.3g} (largest {largest:.3g})"


def gradients(outputs: list[Tensor], upstream: list[Tensor], leaves: dict) -> dict[str, Tensor | None]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    pairs = [(y, g.to(y.dtype).to(y.device)) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
    if not wanted or not pairs:
        return {f"gradient of {name}": None for name in wanted}
    grads = torch.autograd.grad(*([y for y, _ in pairs], [*wanted.values()], [g for _, g in pairs]), allow_unused=True)
    return {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}


def wide(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


class Draw:
    """Numbers, flags and normal tensors of one case; ``text`` says what was drawn."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.text = f"case {seed}"

    def one_of(self, name: str, choices):
        value = self.random.choice(list(choices))
        self.text += f", {name} {value}"
        return value

    def number(self, name: str, low: int, high: int) -> int:
        return self.one_of(name, range(low, high + 1))

    def flag(self, name: str, share: float = 0.5) -> bool:
        value = self.random.random() < share
        self.text += f", {name}" if value else ""
        return value

    def normal(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def state(self, channels: int) -> Tensor:
        rows = [self.normal(channels) for _ in range(4)]
        rows[1] = rows[1].abs() + 0.5
        return torch.stack(rows)

    def rows(self, images: int) -> tuple[int | None, str]:
        """A number of valid images, and how it is given: none, an int or a scalar on the GPU."""
        kind = self.one_of("rows", ("none", "none", "int", "scalar"))
        return (None, kind) if kind == "none" else (self.number("valid", 0, images), kind)

    def norm(self, channels: int, training: bool, prefix: str = "") -> tuple[dict, Callable[..., Norm]]:
        """Weight and bias of a norm, by name, and how to make it of leaves of these names."""
        kept = self.flag("running statistics", 0.8) or not training
        vectors = {
            prefix + "weight": self.normal(channels) if self.flag("weight", 0.8) else None,
            prefix + "bias": self.normal(channels) if self.flag("bias", 0.8) else None,
        }
        running = [self.normal(channels), self.normal(channels).abs() + 0.5] if kept else [None, None]

        def norm(leaves: dict, put, tracked: Tensor | None = None) -> Norm:
            own = [None if v is None else put(v).clone() for v in running]
            return Norm(*(leaves[name] for name in vectors), *own, tracked, 0.3, 1e-5, training)

        return vectors, norm


def given_rows(valid: int | None, kind: str, native: bool) -> int | Tensor | None:
    return torch.tensor(valid, dtype=torch.int32, device=DEVICE) if native and kind == "scalar" else valid


def off_the_kink(x: Tensor, state: Tensor) -> Tensor:
    """``x`` moved away from where the state's ReLU bends: there rounding alone decides about a
    gradient.
    """
    z = plain_norm.normalised(x.double(), state.double(), relu=False)
    return torch.where(z.abs() < 5e-3 * state[2].view(1, -1, 1, 1).abs().clamp(min=1), x + 0.5, x)


def map_shape(draw: Draw, channels: int, even: bool) -> tuple[int, int, int]:
    images, height, width = draw.number("images", 0, 4), draw.number("height", 1, 11), draw.number("width", 1, 11)
    images = 1 if draw.flag("one image", 0.2) else images
    if even:
        height, width = height + height % 2, width + width % 2
    while max(images, 1) * height * width * channels > 12000 and height * width > 4:
        images, height, width = min(images, 2), min(height, max(2, height - 2)), min(width, max(2, width - 2))
        if height == width == 2:
            break
    return images, height, width


def spoil_padding(valid: int | None, *batches: Tensor | None) -> None:
    for batch in batches:
        if batch is not None and valid is not None:
            batch[valid:] = torch.nan


def compare(draw: Draw, inputs: dict[str, Tensor | None], run, tolerances: dict, floors: dict | None = None) -> dict:
    """Compares ``run(leaves, put, native)``, which returns results by name, outputs and their
    gradients, by the op, by plain PyTorch in the same types and by plain PyTorch in float64.
    """
    layout = draw.one_of("layout", ("channels_last", "channels_last", "contiguous", "slice"))
    needs = {name: draw.random.random() < 0.85 for name in inputs}
    results = []
    for put, native in ((guarded, True), (lambda x: x, False), (wide, False)):
        leaves = {}
        for name, x in inputs.items():
            x = put(laid_out(x, layout) if native and name in ("x", "residual", "gate") else x)
            leaves[name] = None if x is None else x.detach().requires_grad_(needs[name])
        found, outputs, upstream = run(leaves, put, native)
        upstream = [put(channels_last(g) if native and g.dim() == 4 else g) for g in upstream]
        results.append({**found, **gradients(outputs, upstream, leaves)})
    check(draw.text, *results, tolerances, floors or {})
    return results[0]


def moved(norm: Norm, prefix: str = "") -> dict[str, Tensor | None]:
    return {f"{prefix}running mean": norm.running_mean, f"{prefix}running var": norm.running_var}


def align_conv_case(draw: Draw) -> None:
    dtype = draw.one_of("dtype", (F32, BF16, BF16))
    channels, out_channels = draw.one_of("channels", CHANNELS), draw.one_of("out_channels", CHANNELS)
    stride, prologue = draw.one_of("form", ((1, "norm"), (2, "none"), (2, "norm"), (2, "gate")))
    images, height, width = map_shape(draw, max(channels, out_channels), stride == 2)
    valid, kind = draw.rows(images)
    counted = images if valid is None else valid
    training = draw.flag("training", 0.8) and counted * (height // stride) * (width // stride) != 1
    used = draw.one_of("upstream of", ((0, 1), (0, 1), (0,), (1,)))
    weights = draw.one_of("weights", (F32, dtype))
    vectors, norm_of = draw.norm(out_channels, training)
    half = (images, channels, height // 2, width // 2)
    inputs = {
        "x": draw.normal(images, channels, height, width, dtype=dtype),
        "depthwise": (draw.normal(channels, 1, 3, 3) / 3).to(dtype).to(weights),
        "pointwise": (draw.normal(out_channels, channels, 1, 1) / channels**0.5).to(dtype).to(weights),
        **vectors,
        "prologue": draw.state(channels) if prologue == "norm" else None,
        "gate": draw.normal(*half, dtype=dtype) if prologue == "gate" else None,
    }
    if prologue == "norm":
        inputs["x"] = off_the_kink(inputs["x"], inputs["prologue"])
    size = [images, out_channels, (height - 1) // stride + 1, (width - 1) // stride + 1]
    upstream = [draw.normal(*size, dtype=dtype), draw.normal(4, out_channels)]
    spoil_padding(valid, inputs["x"], inputs["gate"], upstream[0])

    def run(leaves, put, native):
        tracked = torch.tensor(3, device=DEVICE if native else "cpu")
        norm, rows = norm_of(leaves, put, tracked), given_rows(valid, kind, native)
        entering = {"prologue": leaves["prologue"], "gate": leaves["gate"]}
        convolve = align_conv.align_conv if native else plain_align_conv.align_conv
        found = convolve(*[*leaves.values()][:3], norm, stride=stride, **entering, valid_rows=rows)
        assert int(tracked) == 3 + training
        results = {"y": found[0], "state": found[1], **moved(norm)}
        return results, [found[i] for i in used], [upstream[i] for i in used]

    ours = compare(draw, inputs, run, {"": CLOSE[dtype]})
    assert valid is None or (ours["y"][valid:] == 0).all()


def batch_norm_act_case(draw: Draw) -> None:
    dtype, channels = draw.one_of("dtype", (F32, BF16)), draw.one_of("channels", CHANNELS)
    form = draw.one_of("form", ("plain", "residual", "two norms", "prologue", "state"))
    images, height, width = map_shape(draw, channels, False)
    valid, kind = draw.rows(images)
    counted = (images if valid is None else valid) * height * width
    training, second = (draw.flag("training", 0.8) and counted != 1 for _ in range(2))
    relu, consumers = draw.flag("relu"), draw.one_of("consumers", (1, 1, 2, 8))
    (vectors, norm_of), (others, other_of) = draw.norm(channels, training), draw.norm(channels, second, "second ")
    # With a large mean the spread keeps few digits: their loss is what plain PyTorch shows.
    offset = draw.one_of("offset", (0.0, 0.0, 3.0, 100.0)) if dtype == F32 and form != "prologue" else 0.0
    size = (images, channels, height, width)
    inputs = {
        "x": draw.normal(*size, dtype=dtype) + offset,
        **vectors,
        "residual": draw.normal(*size, dtype=dtype) if form in ("residual", "two norms") else None,
        **(others if form == "two norms" else dict.fromkeys(others)),
        "prologue": draw.state(channels) if form == "prologue" else None,
    }
    if form == "prologue":
        inputs["x"] = off_the_kink(inputs["x"], inputs["prologue"])
    upstream = [draw.normal(*size, dtype=dtype) for _ in range(consumers)]
    to_state = draw.normal(4, channels)
    spoil_padding(valid, inputs["x"], inputs["residual"], *upstream)

    def run(leaves, put, native, relu=relu):
        norm, other, rows = norm_of(leaves, put), other_of(leaves, put), given_rows(valid, kind, native)
        statistics = {**moved(norm), **moved(other, "second ")}
        if form == "state":
            state = (batch_norm_act if native else plain_norm).norm_state(leaves["x"], norm, rows)
            return {"state": state, **statistics}, [state], [to_state]
        y = (batch_norm_act if native else plain_batch_norm_act).batch_norm_act(
            leaves["x"],
            norm,
            relu=relu,
            residual=leaves["residual"],
            residual_norm=other if form == "two norms" else None,
            prologue=leaves["prologue"],
            consumers=consumers,
            valid_rows=rows,
        )
        outputs = [y] if consumers == 1 else list(y)
        return {"y": outputs[0], **statistics}, outputs, upstream

    if relu and form != "state":  # no gradient where rounding decides which side of zero it is
        before = run({name: wide(x) for name, x in inputs.items()}, wide, False, relu=False)[0]["y"]
        nothing = torch.zeros((), dtype=dtype)
        upstream = [torch.where(before.abs() < (1e-3 if offset else 1e-4), nothing, g) for g in upstream]
    compare(draw, inputs, run, {"": CLOSE[dtype] * (1 + offset)})


def norm_pool_case(draw: Draw) -> None:
    dtype, channels = draw.one_of("dtype", (F32, BF16)), draw.one_of("channels", CHANNELS)
    images, height, width = map_shape(draw, channels, False)
    valid, kind = draw.rows(images)
    inputs = {
        "x": draw.normal(images, channels, height, width, dtype=dtype),
        "state": draw.state(channels) if draw.flag("state", 0.8) else None,
    }
    if inputs["state"] is not None:
        inputs["x"] = off_the_kink(inputs["x"], inputs["state"])
    upstream = draw.normal(images, channels, dtype=dtype)
    spoil_padding(valid, inputs["x"], upstream)

    def run(leaves, put, native):
        module = norm_pool if native else plain_norm_pool
        pooled = module.norm_pool(*leaves.values(), given_rows(valid, kind, native))
        return {"pooled": pooled}, [pooled], [upstream]

    compare(draw, inputs, run, {"": CLOSE[dtype]})


def batch_norm_pool_case(draw: Draw) -> None:
    dtype, channels = draw.one_of("dtype", (F32, BF16)), draw.one_of("channels", CHANNELS)
    images, height, width = map_shape(draw, channels, False)
    valid, kind = draw.rows(images)
    counted = (images if valid is None else valid) * height * width
    training = draw.flag("training", 0.8) and counted != 1
    vectors, norm_of = draw.norm(channels, training)
    size = (images, channels, height, width)
    inputs = {"x": draw.normal(*size, dtype=dtype), **vectors, "residual": draw.normal(*size, dtype=dtype)}
    upstream = draw.normal(images, channels, dtype=dtype)

    def plain_op(x, norm, residual, valid_rows, relu=True):
        y = plain_batch_norm_act.batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows, relu=relu)
        return plain_norm_pool.norm_pool(y, None, valid_rows) if relu else y

    # Off the ReLU's kink, where rounding decides which gradient it is.
    doubles = {name: wide(x) for name, x in inputs.items()}
    z = plain_op(doubles["x"], norm_of(doubles, wide), doubles["residual"], valid, relu=False)
    inputs["residual"] = torch.where(z.abs() < 5e-3, inputs["residual"] + 0.5, inputs["residual"])
    spoil_padding(valid, inputs["x"], inputs["residual"], upstream)

    def run(leaves, put, native):
        norm, function = norm_of(leaves, put), batch_norm_pool.batch_norm_pool if native else plain_op
        pooled = function(leaves["x"], norm, leaves["residual"], given_rows(valid, kind, native))
        return {"pooled": pooled, **moved(norm)}, [pooled], [upstream]

    compare(draw, inputs, run, {"": CLOSE[dtype]})


def expert_losses_case(draw: Draw) -> None:
    one = draw.flag("one dtype", 0.7)
    dtypes = [draw.one_of("dtype", (F32, BF16))] * 4 if one else [draw.one_of("dtype", (F32, BF16)) for _ in range(4)]
    experts, rows = draw.number("experts", 1, 4), draw.one_of("rows", (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 40))
    classes = draw.one_of("classes", (1, 2, 5, 31, 33, 64, 100))
    size = draw.one_of("size", (1, 2, 3, 8, 20, 31, 64, 128, 130))
    features = draw.one_of("features", (1, 2, 5, 32, 63, 160))
    temperature = draw.one_of("temperature", (0.07, 0.07, 0.5, 10.0))
    options = {
        "temperature": temperature,
        "buffer_weight": draw.one_of("buffer_weight", (0.0, 1.0, 2.0)),
        "cross_entropy": draw.one_of("cross_entropy", ("off", "last", "all", "all")),
        "contrastive": draw.one_of("contrastive", ("off", "last", "all", "all")),
        "distillation": draw.one_of("distillation", ("off", "rsd", "sd", "rsd", "sd")),
        "rsd_reduction": draw.one_of("reduction", ("frobenius", "mean_of_norms")),
        "student_index": draw.one_of("student", (None, *range(experts))),
    }
    kind = draw.one_of("kind", ("plain", "plain", "equal", "zero", "large logits", "single labels", "one label"))
    valid, rows_kind = draw.rows(rows)
    new = draw.number("new", 0, rows if valid is None else valid)
    inputs = {
        "projections": draw.normal(experts, rows, size),
        "logits": draw.normal(experts, rows, classes) * 3,
        "features": draw.normal(experts, rows, features),
        "student": draw.normal(rows, features),
    }
    labels = torch.randint(0, min(classes, 5), (rows,), generator=draw.generator)
    labels = torch.arange(rows) % classes if kind == "single labels" else labels * (kind != "one label")
    mask = None
    if draw.flag("mask", 0.75):
        mask = torch.rand(classes, generator=draw.generator) < 0.5
        mask[labels[:new]] = True
        mask[0] = True
    if kind == "equal":
        inputs["projections"][:, rows // 2 :] = inputs["projections"][:, :1]
        inputs["features"][:, rows // 2 :] = inputs["student"][rows // 2 :]
    elif kind == "zero":
        inputs["projections"][:, ::2] = inputs["features"][:, 1::2] = 0
        inputs["student"][::3] = 0
    elif kind == "large logits":
        inputs["logits"] += 3e4
    inputs = {name: x.to(dtype) for (name, x), dtype in zip(inputs.items(), dtypes, strict=True)}
    if valid is not None:
        for batch in inputs.values():
            batch[..., valid:, :] = torch.nan
        labels[valid:] = -12345
    upstream = draw.normal(experts, 3)

    def run(leaves, put, native):
        own_labels, own_mask = (None if t is None else t.to(DEVICE if native else "cpu") for t in (labels, mask))
        count = given_rows(new, "scalar" if rows_kind == "scalar" else "int", native)
        given = {**options, "valid_rows": given_rows(valid, rows_kind, native)}
        module = expert_losses if native else plain_losses
        terms = module.expert_losses(*leaves.values(), own_labels, count, own_mask, **given)
        names = ("contrastive", "cross-entropy", "distillation")
        return dict(zip(names, terms.unbind(1), strict=True)), [terms], [upstream]

    tolerances = {f"gradient of {name}": CLOSE[dtype] for name, dtype in zip(inputs, dtypes, strict=True)}
    # Through a direction a gradient may cancel to far less than what it is a sum of, and to zero
    # for a direction of one number.
    floors = {}
    for name, share in (("projections", 0.3 / min(temperature, 1)), ("features", 0.1), ("student", 0.1)):
        lengths = [length for length in inputs[name].double().norm(dim=-1).flatten().tolist() if length > 0]
        floors[f"gradient of {name}"] = share / min(lengths, default=1.0)
    compare(draw, inputs, run, {"": 2e-5, **tolerances}, floors)


def adam_case(draw: Draw) -> None:
    count = draw.one_of("tensors", (1, 2, 5, 109))
    sizes = [
        draw.random.choice((1, 3, 4, 7, 64, 100) if count > 5 else (1, 5, 64, 1000, 2048, 2049, 5000))
        for _ in range(count)
    ]
    offsets, end = [], 0
    for size in sizes:
        end += draw.random.choice((0, 0, 1, 4))  # a gap that stays as it is
        offsets.append(end)
        end += size
    end += 3
    grads = [
        None
        if draw.random.random() < 0.2
        else draw.normal(size, dtype=draw.random.choice((F32, BF16))) * 10 ** draw.random.uniform(-4, 1)
        for size in sizes
    ]
    shadow = draw.one_of("shadow", (None, BF16))
    averages = draw.flag("averages", 0.5)
    numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": draw.one_of("weight_decay", (0.0, 0.1))}
    loss = draw.one_of("loss", (None, 1.5, float("nan"), float("inf")))
    latched = draw.flag("latched", 0.1)
    master, m, v = draw.normal(end), draw.normal(end) * 0.1, draw.normal(end).abs() * 0.01
    average = draw.normal(end)
    steps = torch.randint(0, 50, (count,), generator=draw.generator).float()

    def run(function, device, put) -> dict:
        own = {"master": master.clone(), "m": m.clone(), "v": v.clone()}
        own = {name: put(x) for name, x in own.items()}
        half = None if shadow is None else put(master.to(shadow))
        own_steps, latch = put(steps.clone()), torch.tensor(latched, device=device)
        given = None if loss is None else torch.tensor(loss, device=device)
        rate, gradients = torch.tensor(1e-3, device=device), [put(g) for g in grads]
        copies = {} if half is None else {"shadow": half}
        if averages:
            copies |= {"average": put(average.clone())}
            copies |= {} if half is None else {"average_shadow": put(average.to(shadow))}
        how = {"loss": given, "latch": latch, "average_rate": 0.3, **copies, **numbers}
        function(*own.values(), gradients, offsets, own_steps, rate, **how)
        return {**own, "steps": own_steps, "latch": latch, **copies}

    ours, plain = run(adam.adam_step, DEVICE, guarded), run(plain_adam.adam_step, "cpu", lambda x: x)
    assert ours.keys() == plain.keys()
    for name, wanted in plain.items():
        rtol = 2**-7 if wanted.dtype == BF16 else 2e-6
        atol = 1e-7 * wanted.double().abs().max().item()
        torch.testing.assert_close(
            ours[name].cpu(), wanted, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{draw.text}: {name}: {text}"
        )
    if latched or loss not in (None, 1.5):
        assert torch.equal(ours["master"].cpu(), master)


def reservoir_case(draw: Draw) -> None:
    capacity, seen = (
        draw.one_of("capacity", (1, 2, 7, 30, 600, 3000)),
        draw.one_of("seen", (0, 1, 5, 29, 31, 1000, 10**9)),
    )
    items, image = draw.one_of("items", (0, 1, 3, 10, 40)), draw.one_of("image", ((1, 1, 3), (4, 4, 3), (3, 5, 3)))
    count, task = draw.one_of("k", (0, 1, 5, 64, 500)), draw.number("task", 0, 3)
    wanted = draw.one_of("filter", reservoir.SlotFilter)

    def bytes_of(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=draw.generator, dtype=torch.uint8)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(0, 4, shape, generator=draw.generator)

    memory = [
        bytes_of(capacity, *image),
        numbers(capacity),
        numbers(capacity),
        numbers(capacity),
        torch.tensor([draw.random.getrandbits(62), 5, seen]),
    ]
    batch = [bytes_of(items, *image), numbers(items), numbers(items)]
    results = []
    for module, device in ((reservoir, DEVICE), (plain_reservoir, "cpu")):
        own, (x, y, index) = ([t.clone().to(device) for t in tensors] for tensors in (memory, batch))
        slots = module.insert(*own, x, y, task, index)
        drawn = module.draw(own[2], own[4], count, wanted, task)
        results.append([t.cpu() for t in (*own, slots, drawn)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), draw.text


def views_case(draw: Draw) -> None:
    height, width = draw.number("height", 1, 24), draw.number("width", 1, 24)
    width = height if draw.flag("square") else width
    sources = [
        torch.randint(
            0, 256, (draw.random.randint(1, 5), height, width, 3), generator=draw.generator, dtype=torch.uint8
        )
        for _ in range(draw.number("sources", 1, 4))
    ]
    kind = draw.one_of("kind", ("plain", "plain", "black and white", "grey", "even"))
    if kind == "black and white":
        sources = [s // 128 * 255 for s in sources]
    elif kind == "grey":
        sources = [s[..., :1].expand(-1, -1, -1, 3).contiguous() for s in sources]
    elif kind == "even":
        sources = [torch.full_like(s, draw.random.choice((0, 7, 255))) for s in sources]
    rows = torch.randint(-1, sum(map(len, sources)), (draw.number("rows", 1, 6),), generator=draw.generator)
    views, draws = draw.number("views", 0, 6), draw.number("draws", 1, 5)
    recipe = RECIPES[draw.one_of("recipe", ("ocm", "simclr", "scr"))]
    seed, sequence = draw.random.getrandbits(62), draw.random.getrandbits(40)
    counter = draw.one_of("counter", (None, 0, 2**33))
    ours = draw_augment_parameters(
        recipe,
        seed,
        sequence,
        draws,
        height,
        width,
        DEVICE,
        counter=None if counter is None else torch.tensor(counter, device=DEVICE),
    )
    codes, factors = plain_parameters.draw_augment_parameters(
        recipe, seed, sequence + (counter or 0), draws, height, width, torch.device("cpu")
    )
    assert torch.equal(ours[0].cpu(), codes) and torch.equal(ours[1].cpu(), factors), draw.text
    orientations = [code for code in range(16) if height == width or (code >> 2) % 2 == 0]
    layout = torch.tensor(
        [
            [draw.random.randrange(len(rows)), draw.random.choice(orientations), draw.random.randint(-1, draws - 1)]
            for _ in range(views)
        ],
        dtype=torch.int32,
    ).view(views, 3)
    mean, std = (0.49, 0.48, 0.44), (0.2, 0.19, 0.21)
    dtype, channels = draw.one_of("dtype", (F32, F32, BF16)), draw.one_of("channels", (3, 4, 8))
    normalised = draw.flag("jitter normalised")
    made = augment.augment(
        [s.to(DEVICE) for s in sources],
        rows.to(DEVICE),
        layout.to(DEVICE),
        *ours,
        mean,
        std,
        jitter_normalised=normalised,
        dtype=dtype,
        channels=channels,
    )
    truth = plain_augment.augment(sources, rows, layout, codes, factors, mean, std, normalised, torch.float64, channels)
    assert made.dtype == dtype and made.is_contiguous(memory_format=torch.channels_last), draw.text
    bound = (1e-5 + {F32: 0.0, BF16: 2.0**-8}[dtype]) * (1 + truth.abs())
    assert ((made.cpu().double() - truth).abs() <= bound).all(), draw.text


OPS = (
    align_conv_case,
    batch_norm_act_case,
    norm_pool_case,
    batch_norm_pool_case,
    expert_losses_case,
    adam_case,
    reservoir_case,
    views_case,
)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", RUNS)
@pytest.mark.parametrize("case", OPS, ids=lambda case: case.__name__.removesuffix("_case"))
def test_random_shapes(case, numbers):
    for number in numbers:
        case(Draw(number))


def padded(x: Tensor, images: int, dim: int = 0) -> Tensor:
    """``x`` with ``images`` more entries behind, all NaN."""
    shape = list(x.shape)
    shape[dim] = images
    result = torch.cat([x, torch.full(shape, torch.nan, dtype=x.dtype)], dim)
    return channels_last(result) if result.dim() == 4 else result


def padded_case(draw: Draw) -> None:
    """A batch with padding and the same without: equal but for the order of sums, and zero
    behind.
    """
    dtype, channels, more = (
        draw.one_of("dtype", (F32, BF16)),
        draw.one_of("channels", CHANNELS[:9]),
        draw.number("padding", 1, 5),
    )
    side = draw.one_of("side", (2, 4, 6))
    images = draw.number("images", 2 if side == 2 else 1, 3)  # one pixel in all has no variance, at stride 2
    maps = {
        "x": draw.normal(images, channels, side, side, dtype=dtype),
        "gate": draw.normal(images, channels, side // 2, side // 2, dtype=dtype),
    }
    weights = {
        "depthwise": draw.normal(channels, 1, 3, 3) / 3,
        "pointwise": draw.normal(16, channels, 1, 1) / channels**0.5,
    }
    vectors = {"weight": draw.normal(16), "bias": draw.normal(16), "state": draw.state(channels)}
    maps["x"] = off_the_kink(maps["x"], vectors["state"])
    losses = {
        "projections": draw.normal(2, images, 8),
        "logits": draw.normal(2, images, 5),
        "student": draw.normal(images, 9),
    }
    losses["features"] = draw.normal(2, images, 9)
    to_y, to_pool, to_state = (
        draw.normal(images, 16, side, side, dtype=dtype),
        draw.normal(images, channels, dtype=dtype),
        draw.normal(4, 16),
    )

    def run(behind: int, as_scalar: bool = False) -> dict[str, Tensor]:
        valid = torch.tensor(images, dtype=torch.int32, device=DEVICE) if as_scalar else images if behind else None
        dims = {**dict.fromkeys(("x", "gate", "student"), 0), **dict.fromkeys(("projections", "logits", "features"), 1)}
        leaves = {
            name: guarded(padded(t, behind, dims[name]) if name in dims else t).requires_grad_()
            for name, t in {**maps, **weights, **vectors, **losses}.items()
        }
        norm = Norm(leaves["weight"], leaves["bias"], None, None)
        y, state = align_conv.align_conv(
            leaves["x"], leaves["depthwise"], leaves["pointwise"], norm, prologue=leaves["state"], valid_rows=valid
        )
        gated = align_conv.align_conv(
            leaves["x"], leaves["depthwise"], leaves["pointwise"], norm, stride=2, gate=leaves["gate"], valid_rows=valid
        ).y
        z = batch_norm_act.batch_norm_act(y, norm, relu=False, valid_rows=valid)
        pooled = norm_pool.norm_pool(leaves["x"], leaves["state"], valid)
        labels = torch.zeros(images + behind, dtype=torch.int64, device=DEVICE)
        terms = expert_losses.expert_losses(
            leaves["projections"],
            leaves["logits"],
            leaves["features"],
            leaves["student"],
            labels,
            0,
            None,
            valid_rows=valid,
            distillation="sd",
        )
        results = {"y": y, "state": state, "gated": gated, "z": z, "pooled": pooled, "terms": terms}
        upstream = [
            padded(to_y, behind),
            to_state,
            padded(to_y[:, :, ::2, ::2], behind),
            padded(to_y, behind),
            padded(to_pool, behind),
            torch.ones(2, 3),
        ]
        return {**results, **gradients(list(results.values()), [g.to(DEVICE) for g in upstream], leaves)}

    bare = run(0)
    for as_scalar in (False, True):
        for name, value in run(more, as_scalar).items():
            wanted = bare[name]
            dim = next((d for d in range(wanted.dim()) if value.shape[d] != wanted.shape[d]), None)
            if dim is not None:
                value, behind = value.split([images, more], dim)
                assert (behind == 0).all(), f"{draw.text}: {name} is not zero in the padding"
            largest = max(1e-3, wanted.detach().abs().max().item())
            torch.testing.assert_close(
                value,
                wanted,
                rtol=0,
                atol=CLOSE[dtype] * largest,
                msg=lambda text, name=name: f"{draw.text}: {name}: {text}",
            )


@pytest.mark.parametrize("numbers", [range(first, first + 10) for first in range(0, 40, 10)], ids=str)
def test_padded_equals_bare(numbers):
    for number in numbers:
        padded_case(Draw(number))
