"""Kinds of streams: which training images a stream has and in which order they arrive
(docs/streams.md has the definitions and their sources).

The part of an image and the choice of images depend on ``kind_seed``; the order of arrival depends
on the seed of the run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from mose_fast.settings.knob import settings_of
from mose_fast.settings.run import StreamConfig
from mose_fast.streams.draws import StreamError, draw_order, draw_words

if TYPE_CHECKING:
    from collections.abc import Callable

# Purpose words of the draws, above that of the class order and below those of held-out images; to
# them are added the place of a class among the sorted labels (_KEPT), a task (_DISJOINT), a class
# (_MOVED), and 1 for the second draw (_CUTS).
_ARRIVAL, _RANKS, _KEPT, _DISJOINT, _MOVED, _CUTS = (2**63 + 2**61 + n * 2**32 for n in range(6))

# Settings that a kind depends on beside its seed.
_PARAMETERS = {
    "tasks": (),
    "imbalanced": ("imbalance",),
    "blurry": ("disjoint", "blur"),
    "si_blurry": ("disjoint", "blur"),
    "task_free": ("drift",),
}


@dataclass(frozen=True)
class Kind:
    """The settings of a stream that say what kind it is. ConfigError: one is out of range."""

    kind: str
    kind_seed: int
    disjoint: float
    blur: float
    imbalance: float
    drift: float

    def __post_init__(self) -> None:
        settings = settings_of(StreamConfig)
        for field in dataclasses.fields(self):
            value = settings[f"stream.{field.name}"].check(getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @classmethod
    def of(cls, config: StreamConfig) -> Kind:
        """The kind that a configuration describes."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})

    def __str__(self) -> str:
        """The kind with the settings that it depends on, without its seed."""
        own = ", ".join(f"{name} {getattr(self, name):.12g}" for name in _PARAMETERS[self.kind])
        return f"{self.kind} ({own})" if own else self.kind


def long_tail(y: np.ndarray, labels: np.ndarray, known: np.ndarray, kind: Kind) -> np.ndarray:
    """The training images of a stream whose classes have exponentially fewer and fewer images (Cui
    et al., CVPR 2019), in an order that is drawn (Liu et al., ECCV 2022: shuffled): the rows that
    are kept, ascending. Raises StreamError if a class would have no image.

    ``y`` int64 [N] are head indices, ``labels`` the label of each head index, ``known`` all labels
    of the data set, sorted: those of later tasks count, so that the first tasks of a stream are the
    same however many there are.
    """
    ranks = np.argsort(draw_order(len(known), kind.kind_seed, _RANKS))
    kept = []
    for head, place in enumerate(np.searchsorted(known, labels)):
        rows = np.flatnonzero(y == head)
        share = kind.imbalance ** (-int(ranks[place]) / (len(known) - 1))
        # The small number keeps what a whole number would be from being rounded to the one below.
        count = int(len(rows) * share + 1e-6)
        if not count:
            raise StreamError(
                f"imbalance is {kind.imbalance:g}, which leaves none of the {len(rows)} training images of class"
                f" {labels[head]}; wanted at most {len(rows)}"
            )
        kept.append(rows[draw_order(len(rows), kind.kind_seed, _KEPT + int(place))[:count]])
    return np.sort(np.concatenate(kept))


def arrival_order(y: np.ndarray, tasks: int, kind: Kind) -> Callable[[int], np.ndarray]:
    """How the images of a stream without task boundaries arrive: a function from the seed of a run
    to the order, int64 [N], which holds every row once. ``y`` int64 [N] are head indices of which
    every one occurs; the classes are split into ``tasks`` parts, equally and in class order. Raises
    StreamError if they cannot be split as the settings say.
    """
    classes = int(y.max()) + 1
    if kind.kind == "task_free":
        return partial(_by_time, (y + 0.5) / classes, kind.drift)
    if tasks < 2:
        raise StreamError(f"kind is {kind.kind!r}, but the stream has one task; wanted at least two to blur")
    split = _blurry if kind.kind == "blurry" else _si_blurry
    return partial(_by_part, split(y, classes, tasks, kind))


def _by_part(part: np.ndarray, seed: int) -> np.ndarray:
    return np.lexsort((draw_words(len(part), seed, _ARRIVAL), part))


def _by_time(centre: np.ndarray, drift: float, seed: int) -> np.ndarray:
    """By times that are normally distributed around the centre of each image's class."""
    uniform = ((draw_words(len(centre), seed, _ARRIVAL) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    normal = np.array(list(map(NormalDist().inv_cdf, uniform.tolist())))
    return np.argsort(centre + drift * normal, kind="stable")


def _blurry(y: np.ndarray, classes: int, tasks: int, kind: Kind) -> np.ndarray:
    """The part of each image in i-Blurry (Koh et al., ICLR 2022)."""
    each = classes // tasks
    disjoint = _whole(kind.disjoint, each, "classes of a task")
    part = y // each
    for task in range(tasks):
        others = np.delete(np.arange(tasks), task)
        for head in task * each + draw_order(each, kind.kind_seed, _DISJOINT + task)[disjoint:]:
            rows = np.flatnonzero(y == head)
            moved = rows[draw_order(len(rows), kind.kind_seed, _MOVED + int(head))[: int(kind.blur * len(rows) + 0.5)]]
            # What is left over when they are dealt evenly begins at another part for each class.
            part[moved] = others[(np.arange(len(moved)) + head) % len(others)]
    return part


def _si_blurry(y: np.ndarray, classes: int, tasks: int, kind: Kind) -> np.ndarray:
    """The part of each image in Si-Blurry (Moon et al., ICCV 2023)."""
    disjoint = _whole(kind.disjoint, classes, "classes")
    drawn = draw_order(classes, kind.kind_seed, _DISJOINT)
    alone, blurry = np.sort(drawn[:disjoint]), np.sort(drawn[disjoint:])
    home = np.empty(classes, np.int64)
    home[alone] = np.repeat(np.arange(tasks), _cut(disjoint, tasks, kind.kind_seed, _CUTS))
    home[blurry] = np.arange(len(blurry)) * tasks // len(blurry)
    part = home[y]
    rows = np.flatnonzero(np.isin(y, blurry))
    moved = rows[draw_order(len(rows), kind.kind_seed, _MOVED)[: int(kind.blur * len(rows) + 0.5)]]
    part[moved] = np.repeat(np.arange(tasks), _cut(len(moved), tasks, kind.kind_seed, _CUTS + 1))
    return part


def _cut(count: int, parts: int, seed: int, purpose: int) -> np.ndarray:
    """Sizes of the parts, int64 [parts], if ``count`` things in a row are cut at random places."""
    cuts = np.sort(draw_words(parts - 1, seed, purpose) % np.uint64(count + 1)).astype(np.int64)
    return np.diff(cuts, prepend=0, append=count)


def _whole(share: float, count: int, what: str) -> int:
    """A share of some classes as a number. Raises StreamError if it is not whole."""
    number = share * count
    if abs(number - round(number)) > 1e-6:
        raise StreamError(
            f"disjoint is {share:g}, which is {number:g} of the {count} {what}; wanted a share of whole classes"
        )
    return round(number)
