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
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Of the largest number of a result: what a few roundings cost.
CLOSE = {F32: 2e-5, BF16: 2e-2, F16: 4e-3}
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


def check(
    what: str,
    ours: dict,
    plain: dict,
    exact: dict,
    tolerances: dict[str, float],
    floors: dict[str, float] | None = None,
) -> None:
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
        beyond = ~other.isfinite() & truth.isfinite()  # beyond float16, in plain PyTorch too
        value, other, truth = (torch.where(beyond, 0, v) for v in (value, other, truth))
        largest = truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0
        largest = max(largest, (floors or {}).get(name, 0.0))
        bound = 8 * error(other, truth) + tolerances.get(name, tolerances[""]) * largest + 1e-9
        try:
            off = error(value, truth)
        except AssertionError as problem:
            pytest.fail(f"{what}: {name}: {problem}")
        assert off <= bound, f"{what}: {name} is off by {off:.3g}; wanted at most {bound:.3g} (largest {largest:.3g})"


def gradients(
    outputs: list[Tensor], upstream: list[Tensor], leaves: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
    if not wanted or not pairs:
        return {f"gradient of {name}": None for name in wanted}
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(wanted.values()), [g.to(y.device) for y, g in pairs], allow_unused=True
    )
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

    def norm(self, channels: int, training: bool) -> dict[str, Tensor | None]:
        kept = self.flag("running statistics", 0.8) or not training
        return {
            "weight": self.normal(channels) if self.flag("weight", 0.8) else None,
            "bias": self.normal(channels) if self.flag("bias", 0.8) else None,
            "mean": self.normal(channels) if kept else None,
            "var": self.normal(channels).abs() + 0.5 if kept else None,
        }


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


def align_conv_case(draw: Draw) -> None:
    dtype = draw.one_of("dtype", (F32, BF16, BF16, F16))
    channels, out_channels = draw.one_of("channels", CHANNELS), draw.one_of("out_channels", CHANNELS)
    stride, prologue = draw.one_of("form", ((1, "norm"), (2, "none"), (2, "norm"), (2, "gate")))
    gated, follows = prologue == "gate", prologue == "norm"
    images, height, width = map_shape(draw, max(channels, out_channels), stride == 2)
    valid, kind = draw.rows(images)
    counted = images if valid is None else valid
    training = draw.flag("training", 0.8) and counted * (height // stride) * (width // stride) != 1
    layout = draw.one_of("layout", ("channels_last", "channels_last", "contiguous", "slice"))
    upstream = draw.one_of("upstream of", ("both", "both", "y", "state"))
    weights = draw.one_of("weights", (F32, dtype))
    needs = [draw.random.random() < 0.85 for _ in range(7)]
    norm = draw.norm(out_channels, training)
    inputs = {
        "x": draw.normal(images, channels, height, width, dtype=dtype),
        "depthwise": (draw.normal(channels, 1, 3, 3) / 3).to(dtype).to(weights),
        "pointwise": (draw.normal(out_channels, channels, 1, 1) / channels**0.5).to(dtype).to(weights),
        "weight": norm["weight"],
        "bias": norm["bias"],
        "prologue": draw.state(channels) if follows else None,
        "gate": draw.normal(images, channels, height // 2, width // 2, dtype=dtype) if gated else None,
    }
    if follows:
        inputs["x"] = off_the_kink(inputs["x"], inputs["prologue"])
    size = [images, out_channels, (height - 1) // stride + 1, (width - 1) // stride + 1]
    to_y, to_state = draw.normal(*size, dtype=dtype), draw.normal(4, out_channels)
    if valid is not None:
        for padded in (inputs["x"], inputs["gate"], to_y):
            if padded is not None:
                padded[valid:] = torch.nan

    def run(function, put, native: bool) -> dict:
        leaves = {
            name: put(laid_out(x, layout) if native and name in ("x", "gate") else x) for name, x in inputs.items()
        }
        leaves = {
            name: None if x is None else x.detach().requires_grad_(n)
            for (name, x), n in zip(leaves.items(), needs, strict=True)
        }
        running = [put(norm["mean"]), put(norm["var"])]
        running = [None if v is None else v.clone() for v in running]
        tracked = torch.tensor(3, device=DEVICE if native else "cpu")
        y, state = function(
            leaves["x"],
            leaves["depthwise"],
            leaves["pointwise"],
            Norm(leaves["weight"], leaves["bias"], *running, tracked, 0.3, 1e-5, training),
            stride=stride,
            prologue=leaves["prologue"],
            gate=leaves["gate"],
            valid_rows=given_rows(valid, kind, native),
        )
        used = {"both": (0, 1), "y": (0,), "state": (1,)}[upstream]
        back = [channels_last(to_y) if native else to_y, to_state]
        grads = gradients([(y, state)[i] for i in used], [put(back[i]) for i in used], leaves)
        assert int(tracked) == 3 + training
        return {"y": y, "state": state, "running mean": running[0], "running var": running[1], **grads}

    ours = run(align_conv.align_conv, guarded, True)
    plain = run(plain_align_conv.align_conv, lambda x: x, False)
    exact = run(plain_align_conv.align_conv, wide, False)
    if valid is not None:
        assert (ours["y"][valid:] == 0).all()
    check(draw.text, ours, plain, exact, {"": CLOSE[dtype]})


def batch_norm_act_case(draw: Draw) -> None:
    dtype, channels = draw.one_of("dtype", (F32, BF16, F16)), draw.one_of("channels", CHANNELS)
    form = draw.one_of("form", ("plain", "residual", "two norms", "prologue", "state"))
    images, height, width = map_shape(draw, channels, False)
    valid, kind = draw.rows(images)
    counted = (images if valid is None else valid) * height * width
    training, second = (draw.flag("training", 0.8) and counted != 1 for _ in range(2))
    relu, consumers = draw.flag("relu"), draw.one_of("consumers", (1, 1, 2, 8))
    layout = draw.one_of("layout", ("channels_last", "channels_last", "contiguous", "slice"))
    needs = [draw.random.random() < 0.85 for _ in range(7)]
    norms = [draw.norm(channels, training), draw.norm(channels, second)]
    # With a large mean the spread keeps few digits: their loss is what `plain` shows.
    offset = draw.one_of("offset", (0.0, 0.0, 3.0, 100.0)) if dtype == F32 and form != "prologue" else 0.0
    size = (images, channels, height, width)
    has_residual = form in ("residual", "two norms")
    inputs = {
        "x": draw.normal(*size, dtype=dtype) + offset,
        "weight": norms[0]["weight"],
        "bias": norms[0]["bias"],
        "residual": draw.normal(*size, dtype=dtype) if has_residual else None,
        "second weight": norms[1]["weight"] if form == "two norms" else None,
        "second bias": norms[1]["bias"] if form == "two norms" else None,
        "prologue": draw.state(channels) if form == "prologue" else None,
    }
    if form == "prologue":
        inputs["x"] = off_the_kink(inputs["x"], inputs["prologue"])
    upstream = [draw.normal(*size, dtype=dtype) for _ in range(consumers)]
    to_state = draw.normal(4, channels)
    if valid is not None:
        for padded in (inputs["x"], inputs["residual"], *upstream):
            if padded is not None:
                padded[valid:] = torch.nan

    def run(module, state_of, put, native: bool, relu: bool, back: list[Tensor]) -> dict:
        maps = ("x", "residual")
        leaves = {name: put(laid_out(x, layout) if native and name in maps else x) for name, x in inputs.items()}
        leaves = {
            name: None if x is None else x.detach().requires_grad_(n)
            for (name, x), n in zip(leaves.items(), needs, strict=True)
        }
        running = [None if v is None else put(v).clone() for each in norms for v in (each["mean"], each["var"])]
        norm = Norm(leaves["weight"], leaves["bias"], *running[:2], None, 0.3, 1e-5, training)
        other = Norm(leaves["second weight"], leaves["second bias"], *running[2:], None, 0.3, 1e-5, second)
        rows = given_rows(valid, kind, native)
        if form == "state":
            state = state_of(leaves["x"], norm, rows)
            results, grads = {"state": state}, gradients([state], [put(to_state)], leaves)
        else:
            y = module(
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
            results = {"y": outputs[0]}
            grads = gradients(outputs, [put(channels_last(g) if native else g) for g in back], leaves)
        return {**results, **{f"running {i}": v for i, v in enumerate(running)}, **grads}

    plain_op = plain_batch_norm_act.batch_norm_act
    if relu and form != "state":  # no gradient where rounding decides which side of zero it is
        before = run(plain_op, plain_norm.norm_state, wide, False, False, [wide(g) for g in upstream])["y"].detach()
        upstream = [
            torch.where(before.abs() < (1e-3 if offset else 1e-4), torch.zeros((), dtype=dtype), g) for g in upstream
        ]
    ours = run(batch_norm_act.batch_norm_act, batch_norm_act.norm_state, guarded, True, relu, upstream)
    plain = run(plain_op, plain_norm.norm_state, lambda x: x, False, relu, upstream)
    exact = run(plain_op, plain_norm.norm_state, wide, False, relu, upstream)
    check(draw.text, ours, plain, exact, {"": CLOSE[dtype] * (1 + offset)})


def norm_pool_case(draw: Draw) -> None:
    dtype, channels = draw.one_of("dtype", (F32, BF16, F16)), draw.one_of("channels", CHANNELS)
    images, height, width = map_shape(draw, channels, False)
    valid, kind = draw.rows(images)
    layout = draw.one_of("layout", ("channels_last", "channels_last", "contiguous", "slice"))
    needs = [draw.random.random() < 0.85 for _ in range(2)]
    inputs = {
        "x": draw.normal(images, channels, height, width, dtype=dtype),
        "state": draw.state(channels) if draw.flag("state", 0.8) else None,
    }
    if inputs["state"] is not None:
        inputs["x"] = off_the_kink(inputs["x"], inputs["state"])
    upstream = draw.normal(images, channels, dtype=dtype)
    if valid is not None:
        inputs["x"][valid:] = upstream[valid:] = torch.nan

    def run(function, put, native: bool) -> dict:
        leaves = {"x": put(laid_out(inputs["x"], layout) if native else inputs["x"]), "state": put(inputs["state"])}
        leaves = {
            name: None if x is None else x.detach().requires_grad_(n)
            for (name, x), n in zip(leaves.items(), needs, strict=True)
        }
        pooled = function(leaves["x"], leaves["state"], given_rows(valid, kind, native))
        return {"pooled": pooled, **gradients([pooled], [put(upstream)], leaves)}

    runs = run(norm_pool.norm_pool, guarded, True), run(plain_norm_pool.norm_pool, lambda x: x, False)
    check(draw.text, *runs, run(plain_norm_pool.norm_pool, wide, False), {"": CLOSE[dtype]})


def batch_norm_pool_case(draw: Draw) -> None:
    dtype, channels = draw.one_of("dtype", (F32, BF16, F16)), draw.one_of("channels", CHANNELS)
    images, height, width = map_shape(draw, channels, False)
    valid, kind = draw.rows(images)
    counted = (images if valid is None else valid) * height * width
    training = draw.flag("training", 0.8) and counted != 1
    layout = draw.one_of("layout", ("channels_last", "channels_last", "contiguous", "slice"))
    needs = [draw.random.random() < 0.85 for _ in range(4)]
    norm = draw.norm(channels, training)
    size = (images, channels, height, width)
    inputs = {
        "x": draw.normal(*size, dtype=dtype),
        "weight": norm["weight"],
        "bias": norm["bias"],
        "residual": draw.normal(*size, dtype=dtype),
    }
    upstream = draw.normal(images, channels, dtype=dtype)

    def plain_op(x, norm, residual, valid_rows, relu=True):
        y = plain_batch_norm_act.batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows, relu=relu)
        return plain_norm_pool.norm_pool(y, None, valid_rows) if relu else y

    def run(function, put, native: bool) -> dict:
        maps = ("x", "residual")
        leaves = {name: put(laid_out(x, layout) if native and name in maps else x) for name, x in inputs.items()}
        leaves = {
            name: None if x is None else x.detach().requires_grad_(n)
            for (name, x), n in zip(leaves.items(), needs, strict=True)
        }
        running = [None if norm[v] is None else put(norm[v]).clone() for v in ("mean", "var")]
        given = Norm(leaves["weight"], leaves["bias"], *running, None, 0.3, 1e-5, training)
        pooled = function(leaves["x"], given, leaves["residual"], given_rows(valid, kind, native))
        grads = gradients([pooled], [put(upstream)], leaves) if pooled.dim() == 2 else {}
        return {"pooled": pooled, "running mean": running[0], "running var": running[1], **grads}

    # Off the ReLU's kink, where rounding decides which gradient it is.
    z = run(lambda *arguments: plain_op(*arguments, relu=False), wide, False)["pooled"].detach()
    inputs["residual"] = torch.where(z.abs() < 5e-3, inputs["residual"] + 0.5, inputs["residual"])
    if valid is not None:
        inputs["x"][valid:] = inputs["residual"][valid:] = upstream[valid:] = torch.nan
    runs = run(batch_norm_pool.batch_norm_pool, guarded, True), run(plain_op, lambda x: x, False)
    check(draw.text, *runs, run(plain_op, wide, False), {"": CLOSE[dtype]})


def expert_losses_case(draw: Draw) -> None:
    dtypes = (
        [draw.one_of("dtype", (F32, BF16, F16))] * 4
        if draw.flag("one dtype", 0.7)
        else [draw.one_of("dtype", (F32, BF16, F16)) for _ in range(4)]
    )
    experts, rows = draw.number("experts", 1, 4), draw.one_of("rows", (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 40))
    classes, size = (
        draw.one_of("classes", (1, 2, 5, 31, 33, 64, 100)),
        draw.one_of("size", (1, 2, 3, 8, 20, 31, 64, 128, 130)),
    )
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
    needs = [draw.random.random() < 0.85 for _ in range(4)]
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
        for padded in (inputs["projections"], inputs["logits"], inputs["features"]):
            padded[:, valid:] = torch.nan
        inputs["student"][valid:] = torch.nan
        labels[valid:] = -12345
    upstream = draw.normal(experts, 3)

    def run(function, put, native: bool) -> dict:
        leaves = {name: put(x).detach().requires_grad_(n) for (name, x), n in zip(inputs.items(), needs, strict=True)}
        own_labels, own_mask = (None if t is None else t.to(DEVICE if native else "cpu") for t in (labels, mask))
        count = given_rows(new, "scalar" if rows_kind == "scalar" else "int", native)
        terms = function(
            *leaves.values(), own_labels, count, own_mask, valid_rows=given_rows(valid, rows_kind, native), **options
        )
        grads = gradients([terms], [put(upstream)], leaves)
        return {
            **{name: terms[:, i] for i, name in enumerate(("contrastive", "cross-entropy", "distillation"))},
            **grads,
        }

    ours, plain = run(expert_losses.expert_losses, guarded, True), run(plain_losses.expert_losses, lambda x: x, False)
    exact = run(plain_losses.expert_losses, wide, False)
    tolerances = {f"gradient of {name}": CLOSE[dtype] for name, dtype in zip(inputs, dtypes, strict=True)}
    # Through a direction a gradient may cancel to far less than what it is a sum of, and to zero
    # for a direction of one number.
    floors = {}
    for name, share in (("projections", 0.3 / min(temperature, 1)), ("features", 0.1), ("student", 0.1)):
        lengths = [length for length in inputs[name].double().norm(dim=-1).flatten().tolist() if length > 0]
        floors[f"gradient of {name}"] = share / min(lengths, default=1.0)
    check(draw.text, ours, plain, exact, {"": 2e-5, **tolerances}, floors)


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
        else draw.normal(size, dtype=draw.random.choice((F32, BF16, F16))) * 10 ** draw.random.uniform(-4, 1)
        for size in sizes
    ]
    shadow = draw.one_of("shadow", (None, BF16, F16))
    numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": draw.one_of("weight_decay", (0.0, 0.1))}
    loss = draw.one_of("loss", (None, 1.5, float("nan"), float("inf")))
    latched = draw.flag("latched", 0.1)
    master, m, v = draw.normal(end), draw.normal(end) * 0.1, draw.normal(end).abs() * 0.01
    steps = torch.randint(0, 50, (count,), generator=draw.generator).float()

    def run(function, device, put) -> dict:
        own = {"master": master.clone(), "m": m.clone(), "v": v.clone()}
        own = {name: put(x) for name, x in own.items()}
        half = None if shadow is None else put(master.to(shadow))
        own_steps, latch = put(steps.clone()), torch.tensor(latched, device=device)
        given = None if loss is None else torch.tensor(loss, device=device)
        rate, gradients = torch.tensor(1e-3, device=device), [put(g) for g in grads]
        function(*own.values(), gradients, offsets, own_steps, rate, shadow=half, loss=given, latch=latch, **numbers)
        return {**own, "steps": own_steps, "latch": latch, **({} if half is None else {"shadow": half})}

    ours, plain = run(adam.adam_step, DEVICE, guarded), run(plain_adam.adam_step, "cpu", lambda x: x)
    assert ours.keys() == plain.keys()
    for name, wanted in plain.items():
        rtol = {BF16: 2**-7, F16: 2**-10}.get(wanted.dtype, 2e-6)
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
    dtype, channels = draw.one_of("dtype", (F32, F32, BF16, F16)), draw.one_of("channels", (3, 4, 8))
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
    bound = (1e-5 + {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}[dtype]) * (1 + truth.abs())
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
        draw.one_of("dtype", (F32, BF16, F16)),
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
