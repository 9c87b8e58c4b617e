"""Inputs of the native ops, drawn from a seed, and every result of an op by name: what the
self-check and the tests of kernels on a GPU compare.

Results whose name begins with ``gradient`` are those of the backward pass. Padding holds NaN, which
no op may read.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mose_fast.ops import reservoir
from mose_fast.ops.adam import adam_step
from mose_fast.ops.align_conv import align_conv
from mose_fast.ops.augment import augment
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.ops.batch_norm_pool import batch_norm_pool
from mose_fast.ops.expert_losses import expert_losses
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.ops.null import null
from mose_fast.reference import align_conv as reference_align_conv
from mose_fast.reference import augment as reference_augment
from mose_fast.reference import augment_parameters as reference_parameters
from mose_fast.reference import batch_norm as reference_norm
from mose_fast.reference import batch_norm_act as reference_act
from mose_fast.reference import expert_losses as reference_losses
from mose_fast.reference import norm_pool as reference_pool
from mose_fast.reference import null as reference_null
from mose_fast.reference import reservoir as reference_reservoir

Results = dict[str, Tensor]
Size = tuple[int, int, int, int]  # of a map: [N, C, H, W]
Rows = int | Tensor | None  # how many are valid

_CPU = torch.device("cpu")
#: A value before its ReLU: nothing may depend on which side of zero rounding puts it.
_EDGE = {torch.float32: 1e-3, torch.bfloat16: 2.0**-5}


class Problem(ABC):
    """Inputs of one op, ``valid`` of whose images or rows are no padding (None: all). Subclasses
    take the shape and other arguments of their own before those of this class.

    Attributes:
        op: The op, and ``form``, PyTorch's form of it.
        rounded: How many maps are rounded to ``dtype`` between inputs and results.
        floor: What another order of sums may cost, of the largest number of a result: 64 roundings
            of float32. 0: results are decisions or copies, whose bits must be equal.
    """

    op: ClassVar[Any]
    form: ClassVar[Any]
    rounded: ClassVar[int] = 0
    floor: ClassVar[float] = 2.0**-18

    def __init__(self, dtype: torch.dtype, device: str, seed: int, valid: int | None = None) -> None:
        self.dtype, self.device, self.valid = dtype, device, valid
        self._generator = torch.Generator().manual_seed(seed)

    @abstractmethod
    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None, **options: Any) -> Results:
        """The results of ``function``, called like :attr:`op`, with everything in ``dtype``."""

    def ours(self, **options: Any) -> Results:
        """The op's results, with the number of rows as captured steps give it."""
        rows = None if self.valid is None else torch.tensor(self.valid, dtype=torch.int32, device=self.device)
        return self.run(self.op, valid_rows=rows, **options)

    def plain(self, **options: Any) -> Results:
        """Those of PyTorch's form, in the same types."""
        return self.run(self.form, valid_rows=self.valid, **options)

    def exact(self, **options: Any) -> Results:
        """Those in float64."""
        return self.run(self.form, torch.float64, valid_rows=self.valid, **options)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device)

    def map(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return _channels_last((self.normal(*shape) * scale + shift).to(self.dtype))

    def coarse(self, *shape: int) -> Tensor:
        """Multiples of 1/64: products and differences of them are exact in float32."""
        return self.normal(*shape).mul(64).round().div(64)

    def norm(self, channels: int) -> nn.BatchNorm2d:
        """A norm with weights and biases."""
        module = nn.BatchNorm2d(channels, device=self.device)
        with torch.no_grad():
            module.weight.copy_(self.normal(channels).abs() + 0.5)
            module.bias.copy_(self.normal(channels) / 4)
        return module

    def pad(self, *tensors: Tensor | None) -> None:
        """Puts NaN where padding is."""
        for tensor in tensors:
            if tensor is not None and self.valid is not None:
                tensor[self.valid :] = torch.nan


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _leaf(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A leaf of its own, in the same memory order."""
    if x is None:
        return None
    x = x.detach().to(x.dtype if dtype is None else dtype)
    return x.clone(memory_format=torch.preserve_format).requires_grad_()


def _copied(module: nn.BatchNorm2d, dtype: torch.dtype | None, training: bool) -> nn.BatchNorm2d:
    return copy.deepcopy(module).train(training).to(dtype)


def _gradients(outputs: Sequence[Tensor], leaves: dict[str, Tensor | None], upstream: Sequence[Tensor]) -> Results:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    given = [g.to(y.dtype) for y, g in zip(outputs, upstream, strict=True)]
    grads = torch.autograd.grad(tuple(outputs), list(wanted.values()), given, allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(wanted.items(), grads, strict=True)
    }


def _statistics(*modules: nn.BatchNorm2d) -> Results:
    return {f"{name} {number}": value for number, m in enumerate(modules) for name, value in m.named_buffers()}


@dataclass(frozen=True)
class Shape:
    """Of a map [images, channels, side, width] into align_conv; ``width`` 0 is the side."""

    images: int
    channels: int
    out_channels: int
    side: int
    stride: int = 1
    prologue: bool = False
    gate: bool = False
    width: int = 0

    def __str__(self) -> str:
        parts = [f"{self.images}x{self.channels}x{self.side}x{self.width or self.side} to {self.out_channels}"]
        parts += [f"stride {self.stride}"] if self.stride > 1 else []
        return ", ".join([*parts, *(name for name in ("prologue", "gate") if getattr(self, name))])


class AlignConv(Problem):
    """Results: y, state, gradients, running statistics, which serve without ``training``."""

    op, form = staticmethod(align_conv), staticmethod(reference_align_conv.align_conv)
    rounded = 2  # what enters the convolutions, and what is between them

    def __init__(self, shape: Shape, *common: Any, training: bool = True, **padding: int | None) -> None:
        super().__init__(*common, **padding)
        self.shape, self.training, width = shape, training, shape.width or shape.side
        x = self.map(shape.images, shape.channels, shape.side, width)
        rows = [self.normal(shape.channels) for _ in range(3)]
        self.state = torch.stack([rows[0] / 10, torch.ones_like(rows[0]), *rows[1:]]) if shape.prologue else None
        if shape.prologue:
            z = reference_norm.normalised(x.double(), self.state.double(), relu=False)
            x = _channels_last(torch.where(z.abs() < 5e-3, x + 0.25, x))
        self.x = x
        gate = self.map(shape.images, shape.channels, shape.side // 2, width // 2).relu()
        self.gate = gate if shape.gate else None
        self.depthwise = (self.normal(shape.channels, 1, 3, 3) * 0.3).to(self.dtype)
        self.pointwise = (self.normal(shape.out_channels, shape.channels, 1, 1) * shape.channels**-0.5).to(self.dtype)
        self.module = self.norm(shape.out_channels)
        out = (shape.side - 1) // shape.stride + 1, (width - 1) // shape.stride + 1
        self.grads = self.map(shape.images, shape.out_channels, *out, scale=0.1), self.normal(4, shape.out_channels)
        self.pad(self.x, self.gate, self.grads[0])

    def run(
        self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None, *, grads: Any = None
    ) -> Results:
        module = _copied(self.module, dtype, self.training)
        inputs = {"x": self.x, "depthwise": self.depthwise, "pointwise": self.pointwise}
        leaves = {n: _leaf(x, dtype) for n, x in {**inputs, "prologue": self.state, "gate": self.gate}.items()}
        options = {"norm": Norm.of(module), "stride": self.shape.stride, "valid_rows": valid_rows}
        result = function(**leaves, **options)
        gradients = _gradients(result, leaves | dict(module.named_parameters()), self.grads if grads is None else grads)
        return {"y": result.y.detach(), "state": result.state.detach(), **gradients, **_statistics(module)}


#: What :class:`BatchNormAct` computes beside the norm and ReLU of its map.
FORMS = ("plain", "residual", "two norms", "prologue")


class BatchNormAct(Problem):
    """Results: y, gradients, running statistics. ``form_of_op`` is one of :data:`FORMS`,
    ``consumers`` the number of gradients that are added up, ``offset`` and ``deviation`` are those
    of the maps. Without ``training`` the norms use their running statistics.
    """

    op, form = staticmethod(batch_norm_act), staticmethod(reference_act.batch_norm_act)
    rounded = 1  # the sum of the gradients

    def __init__(
        self,
        form_of_op: str,
        shape: Size,
        *common: Any,
        consumers: int = 1,
        offset: float = 0.5,
        deviation: float = 2.0,
        training: bool = True,
        **padding: int | None,
    ) -> None:
        super().__init__(*common, **padding)
        channels, self.training = shape[1], training
        self.form_of_op, self.consumers = form_of_op, consumers
        self.x, self.residual = (self.map(*shape, scale=deviation, shift=offset) for _ in range(2))
        self.grads = [self.map(*shape) for _ in range(consumers)]
        self.norms = [self.norm(channels) for _ in range(2)]
        ones = torch.ones(channels, device=self.device)
        rows = [ones * offset - 0.3, ones / deviation, self.normal(channels).abs() + 0.5, ones * 0.1]
        self.state = torch.stack(rows)
        if form_of_op == "prologue":
            near = reference_norm.normalised(self.x.float(), self.state, relu=False).abs() < 1e-3
            self.x = _channels_last(torch.where(near, (rows[0] + 1).view(1, -1, 1, 1).to(self.dtype), self.x))
        z = self.run(partial(self.form, relu=False), torch.float64, self.valid)["y"]
        self.grads = [_channels_last(torch.where(z.abs() < _EDGE[self.dtype], 0, g)) for g in self.grads]
        self.pad(self.x, self.residual, *self.grads)

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None) -> Results:
        norms = [_copied(norm, dtype, self.training) for norm in self.norms]
        x, residual, state = (_leaf(value, dtype) for value in (self.x, self.residual, self.state))
        options, leaves = {}, {"x": x, **dict(norms[0].named_parameters())}
        if self.form_of_op in ("residual", "two norms"):
            options["residual"] = leaves["residual"] = residual
        if self.form_of_op == "two norms":
            options["residual_norm"] = Norm.of(norms[1])
            leaves |= {f"second {name}": parameter for name, parameter in norms[1].named_parameters()}
        if self.form_of_op == "prologue":
            options["prologue"] = leaves["prologue"] = state
        y = function(x, Norm.of(norms[0]), consumers=self.consumers, valid_rows=valid_rows, **options)
        y = (y,) if self.consumers == 1 else y
        used = norms[: 2 if self.form_of_op == "two norms" else 1]
        return {"y": y[0].detach(), **_gradients(y, leaves, self.grads), **_statistics(*used)}


class NormState(Problem):
    """The state of a norm over a map. Results: state, gradients, running statistics."""

    op, form = staticmethod(norm_state), staticmethod(reference_norm.norm_state)

    def __init__(self, shape: Size, *common: Any, **padding: int | None) -> None:
        super().__init__(*common, **padding)
        self.x = self.map(*shape, scale=2.0, shift=0.5)
        self.module, self.grad = self.norm(shape[1]), self.normal(4, shape[1])
        self.pad(self.x)

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None) -> Results:
        module, x = _copied(self.module, dtype, True), _leaf(self.x, dtype)
        state = function(x, Norm.of(module), valid_rows)
        gradients = _gradients([state], {"x": x, **dict(module.named_parameters())}, [self.grad])
        return {"state": state.detach(), **gradients, **_statistics(module)}


def by_reference(x: Tensor, norm: Norm, residual: Tensor, valid_rows: Rows = None) -> Tensor:
    """batch_norm_pool in plain PyTorch."""
    y = reference_act.batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows)
    return reference_pool.norm_pool(y, None, valid_rows)


class BatchNormPool(Problem):
    """Results: pooled, gradients and running statistics; ``offset`` is the mean of x."""

    op, form = staticmethod(batch_norm_pool), staticmethod(by_reference)

    def __init__(
        self, shape: Size, *common: Any, offset: float = 0.5, training: bool = True, **padding: int | None
    ) -> None:
        super().__init__(*common, **padding)
        channels, self.training = shape[1], training
        x, residual = (self.map(*shape, scale=2.0, shift=shift) for shift in (offset, 0.0))
        self.weight, self.bias = self.normal(channels).abs() + 0.5, self.normal(channels) / 4
        self.running = [self.normal(channels), self.normal(channels).abs() + 0.5]
        norm = Norm(*(t.double() for t in (self.weight, self.bias, *self.running)), training=training)
        z = reference_act.batch_norm_act(x.double(), norm, relu=False, residual=residual, valid_rows=self.valid)
        near = z.abs() < max(_EDGE[self.dtype], 2e-3) * max(1.0, offset / 10)
        self.maps = [x, _channels_last(torch.where(near, residual + 0.25, residual))]
        self.grad = self.normal(*shape[:2]).to(self.dtype)
        self.pad(*self.maps, self.grad)

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None) -> Results:
        x, residual, weight, bias = (_leaf(t, dtype) for t in (*self.maps, self.weight, self.bias))
        running = [_leaf(t, dtype).detach() for t in self.running]
        pooled = function(x, Norm(weight, bias, *running, training=self.training), residual, valid_rows)
        leaves = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        statistics = dict(zip(("running_mean", "running_var"), running, strict=True))
        return {"pooled": pooled.detach(), **_gradients([pooled], leaves, [self.grad]), **statistics}


class NormPool(Problem):
    """Results: pooled and gradients. Numbers are coarse, so that no sign depends on rounding."""

    op, form = staticmethod(norm_pool), staticmethod(reference_pool.norm_pool)

    def __init__(self, shape: Size, *common: Any, with_state: bool = True, **padding: int | None) -> None:
        super().__init__(*common, **padding)
        self.x = _channels_last(self.coarse(*shape).to(self.dtype))
        state = self.coarse(4, shape[1])
        self.state, self.grad = state if with_state else None, self.coarse(*shape[:2]).to(self.dtype)
        self.pad(self.x, self.grad)

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None) -> Results:
        x, state = _leaf(self.x, dtype), _leaf(self.state, dtype)
        pooled = function(x, state, valid_rows)
        return {"pooled": pooled.detach(), **_gradients([pooled], {"x": x, "state": state}, [self.grad])}


class ExpertLosses(Problem):
    """Results: the terms, and the gradients of their sum. A third of the rows is new; the mask
    holds ten classes at most. ``options`` are those of :func:`expert_losses`.
    """

    op, form = staticmethod(expert_losses), staticmethod(reference_losses.expert_losses)
    # Tensor cores that round towards zero put similarities off by up to 2.3e-5 at a temperature of
    # 0.07, and shares of a softmax by twice that.
    floor = 2.0**-14

    def __init__(
        self,
        rows: int,
        classes: int,
        *common: Any,
        valid: int | None = None,
        size: int = 128,
        features: int = 512,
        experts: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(*common, valid=valid)
        shapes = ((experts, rows, size), (experts, rows, classes), (experts, rows, features), (rows, features))
        self.inputs = [self.normal(*shape).to(self.dtype) for shape in shapes]
        self.labels = torch.randint(0, min(10, classes), (rows,), generator=self._generator).to(self.device)
        self.mask = torch.arange(classes, device=self.device) < 10
        self.new, self.options = (rows if valid is None else valid) // 3, options
        self.pad(*(x.transpose(0, -2) for x in self.inputs))
        if valid is not None:
            self.labels[valid:] = -7

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: Rows = None, **options: Any) -> Results:
        names = ("projections", "logits", "features", "student")
        leaves = {name: _leaf(x, dtype) for name, x in zip(names, self.inputs, strict=True)}
        options = (
            {"new_rows": self.new, "current_classes": self.mask, "valid_rows": valid_rows} | self.options | options
        )
        terms = function(**leaves, labels=self.labels, **options)
        return {"terms": terms.detach(), **_gradients([terms], leaves, [torch.ones_like(terms)])}

    def ours(self, **options: Any) -> Results:
        new = torch.tensor(self.new, dtype=torch.int32, device=self.device)
        return super().ours(**{"new_rows": new} | options)


class Adam(Problem):
    """Weights, moments and counts of steps after three steps over parameters of odd sizes, and the
    copies of the weights in half precision, for gradients that are; with ``averages`` also the
    moving averages and their copies. One gradient is missing in the second step; a fourth step,
    whose loss is NaN, must change nothing.
    """

    op, form = staticmethod(adam_step), torch.optim.Adam
    SIZES = (7, 1728, 1, 130, 4099)
    LR, BETAS, AVERAGE_RATE = 1e-2, (0.9, 0.999), 0.3
    RATES = MappingProxyType({"eps": 1e-8, "weight_decay": 1e-3})

    def __init__(self, dtype: torch.dtype, device: str, seed: int, averages: bool = False) -> None:
        super().__init__(dtype, device, seed)
        self.averages = averages
        self.weights = [self.normal(size) for size in self.SIZES]
        self.grads: list[list[Tensor | None]] = [[self.map(size, 1, 1, 1) for size in self.SIZES] for _ in range(3)]
        self.grads[1][3] = None

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: None = None) -> Results:
        found = self._by_torch(dtype or torch.float32) if function is self.form else self._flat(function)
        absent = {"copies", "averages' copies"} if self.dtype == torch.float32 else set()
        absent |= set() if self.averages else {"averages", "averages' copies"}
        return {name: x for name, x in found.items() if name not in absent}

    def _flat(self, function: Any) -> Results:
        ends = torch.tensor([-(-size // 64) * 64 for size in self.SIZES]).cumsum(0).tolist()
        offsets = [0, *ends[:-1]]
        flat, first, second = (torch.zeros(ends[-1], device=self.device) for _ in range(3))
        shadow = None if self.dtype == torch.float32 else torch.zeros_like(flat, dtype=self.dtype)
        for weight, start in zip(self.weights, offsets, strict=True):
            flat[start : start + len(weight)] = weight
        average = flat.clone() if self.averages else None
        average_shadow = None if average is None or shadow is None else torch.zeros_like(shadow)
        steps, lr = torch.zeros(len(offsets), device=self.device), torch.tensor(self.LR, device=self.device)
        latch = torch.zeros((), dtype=torch.bool, device=self.device)
        how = {"beta1": self.BETAS[0], "beta2": self.BETAS[1], **self.RATES, "shadow": shadow, "latch": latch}
        how |= {"average": average, "average_shadow": average_shadow, "average_rate": self.AVERAGE_RATE}
        for number, gradients in enumerate([*self.grads, self.grads[0]]):
            loss = torch.tensor(torch.nan if number == 3 else 1.0, device=self.device)
            function(flat, first, second, gradients, offsets, steps, lr, **how, loss=loss)

        def parts(buffer: Tensor | None) -> Tensor | None:
            pieces = zip(offsets, self.SIZES, strict=True)
            return None if buffer is None else torch.cat([buffer[start : start + n] for start, n in pieces])

        return {
            "weights": parts(flat),
            "first moments": parts(first),
            "second moments": parts(second),
            "averages": parts(average),
            "counts": steps,
            "latch": latch.float(),
            "copies": parts(shadow),
            "averages' copies": parts(average_shadow),
        }

    def _by_torch(self, dtype: torch.dtype) -> Results:
        weights = [nn.Parameter(weight.to(dtype, copy=True)) for weight in self.weights]
        averages = [weight.detach().clone() for weight in weights]
        optimiser = self.form(weights, self.LR, self.BETAS, **self.RATES)
        for gradients in self.grads:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = None if gradient is None else gradient.view(-1).to(dtype)
            optimiser.step()
            for average, weight in zip(averages, weights, strict=True):
                if weight.grad is not None:
                    average.lerp_(weight.detach(), self.AVERAGE_RATE)
        states = [optimiser.state[weight] for weight in weights]
        values, averaged = torch.cat([weight.detach() for weight in weights]), torch.cat(averages)
        rounded = dtype if dtype == torch.float64 else self.dtype
        return {
            "weights": values,
            "first moments": torch.cat([state["exp_avg"] for state in states]),
            "second moments": torch.cat([state["exp_avg_sq"] for state in states]),
            "averages": averaged,
            "counts": torch.stack([state["step"] for state in states]),
            "latch": torch.ones(()),
            "copies": values.to(rounded),
            "averages' copies": averaged.to(rounded),
        }


def make_step(views: int, size: tuple[int, int], recipe: Recipe, seed: int) -> dict[str, Any]:
    """Arguments of :func:`augment` on the CPU; every third view is not augmented."""
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator) for n in (5, 9)]
    rows = torch.randperm(14, generator=generator)[:11]
    rows[3] = -1
    orientation = torch.randint(0, 16, (views,), generator=generator) & (0b1111 if size[0] == size[1] else 0b1011)
    draws = torch.arange(views)
    draws[1::3] = -1
    shown = torch.randint(0, 11, (views,), generator=generator)
    layout = torch.stack([shown, orientation, draws], dim=1).to(torch.int32)
    codes, factors = reference_parameters.draw_augment_parameters(recipe, seed, 1, views, *size, _CPU)
    constants = {"mean": (0.5, 0.48, 0.44), "std": (0.2, 0.24, 0.26)}
    return {"sources": sources, "rows": rows, "layout": layout, "codes": codes, "factors": factors, **constants}


class Views(Problem):
    """A step's views: see :func:`make_step`."""

    op, form = staticmethod(augment), staticmethod(reference_augment.augment)
    floor = 2.0**-16  # :func:`augment` promises 1e-5 (1 + |value|), of values up to 3

    def __init__(self, views: int, size: tuple[int, int], recipe: Recipe, *common: Any) -> None:
        super().__init__(*common)
        self.step = make_step(views, size, recipe, seed=common[-1])

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: None = None) -> Results:
        if function is self.form:
            return {"views": function(**self.step, jitter_normalised=False, dtype=dtype or self.dtype, channels=3)}
        moved = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in self.step.items()}
        moved["sources"] = [source.to(self.device) for source in self.step["sources"]]
        return {"views": function(**moved, dtype=self.dtype)}


class Parameters(Problem):
    """The drawn parameters of views, which are decisions: all bits are those of the CPU."""

    op, form = staticmethod(draw_augment_parameters), staticmethod(reference_parameters.draw_augment_parameters)
    floor = 0.0

    def __init__(self, recipe: Recipe, count: int, device: str, seed: int) -> None:
        super().__init__(torch.float32, device, seed)
        self.arguments = (recipe, seed, 2**33 + seed, count, 32, 24)

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: None = None) -> Results:
        counter = torch.ones(1, dtype=torch.int64)
        where: tuple[Any, ...] = (_CPU,)
        if function is not self.form:
            counter = torch.zeros(1, dtype=torch.int64, device=self.device)
            where = (self.device, counter)
        codes, factors = function(*self.arguments, *where)
        return {"codes": codes, "factors": factors, "counter": counter}


def make_memory(slots: int, size: int, seed: int, seen: int) -> list[Tensor]:
    """Images, labels, tasks, indices and state of a replay memory, on the CPU."""
    images = torch.zeros(slots, size, size, 3, dtype=torch.uint8)
    return [images, *(torch.full((slots,), -1) for _ in range(3)), torch.tensor([seed, 0, seen])]


def make_batch(count: int, size: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and indices of a batch of the stream, on the CPU."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=generator)
    return x, torch.randint(0, 100, (count,), generator=generator), torch.arange(step * count, (step + 1) * count)


class Reservoir(Problem):
    """A small memory after batches that overfill it, and rows drawn between them."""

    op, form = reservoir, reference_reservoir
    floor = 0.0

    def __init__(self, slots: int, size: int, count: int, device: str, seed: int) -> None:
        super().__init__(torch.float32, device, seed)
        self.memory = make_memory(slots, size, seed, 0)
        self.batches = [make_batch(count, size, 4 * seed + step) for step in range(4)]

    def run(self, function: Any, dtype: torch.dtype | None = None, valid_rows: None = None) -> Results:
        device = "cpu" if function is self.form else self.device
        memory = [tensor.to(device, copy=True) for tensor in self.memory]
        slots, drawn = [], []
        for step, (x, y, index) in enumerate(self.batches):
            slots.append(function.insert(*memory, x.to(device), y.to(device), step % 3, index.to(device)))
            drawn += [function.draw(memory[2], memory[4], 9, chosen, 1) for chosen in reservoir.SlotFilter]
        names = ("images", "labels", "tasks", "indices", "state")
        return {"slots": torch.cat(slots), "drawn": torch.cat(drawn), **dict(zip(names, memory, strict=True))}


class Null(Problem):
    """A copy of what does not lie in order."""

    op, form = staticmethod(null), staticmethod(reference_null.null)
    floor = 0.0

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        super().__init__(dtype, device, seed)
        self.x, self.grad = self.normal(5, 67).to(dtype).t(), self.normal(67, 5).to(dtype)

    def run(self, function: Callable[[Tensor], Tensor], dtype: Any = None, valid_rows: None = None) -> Results:
        x = _leaf(self.x, None)
        y = function(x)
        return {"y": y.detach(), **_gradients([y], {"x": x}, [self.grad])}
