"""The self-check's table of small problems, and the bound of each result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.ops.augment_parameters import Recipe
from mose_fast.self_check.problems import (
    FORMS,
    Adam,
    AlignConv,
    BatchNormAct,
    BatchNormPool,
    ExpertLosses,
    NormPool,
    NormState,
    Null,
    Parameters,
    Problem,
    Reservoir,
    Shape,
    Views,
)

DTYPES = (torch.float32, torch.bfloat16)

#: SCR's, which has everything that a recipe can have.
_RECIPE = Recipe(
    mirror_p=0.5, gray_p=0.2, area_low=0.2, jitter_p=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1
)

#: Every kernel that a network of width 64 chooses by the numbers of channels, odd sides, parts of
#: tiles. Those from the fifth on are for a GPU alone.
_MAPS = (
    Shape(37, 64, 64, 8, 2, gate=True),
    Shape(37, 16, 24, 7, prologue=True),
    Shape(37, 128, 256, 4, prologue=True),
    Shape(37, 24, 40, 6, 2, True, width=10),
    Shape(37, 128, 128, 8, prologue=True),
    Shape(37, 256, 512, 4, prologue=True),
    Shape(37, 128, 128, 16, 2, gate=True),
    Shape(37, 256, 256, 8, 2, True),
    Shape(5, 96, 200, 10, 2, gate=True, width=20),
)


class Row(NamedTuple):
    """One line of the check: what was computed, with its dtype (``case``), and the ``op`` that is
    switched off if it fails.

    Attributes:
        error: The error of the result that is nearest to its bound, or furthest beyond; None where
            there is no number: ``said`` says why.
        bound: The largest error that passes.
        said: Name of that result, or what went wrong.
    """

    op: str
    case: str
    error: float | None
    bound: float | None
    said: str

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.bound

    def __str__(self) -> str:
        if self.error is None:
            return self.said
        return f"{self.said} is off by {self.error:.3g}; wanted at most {self.bound:.3g}"


class Case(NamedTuple):
    """A problem of an op, and what makes it."""

    op: str
    text: str
    make: Callable[[], Problem]


def table(device: str, *, small: bool, seed: int = 0) -> Iterator[Case]:
    """The problems of all ops; if ``small``, of sizes that an emulated GPU computes in a second."""
    images = 3 if small else 37
    valid = images - 1
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for number, shape in enumerate(_MAPS[: 4 if small else None]):
            shape = replace(shape, images=min(shape.images, images))
            how = {"valid": shape.images - 1 if number % 2 else None, "training": number != 3}
            text = f"{shape}{'' if how['training'] else ', frozen'}, {name}"
            yield Case("align_conv", text, partial(AlignConv, shape, dtype, device, seed + number, **how))
        for number, form in enumerate(FORMS):
            size = (images, (64, 24, 136, 8)[number], *((4, 4), (3, 5), (3, 3), (5, 7))[number])
            how = {"consumers": 1 + number % 3, "valid": valid if number % 2 else None}
            make = partial(BatchNormAct, form, size, dtype, device, seed + number, **how)
            yield Case("batch_norm_act", f"{form}, {_size(size)}, {name}", make)
        size = (images if small else 384, 8, 64, 64)  # several pixels for each thread
        make = partial(BatchNormAct, "plain", size, dtype, device, seed)
        yield Case("batch_norm_act", f"plain, {_size(size)}, {name}", make)
        size = (images, 40, 3, 5)
        make = partial(BatchNormAct, "two norms", size, dtype, device, seed, training=False)
        yield Case("batch_norm_act", f"two norms, frozen, {_size(size)}, {name}", make)
        make = partial(NormState, size, dtype, device, seed, valid)
        yield Case("batch_norm_act", f"norm_state, {_size(size)}, {name}", make)
        for size, first in (((images, 160, 4, 4), True), ((images, 72, 3, 5), False)):
            make = partial(BatchNormPool, size, dtype, device, seed, valid if first else None, training=first)
            yield Case("batch_norm_pool", f"{_size(size)}{'' if first else ', frozen'}, {name}", make)
            make = partial(NormPool, size, dtype, device, seed, valid, with_state=first)
            yield Case("norm_pool", f"{'with a state' if first else 'mean'}, {_size(size)}, {name}", make)
        shape = {"size": 40 if small else 128, "features": 72 if small else 512, "experts": 2 if small else 4}
        for distillation, reduction, rows, classes in (("rsd", "frobenius", 21, 12), ("sd", "mean_of_norms", 40, 100)):
            how = {"distillation": distillation, "rsd_reduction": reduction}
            make = partial(
                ExpertLosses, rows, classes, dtype, device, seed, **shape, **how, valid=rows - 3 if rows == 40 else None
            )
            text = f"{distillation}, {reduction}, {rows} rows of {classes} classes, {name}"
            yield Case("expert_losses", text, make)
        for text, averages in (("", False), (", averages", True)):
            yield Case("adam", f"gradients in {name}{text}", partial(Adam, dtype, device, seed, averages))
        yield Case("augment", f"11 views, {name}", partial(Views, 11, (8, 8), _RECIPE, dtype, device, seed))
        yield Case("null", name, partial(Null, dtype, device, seed))
    yield Case("augment_parameters", "300 views", partial(Parameters, _RECIPE, 300, device, seed))
    yield Case("reservoir", "20 slots, batches of 9", partial(Reservoir, 20, 8, 9, device, seed))


def rows_of(case: Case) -> Iterator[Row]:
    """Computes a problem; yields a row for its forward and, if it has one, its backward pass."""
    found = list(compared(case.make()))
    for direction in ("forward", "backward"):
        part = [row for row in found if row[0].startswith("gradient") == (direction == "backward")]
        if part:
            name, error, bound = max(part, key=lambda row: _excess(*row[1:]))
            yield Row(case.op, f"{direction}, {case.text}", error, bound, name)


def compared(problem: Problem) -> Iterator[tuple[str, float, float]]:
    """Name, error and bound of each result of the op.

    The bound is twice the error of PyTorch's form, which rounds and sums in another order, and the
    problem's ``floor``, where that form was lucky; and one more rounding to the type of the result
    or of each map in between, since PyTorch may keep more digits there than it must.
    """
    plain, exact, ours = problem.plain(), problem.exact(), problem.ours()
    for name, wanted in exact.items():
        value, other = (results[name].detach().to(wanted.device) for results in (ours, plain))
        if value.shape != wanted.shape:
            yield name, math.inf, 0.0
        elif not problem.floor:
            yield name, float((value != wanted).sum()), 0.0
        else:
            largest = wanted.double().abs().max().item()
            rounding = max(_unit(value.dtype), problem.rounded * _unit(problem.dtype))
            bound = 2 * _error(other, wanted) + (rounding + problem.floor) * largest + 1e-7
            yield name, _error(value, wanted), bound


def _unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def _error(value: Tensor, exact: Tensor) -> float:
    return (value.double() - exact.double()).abs().max().item()


def _excess(error: float, bound: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def _size(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


#: The ops of the table.
OPS = tuple(dict.fromkeys(case.op for case in table("cpu", small=True)))
