"""A table of the paper: for each cell its runs, what is read from them, and the paper's number."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mose_fast.experiments.paper.measures import Metric
from mose_fast.present.published import Published

if TYPE_CHECKING:
    from mose_fast.present.statistics import Summary  # scipy takes a second, which a list of the tables need not pay

__all__ = ["RULE", "Entry", "Figure", "Panel", "PaperTable", "Part", "Verdict", "judge", "ranks", "target"]

#: The one rule of pass and miss, for readers; :func:`target` and :func:`judge` follow it.
RULE = (
    "An accuracy passes if its mean over the seeds is at most 1 point below the paper's; forgetting if it is at most 1"
    " point above; a count of parameters or multiply-accumulates if it is at most 1 % above. Minutes, and cells for"
    " which the paper gives no number or one that cannot be right, are not judged."
    ' "not sure": the 95 % interval of the mean contains the target, or there is no interval, as with one seed.'
)

_POINT = 1.0
_SHARE = 0.01


class Verdict(NamedTuple):
    """Whether a number passes, and whether its 95 % interval lies on that side of the target."""

    passed: bool
    sure: bool

    def __str__(self) -> str:
        return ("pass" if self.passed else "miss") + ("" if self.sure else ", not sure")


def target(metric: Metric, paper: Published | None) -> float | None:
    """The worst value that passes; None where there is no pass or fail."""
    if paper is None:
        return None
    return {
        "accuracy": paper.mean - _POINT,
        "forgetting": paper.mean + _POINT,
        "size": paper.mean * (1 + _SHARE),
        "free": None,
    }[metric.kind]


def judge(metric: Metric, paper: Published | None, ours: Summary | None) -> Verdict | None:
    """Our mean against the paper's; None where nothing is compared."""
    wanted = target(metric, paper)
    if wanted is None or ours is None:
        return None
    # 54.8 - 1 and the mean of some floats must not differ in their last bit alone.
    slack = 1e-9
    passed = ours.mean >= wanted - slack if metric.kind == "accuracy" else ours.mean <= wanted + slack
    if metric.kind == "size":
        return Verdict(passed, True)  # the same for every seed
    low, high = ours.t_interval
    return Verdict(passed, not math.isnan(low) and not low + slack < wanted < high - slack)


def ranks(values: Mapping[str, float], kind: str, digits: int) -> dict[str, int]:
    """1 for the rows with the best value as printed, 2 for those with the second best."""
    printed = {row: round(value, digits) for row, value in values.items()}
    best = sorted(set(printed.values()), reverse=kind == "accuracy")[: 0 if kind == "free" else 2]
    return {row: best.index(value) + 1 for row, value in printed.items() if value in best}


@dataclass(frozen=True)
class Entry:
    """A cell of a table.

    Attributes:
        runs: Settings of the runs behind it that differ from the defaults, by dotted name; there
            is one run for each seed.
        over: Settings of the runs by whose values those of ``runs`` are divided, seed by seed;
            None: the values themselves.
        doubt: Why the paper's number cannot be right; then there is no pass or fail.
    """

    row: str
    column: str
    runs: Mapping[str, Any]
    metric: Metric
    paper: Published | None = None
    over: Mapping[str, Any] | None = None
    doubt: str = ""

    @property
    def standard(self) -> Published | None:
        """The paper's number to judge by; None where it gives none that can be right."""
        return None if self.doubt else self.paper


@dataclass(frozen=True)
class Part:
    """A table, or one of its panels.

    Attributes:
        source: The table or figure of the paper, by its LaTeX label.
        ranked: Whether the best and the second best of each column are marked.
    """

    title: str
    source: str
    entries: tuple[Entry, ...]
    digits: int = 2
    ranked: bool = False

    @property
    def rows(self) -> list[str]:
        """Headings of the rows, in order."""
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[str]:
        """Headings of the columns, in order."""
        return list(dict.fromkeys(entry.column for entry in self.entries))


@dataclass(frozen=True)
class Panel:
    """A part drawn as a panel of a figure: a curve for each row, with a point for each column; or a
    bar for each row, of one column.

    The place of a point is the number that ends the column's heading, as in ``task 3``; columns
    without one, such as ``average``, are not drawn.

    Attributes:
        values: What the points or bars show, for the axis; panels in which it is equal share its
            scale.
        bars: The heading of the column whose bars are drawn; empty for curves.
        ends: A part whose column ``average`` has the paper's numbers for the last points of the
            curves, where their own part has none.
    """

    part: Part
    title: str
    values: str
    bars: str = ""
    ends: Part | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Attributes:
        x: What the curves are drawn against; empty for bars.
        wide: It is as wide as a page of two columns, not as one of them.
        name: What tells its files from those of the table's other figures; empty where it has one.
    """

    source: str
    caption: str
    x: str
    panels: tuple[Panel, ...]
    columns: int = 3
    wide: bool = True
    name: str = ""

    def stem(self, table: str) -> str:
        """The name of its files without ending, by that of the table's."""
        return f"{table}-{self.name}" if self.name else table


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper: what ``mose-fast paper NAME`` computes.

    Attributes:
        about: The methods that a note is about, by the note; the others are about the whole table.
        section: The section of the page of all tables in which it stands.
    """

    title: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    section: str
    caption: str
    figures: tuple[Figure, ...] = ()
    about: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """The cells of all tables."""
        return [entry for part in self.parts for entry in part.entries]
