"""Inputs of the native ops, drawn from a seed, and every result of an op by name: what the
self-check and the tests of kernels on a card compare.

Each problem has the op, PyTorch's form of it (``plain``) and the same in float64 (``exact``).
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
from typing import Any

import torch
from torch import Tensor, nn

from mose_fast.ops.adam import adam_step
from mose_fast.ops.align_conv import align_conv
from mose_fast.ops.augment import augment
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.ops.batch_norm_pool import batch_norm_pool
from mose_fast.ops.expert_losses import expert_losses
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.ops.null import null
from mose_fast.ops.reservoir import SlotFilter, draw, insert
from mose_fast.reference import align_conv as reference_align_conv
from mose_fast.reference import augment as reference_augment
from mose_fast.reference import augment_parameters as reference_parameters
from mose_fast.reference import batch_norm as reference_norm
from mose_fast.reference import batch_norm_act as reference_act
from mose_fast.reference import expert_losses as reference_losses
from mose_fast.reference import norm_pool as reference_pool
from mose_fast.reference import null as reference_null
from mose_fast.reference import reservoir as reference_reservoir

__all__ = [
    "FORMS",
    "Adam",
    "AlignConv",
    "BatchNormAct",
    "BatchNormPool",
    "Draws",
    "ExpertLosses",
    "NormPool",
    "NormState",
    "Null",
    "Parameters",
    "Problem",
    "Reservoir",
    "Shape",
    "Views",
    "by_reference",
    "make_batch",
    "make_memory",
    "make_step",
]

Results = dict[str, Tensor]

#: Of a value before its ReLU: nothing may depend on which side of zero rounding puts it.
_EDGE = {torch.float32: 1e-3, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


class Draws:
    """Normal tensors from one generator, on ``device``."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def map(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return _channels_last((self.normal(*shape) * scale + shift).to(dtype))

    def coarse(self, *shape: int) -> Tensor:
        """Multiples of 1/64: products and differences of them are exact in float32."""
        return self.normal(*shape).mul(64).round().div(64)

    def labels(self, classes: int, rows: int) -> Tensor:
        return torch.randint(0, classes, (rows,), generator=self.generator).to(self.device)


class Problem(ABC):
    """Inputs of one op.

    Attributes:
        valid: Images or rows that are no padding; None: all.
        dtype: Of maps and other inputs.
        rounded: How many maps are rounded to it between inputs and results; 0 where all is computed
            in float32 and rounded once.
        floor: What another order of sums may cost, of the largest number of a result: 64 roundings
            of float32. 0: results are decisions or copies, whose bits must be equal.
    """

    valid: int | None = None
    dtype: torch.dtype
    rounded: int = 0
    floor: float = 2.0**-18

    @abstractmethod
    def ours(self) -> Results:
        """The op's results."""

    @abstractmethod
    def plain(self) -> Results:
        """Those of PyTorch's form, in the same types."""

    @abstractmethod
    def exact(self) -> Results:
        """Those in float64."""

    def rows_on_card(self, like: Tensor) -> Tensor | None:
        """``valid`` as a captured step gives it."""
        return None if self.valid is None else torch.tensor(self.valid, dtype=torch.int32, device=like.device)

    def pad(self, tensors: Sequence[Tensor | None]) -> None:
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


def _gradients(outputs: Sequence[Tensor], leaves: dict[str, Tensor | None], upstream: Sequence[Tensor]) -> Results:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    given = [g.to(y.dtype) for y, g in zip(outputs, upstream, strict=True)]
    grads = torch.autograd.grad(tuple(outputs), list(wanted.values()), given, allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(wanted.items(), grads, strict=True)
    }


def _statistics(modules: Sequence[nn.BatchNorm2d]) -> Results:
    return {
        f"{name} of norm {number}": value
        for number, module in enumerate(modules, start=1)
        for name, value in module.named_buffers()
    }


def _norm_module(draws: Draws, channels: int) -> nn.BatchNorm2d:
    module = nn.BatchNorm2d(channels, device=draws.device)
    with torch.no_grad():
        module.weight.copy_(draws.normal(channels).abs() + 0.5)
        module.bias.copy_(draws.normal(channels) / 4)
    return module


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
        parts += [name for name in ("prologue", "gate") if getattr(self, name)]
        return ", ".join(parts)


class AlignConv(Problem):
    """Results: y, state, gradients, running statistics.

    Args:
        shape: The map.
        dtype: Of maps and weights.
        device: Where the tensors are.
        seed: Of the draws; None: from the shape.
        training: False: the norm uses its running statistics.
        valid: Images that are no padding; None: all.
    """

    # What enters the convolutions, and what is between them.
    rounded = 2

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        seed: int | None = None,
        *,
        training: bool = True,
        valid: int | None = None,
    ) -> None:
        draws = Draws(shape.images + shape.channels + shape.side if seed is None else seed, device)
        self.shape, self.training, self.valid, self.dtype = shape, training, valid, dtype
        width = shape.width or shape.side
        new_map = partial(draws.map, shape.images, dtype=dtype)
        x = new_map(shape.channels, shape.side, width)
        rows = [draws.normal(shape.channels) for _ in range(3)]
        self.state = torch.stack([rows[0] / 10, torch.ones_like(rows[0]), *rows[1:]]) if shape.prologue else None
        if shape.prologue:
            z = reference_norm.normalised(x.double(), self.state.double(), relu=False)
            x = _channels_last(torch.where(z.abs() < 5e-3, x + 0.25, x))
        self.x = x
        self.gate = new_map(shape.channels, shape.side // 2, width // 2).relu() if shape.gate else None
        self.depthwise = (draws.normal(shape.channels, 1, 3, 3) * 0.3).to(dtype)
        self.pointwise = (draws.normal(shape.out_channels, shape.channels, 1, 1) * shape.channels**-0.5).to(dtype)
        self.module = _norm_module(draws, shape.out_channels)
        out = (shape.side - 1) // shape.stride + 1, (width - 1) // shape.stride + 1
        self.grads = new_map(shape.out_channels, *out, scale=0.1), draws.normal(4, shape.out_channels)
        self.pad([self.x, self.gate, self.grads[0]])

    def run(
        self,
        function: Callable[..., Any],
        dtype: torch.dtype | None = None,
        training: bool | None = None,
        valid_rows: int | Tensor | None = None,
        grads: Sequence[Tensor] | None = None,
    ) -> Results:
        """The results of ``function``, with everything in ``dtype``; None: as it is; so
        ``training``.
        """
        module = copy.deepcopy(self.module).train(self.training if training is None else training)
        module = module if dtype is None else module.to(dtype)
        inputs = (self.x, self.depthwise, self.pointwise, self.state, self.gate)
        x, depthwise, pointwise, state, gate = (_leaf(value, dtype) for value in inputs)
        options = {"stride": self.shape.stride, "prologue": state, "gate": gate, "valid_rows": valid_rows}
        result = function(x, depthwise, pointwise, Norm.of(module), **options)
        leaves = {"x": x, "depthwise": depthwise, "pointwise": pointwise, "prologue": state, "gate": gate}
        leaves |= dict(module.named_parameters())
        gradients = _gradients(result, leaves, self.grads if grads is None else grads)
        return {"y": result.y.detach(), "state": result.state.detach(), **gradients, **_statistics([module])}

    def ours(self, **options: Any) -> Results:
        return self.run(align_conv, **{"valid_rows": self.rows_on_card(self.x)} | options)

    def plain(self, **options: Any) -> Results:
        return self.run(reference_align_conv.align_conv, **{"valid_rows": self.valid} | options)

    def exact(self, **options: Any) -> Results:
        return self.run(reference_align_conv.align_conv, torch.float64, **{"valid_rows": self.valid} | options)


#: What :class:`BatchNormAct` computes beside the norm and ReLU of its map.
FORMS = ("plain", "residual", "two norms", "prologue")


class BatchNormAct(Problem):
    """Results: y, gradients, running statistics.

    Args:
        form: One of :data:`FORMS`.
        shape: [N, C, H, W].
        dtype: Of the maps.
        device: Where the tensors are.
        seed: Of the draws; None: from the shape.
        consumers: Gradients that are added up.
        offset: Of the maps' mean.
        deviation: Their standard deviation.
        training: False: the norms use their running statistics.
        valid: Images that are no padding; None: all.
    """

    # The sum of the gradients.
    rounded = 1

    def __init__(
        self,
        form: str,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: str,
        seed: int | None = None,
        *,
        consumers: int = 1,
        offset: float = 0.5,
        deviation: float = 2.0,
        training: bool = True,
        valid: int | None = None,
    ) -> None:
        draws = Draws(shape[0] + shape[1] if seed is None else seed, device)
        channels = shape[1]
        self.form, self.consumers, self.training, self.valid, self.dtype = form, consumers, training, valid, dtype
        self.x, self.residual = (draws.map(*shape, dtype=dtype, scale=deviation, shift=offset) for _ in range(2))
        self.grads = [draws.map(*shape, dtype=dtype) for _ in range(consumers)]
        self.norms = [_norm_module(draws, channels) for _ in range(2)]
        ones = torch.ones(channels, device=device)
        self.state = torch.stack(
            [ones * offset - 0.3, ones / deviation, draws.normal(channels).abs() + 0.5, ones * 0.1]
        )
        self._keep_off_the_edges(_EDGE[dtype])
        self.pad([self.x, self.residual, *self.grads])

    def _keep_off_the_edges(self, edge: float) -> None:
        if self.form == "prologue":
            mean, _, scale, shift = (row.view(1, -1, 1, 1) for row in self.state)
            near = ((self.x.float() - mean) * scale + shift).abs() < 1e-3
            self.x = _channels_last(torch.where(near, (mean + 1).to(self.x.dtype), self.x))
        z = self.run(partial(reference_act.batch_norm_act, relu=False), torch.float64, valid_rows=self.valid)["y"]
        self.grads = [_channels_last(torch.where(z.abs() < edge, 0, g)) for g in self.grads]

    def run(
        self,
        function: Callable[..., Any],
        dtype: torch.dtype | None = None,
        training: bool | None = None,
        valid_rows: int | Tensor | None = None,
    ) -> Results:
        """The results of ``function``, with everything in ``dtype``; None: as it is."""
        training = self.training if training is None else training
        norms = [copy.deepcopy(norm).train(training) for norm in self.norms]
        norms = norms if dtype is None else [norm.to(dtype) for norm in norms]
        x, residual, state = (_leaf(value, dtype) for value in (self.x, self.residual, self.state))
        options, leaves = {}, {"x": x, **dict(norms[0].named_parameters())}
        if self.form in ("residual", "two norms"):
            options["residual"] = leaves["residual"] = residual
        if self.form == "two norms":
            options["residual_norm"] = Norm.of(norms[1])
            leaves |= {f"second {name}": parameter for name, parameter in norms[1].named_parameters()}
        if self.form == "prologue":
            options["prologue"] = leaves["prologue"] = state
        y = function(x, Norm.of(norms[0]), consumers=self.consumers, valid_rows=valid_rows, **options)
        y = (y,) if self.consumers == 1 else y
        gradients = _gradients(y, leaves, self.grads)
        return {"y": y[0].detach(), **gradients, **_statistics(norms[: 2 if self.form == "two norms" else 1])}

    def ours(self, **options: Any) -> Results:
        return self.run(batch_norm_act, **{"valid_rows": self.rows_on_card(self.x)} | options)

    def plain(self, **options: Any) -> Results:
        return self.run(reference_act.batch_norm_act, **{"valid_rows": self.valid} | options)

    def exact(self, **options: Any) -> Results:
        return self.run(reference_act.batch_norm_act, torch.float64, **{"valid_rows": self.valid} | options)


class NormState(Problem):
    """The state of a norm over a map. Results: state, gradients, running statistics."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, seed: int, valid: int | None = None
    ) -> None:
        draws = Draws(seed, device)
        self.x, self.valid, self.dtype = draws.map(*shape, dtype=dtype, scale=2.0, shift=0.5), valid, dtype
        self.module, self.grad = _norm_module(draws, shape[1]), draws.normal(4, shape[1])
        self.pad([self.x])

    def _run(
        self, function: Callable[..., Tensor], dtype: torch.dtype | None, valid_rows: int | Tensor | None
    ) -> Results:
        module = copy.deepcopy(self.module)
        module, x = module if dtype is None else module.to(dtype), _leaf(self.x, dtype)
        state = function(x, Norm.of(module), valid_rows)
        gradients = _gradients([state], {"x": x, **dict(module.named_parameters())}, [self.grad])
        return {"state": state.detach(), **gradients, **_statistics([module])}

    def ours(self) -> Results:
        return self._run(norm_state, None, self.rows_on_card(self.x))

    def plain(self) -> Results:
        return self._run(reference_norm.norm_state, None, self.valid)

    def exact(self) -> Results:
        return self._run(reference_norm.norm_state, torch.float64, self.valid)


def by_reference(x: Tensor, norm: Norm, residual: Tensor, valid_rows: int | Tensor | None = None) -> Tensor:
    """batch_norm_pool in plain PyTorch."""
    y = reference_act.batch_norm_act(x, norm, residual=residual, valid_rows=valid_rows)
    return reference_pool.norm_pool(y, None, valid_rows)


class BatchNormPool(Problem):
    """Results: pooled, gradients and running statistics. The arguments are those of
    :class:`BatchNormAct`; without ``training`` the norm uses its running statistics.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: str,
        seed: int | None = None,
        *,
        offset: float = 0.5,
        training: bool = True,
        valid: int | None = None,
    ) -> None:
        draws = Draws(sum(shape) if seed is None else seed, device)
        channels = shape[1]
        x, residual = (draws.map(*shape, dtype=dtype, scale=2.0, shift=shift) for shift in (offset, 0.0))
        self.weight, self.bias = draws.normal(channels).abs() + 0.5, draws.normal(channels) / 4
        self.running = [draws.normal(channels), draws.normal(channels).abs() + 0.5]
        self.training, self.valid, self.dtype = training, valid, dtype
        double = [t.double() for t in (self.weight, self.bias, *self.running)]
        z = reference_act.batch_norm_act(
            x.double(), Norm(*double, training=training), relu=False, residual=residual, valid_rows=valid
        )
        near = z.abs() < max(_EDGE[dtype], 2e-3) * max(1.0, offset / 10)
        self.maps = [x, _channels_last(torch.where(near, residual + 0.25, residual))]
        self.grad = draws.normal(*shape[:2]).to(dtype)
        self.pad([*self.maps, self.grad])

    def run(
        self, function: Callable[..., Tensor], dtype: torch.dtype | None = None, valid_rows: int | Tensor | None = None
    ) -> Results:
        """The results of ``function``, with everything in ``dtype``; None: as it is."""
        x, residual, weight, bias = (_leaf(t, dtype) for t in (*self.maps, self.weight, self.bias))
        running = [_leaf(t, dtype).detach() for t in self.running]
        pooled = function(x, Norm(weight, bias, *running, training=self.training), residual, valid_rows)
        leaves = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        return {
            "pooled": pooled.detach(),
            **_gradients([pooled], leaves, [self.grad]),
            "running_mean": running[0],
            "running_var": running[1],
        }

    def ours(self) -> Results:
        return self.run(batch_norm_pool, None, self.rows_on_card(self.grad))

    def plain(self) -> Results:
        return self.run(by_reference, None, self.valid)

    def exact(self) -> Results:
        return self.run(by_reference, torch.float64, self.valid)


class NormPool(Problem):
    """Results: pooled and gradients. Numbers are coarse, so that no sign depends on rounding."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: str,
        seed: int | None = None,
        *,
        with_state: bool = True,
        valid: int | None = None,
    ) -> None:
        draws = Draws(sum(shape) if seed is None else seed, device)
        self.valid, self.dtype, self.x = valid, dtype, _channels_last(draws.coarse(*shape).to(dtype))
        state = draws.coarse(4, shape[1])
        self.state, self.grad = state if with_state else None, draws.coarse(*shape[:2]).to(dtype)
        self.pad([self.x, self.grad])

    def run(
        self, function: Callable[..., Tensor], dtype: torch.dtype | None = None, valid_rows: int | Tensor | None = None
    ) -> Results:
        """The results of ``function``, with everything in ``dtype``; None: as it is."""
        x, state = _leaf(self.x, dtype), _leaf(self.state, dtype)
        pooled = function(x, state, valid_rows)
        return {"pooled": pooled.detach(), **_gradients([pooled], {"x": x, "state": state}, [self.grad])}

    def ours(self) -> Results:
        return self.run(norm_pool, None, self.rows_on_card(self.x))

    def plain(self) -> Results:
        return self.run(reference_pool.norm_pool, None, self.valid)

    def exact(self) -> Results:
        return self.run(reference_pool.norm_pool, torch.float64, self.valid)


class ExpertLosses(Problem):
    """Results: the terms, and the gradients of their sum. A third of the rows is new; the mask
    holds ten classes at most.
    """

    # Tensor cores that round towards zero put similarities off by up to 2.3e-5 at a temperature of
    # 0.07, and shares of a softmax by twice that.
    floor = 2.0**-14

    def __init__(
        self,
        rows: int = 384,
        classes: int = 100,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int | None = None,
        *,
        size: int = 128,
        features: int = 512,
        experts: int = 4,
        valid: int | None = None,
        **options: Any,
    ) -> None:
        draws = Draws(rows if seed is None else seed, device)
        shapes = ((experts, rows, size), (experts, rows, classes), (experts, rows, features), (rows, features))
        self.inputs = [draws.normal(*shape).to(dtype) for shape in shapes]
        self.labels = draws.labels(min(10, classes), rows)
        self.mask = torch.arange(classes, device=device) < 10
        self.valid, self.dtype, self.options = valid, dtype, options
        self.new = (rows if valid is None else valid) // 3
        self.pad([x.transpose(0, -2) for x in self.inputs])
        if valid is not None:
            self.labels[valid:] = -7

    def run(self, function: Callable[..., Tensor], dtype: torch.dtype | None = None, **options: Any) -> Results:
        """The results of ``function``, with everything in ``dtype``; None: as it is."""
        leaves = {
            name: _leaf(x, dtype)
            for name, x in zip(("projections", "logits", "features", "student"), self.inputs, strict=True)
        }
        options = {"new_rows": self.new, "current_classes": self.mask, **self.options, **options}
        terms = function(*leaves.values(), self.labels, **options)
        return {"terms": terms.detach(), **_gradients([terms.sum()], leaves, [torch.ones((), device=terms.device)])}

    def ours(self) -> Results:
        new = torch.tensor(self.new, dtype=torch.int32, device=self.labels.device)
        return self.run(expert_losses, new_rows=new, valid_rows=self.rows_on_card(self.labels))

    def plain(self) -> Results:
        return self.run(reference_losses.expert_losses, valid_rows=self.valid)

    def exact(self) -> Results:
        return self.run(reference_losses.expert_losses, torch.float64, valid_rows=self.valid)


class Adam(Problem):
    """Weights, moments and counts of steps after three steps over parameters of odd sizes, and the
    copies of the weights in half precision. One gradient is missing in the second step; a fourth
    step, whose loss is NaN, must change nothing. PyTorch's form is ``torch.optim.Adam``.

    Args:
        dtype: Of gradients and copies; float32: no copies.
        device: Where the tensors are.
        seed: Of the draws.
    """

    SIZES = (7, 1728, 1, 130, 4099)
    RATES = MappingProxyType({"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-3})
    LR = 1e-2

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        draws = Draws(seed, device)
        self.dtype = dtype
        self.weights = [draws.normal(size) for size in self.SIZES]
        self.grads: list[list[Tensor | None]] = [
            [draws.normal(size).to(dtype) for size in self.SIZES] for _ in range(3)
        ]
        self.grads[1][3] = None

    def ours(self) -> Results:
        device = self.weights[0].device
        offsets, size = [], 0
        for weight in self.weights:
            offsets.append(size)
            size += -(-len(weight) // 64) * 64
        flat, first, second = (torch.zeros(size, device=device) for _ in range(3))
        shadow = None if self.dtype == torch.float32 else torch.zeros(size, dtype=self.dtype, device=device)
        for weight, start in zip(self.weights, offsets, strict=True):
            flat[start : start + len(weight)] = weight
        steps, latch = torch.zeros(len(offsets), device=device), torch.zeros((), dtype=torch.bool, device=device)
        lr = torch.tensor(self.LR, device=device)
        for number, gradients in enumerate([*self.grads, self.grads[0]]):
            loss = torch.tensor(torch.nan if number == 3 else 1.0, device=device)
            adam_step(
                flat, first, second, gradients, offsets, steps, lr, **self.RATES, shadow=shadow, loss=loss, latch=latch
            )

        def parts(buffer: Tensor) -> Tensor:
            return torch.cat([buffer[start : start + n] for start, n in zip(offsets, self.SIZES, strict=True)])

        found = {"weights": parts(flat), "first moments": parts(first), "second moments": parts(second)}
        found |= {"counts": steps, "latch": latch.float()}
        return found if shadow is None else {**found, "copies": parts(shadow)}

    def _by_torch(self, dtype: torch.dtype) -> Results:
        weights = [nn.Parameter(weight.to(dtype, copy=True)) for weight in self.weights]
        betas = (self.RATES["beta1"], self.RATES["beta2"])
        optimiser = torch.optim.Adam(
            weights, self.LR, betas, self.RATES["eps"], weight_decay=self.RATES["weight_decay"]
        )
        for gradients in self.grads:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = None if gradient is None else gradient.to(dtype)
            optimiser.step()
        states = [optimiser.state[weight] for weight in weights]
        values = torch.cat([weight.detach() for weight in weights])
        found = {
            "weights": values,
            "first moments": torch.cat([state["exp_avg"] for state in states]),
            "second moments": torch.cat([state["exp_avg_sq"] for state in states]),
            "counts": torch.stack([state["step"] for state in states]).to(values.device),
            "latch": torch.ones((), device=values.device),
        }
        copied = values if dtype == torch.float64 else values.to(self.dtype)
        return found if self.dtype == torch.float32 else {**found, "copies": copied}

    def plain(self) -> Results:
        return self._by_torch(torch.float32)

    def exact(self) -> Results:
        return self._by_torch(torch.float64)


def make_step(views: int, size: tuple[int, int], recipe: Recipe, seed: int | None = None) -> dict[str, Any]:
    """Arguments of :func:`augment` on the CPU: views of 14 images in two sources, in all
    orientations; every third is not augmented, and some show padding.
    """
    generator = torch.Generator().manual_seed(views if seed is None else seed)
    sources = [torch.randint(0, 256, (n, *size, 3), dtype=torch.uint8, generator=generator) for n in (5, 9)]
    rows = torch.randperm(14, generator=generator)[:11]
    rows[3] = -1
    orientation = torch.randint(0, 16, (views,), generator=generator) & (0b1111 if size[0] == size[1] else 0b1011)
    draws = torch.arange(views)
    draws[1::3] = -1
    shown = torch.randint(0, 11, (views,), generator=generator)
    layout = torch.stack([shown, orientation, draws], dim=1).to(torch.int32)
    codes, factors = reference_parameters.draw_augment_parameters(
        recipe, views if seed is None else seed, 1, views, *size, torch.device("cpu")
    )
    constants = {"mean": (0.5, 0.48, 0.44), "std": (0.2, 0.24, 0.26)}
    return {"sources": sources, "rows": rows, "layout": layout, "codes": codes, "factors": factors, **constants}


class Views(Problem):
    """A step's views. The arguments are those of :func:`make_step`."""

    # :func:`augment` promises 1e-5 (1 + |value|), of values up to 3.
    floor = 2.0**-16

    def __init__(
        self, views: int, size: tuple[int, int], recipe: Recipe, dtype: torch.dtype, device: str, seed: int
    ) -> None:
        self.step, self.dtype, self.device = make_step(views, size, recipe, seed), dtype, device

    def ours(self) -> Results:
        moved = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in self.step.items()}
        moved["sources"] = [source.to(self.device) for source in self.step["sources"]]
        return {"views": augment(**moved, dtype=self.dtype)}

    def _by_reference(self, dtype: torch.dtype) -> Results:
        return {"views": reference_augment.augment(**self.step, jitter_normalised=False, dtype=dtype, channels=3)}

    def plain(self) -> Results:
        return self._by_reference(self.dtype)

    def exact(self) -> Results:
        return self._by_reference(torch.float64)


class Parameters(Problem):
    """The drawn parameters of views, which are decisions: all bits are those of the CPU."""

    floor = 0.0

    def __init__(self, recipe: Recipe, count: int, device: str, seed: int) -> None:
        self.arguments, self.device = (recipe, seed, 2**33 + seed, count, 32, 24), device

    def ours(self) -> Results:
        counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        codes, factors = draw_augment_parameters(*self.arguments, self.device, counter)
        return {"codes": codes, "factors": factors, "counter": counter}

    def plain(self) -> Results:
        codes, factors = reference_parameters.draw_augment_parameters(*self.arguments, torch.device("cpu"))
        return {"codes": codes, "factors": factors, "counter": torch.ones(1, dtype=torch.int64)}

    def exact(self) -> Results:
        return self.plain()


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
    """What a small memory holds after batches that overfill it, and rows drawn between them:
    decisions, all bits of which are those of the CPU.
    """

    floor = 0.0

    def __init__(self, slots: int, size: int, count: int, device: str, seed: int) -> None:
        self.memory, self.device = make_memory(slots, size, seed, 0), device
        self.batches = [make_batch(count, size, 4 * seed + step) for step in range(4)]

    def _run(self, insert: Callable[..., Tensor], draw: Callable[..., Tensor], device: str) -> Results:
        memory = [tensor.to(device, copy=True) for tensor in self.memory]
        slots, drawn = [], []
        for step, (x, y, index) in enumerate(self.batches):
            slots.append(insert(*memory, x.to(device), y.to(device), step % 3, index.to(device)))
            drawn += [draw(memory[2], memory[4], 9, chosen, 1) for chosen in SlotFilter]
        names = ("images", "labels", "tasks", "indices", "state")
        return {"slots": torch.cat(slots), "drawn": torch.cat(drawn), **dict(zip(names, memory, strict=True))}

    def ours(self) -> Results:
        return self._run(insert, draw, self.device)

    def plain(self) -> Results:
        return self._run(reference_reservoir.insert, reference_reservoir.draw, "cpu")

    def exact(self) -> Results:
        return self.plain()


class Null(Problem):
    """A copy of what does not lie in order."""

    floor = 0.0

    def __init__(self, dtype: torch.dtype, device: str, seed: int) -> None:
        draws = Draws(seed, device)
        self.x, self.grad = draws.normal(5, 67).to(dtype).t(), draws.normal(67, 5).to(dtype)

    def _run(self, function: Callable[[Tensor], Tensor]) -> Results:
        x = _leaf(self.x, None)
        y = function(x)
        return {"y": y.detach(), **_gradients([y], {"x": x}, [self.grad])}

    def ours(self) -> Results:
        return self._run(null)

    def plain(self) -> Results:
        return self._run(reference_null.null)

    def exact(self) -> Results:
        return self.plain()
