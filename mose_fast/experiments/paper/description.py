"""A table of the paper: for each cell its runs, what is read from them, and the paper's number."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mose_fast.experiments.paper.measures import Metric, accuracy_after, average_accuracy
from mose_fast.present.published import Published
from mose_fast.settings.run import RunConfig

if TYPE_CHECKING:
    from mose_fast.present.statistics import Summary  # scipy takes a second, which a list of the tables need not pay

#: The data sets of the tables, by the names of their streams.
DATA_SETS = CIFAR, TINY = "split-cifar100", "split-tiny-imagenet"
MAIN_MEMORIES = (1000, 2000, 5000)
SMALL_MEMORIES = (200, 500, 1000, 2000)
TASKS = 10
NO_NUMBER = "The paper shows a figure without numbers; there is no pass or fail."

#: Presets of baselines with which tables can be made, the default first: the shared protocol of
#: the paper's section 5.1, and each method's own values in it, as the appendix says.
BASELINE_PRESETS = ("table", "sources")

#: The one rule of pass and miss; :attr:`Entry.target` and :meth:`Entry.judge` follow it.
RULE = (
    "An accuracy passes if its mean over the seeds is at most 1 point below the paper's; forgetting if it is at most 1"
    " point above; a count of parameters or multiply-accumulates if it is at most 1 % above. Minutes, and cells for"
    " which the paper gives no number or one that cannot be right, are not judged."
    ' "not sure": the 95 % interval of the mean contains the target, or there is no interval, as with one seed.'
)


class Presets(NamedTuple):
    """Presets of a table's runs: MOSE's, ``released`` or ``paper``, and that of all other methods,
    one of :data:`BASELINE_PRESETS`.
    """

    mose: str = RunConfig.preset
    baselines: str = BASELINE_PRESETS[0]


#: Those that a table has unless others are chosen.
DEFAULT_PRESETS = Presets()


class Verdict(NamedTuple):
    """Whether a number passes, and whether its 95 % interval lies on that side of the target."""

    passed: bool
    sure: bool

    def __str__(self) -> str:
        return ("pass" if self.passed else "miss") + ("" if self.sure else ", not sure")


@dataclass(frozen=True, eq=False)
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
    def method(self) -> str:
        return self.runs.get("method", RunConfig.method)

    @property
    def stream(self) -> str:
        return self.runs["stream.name"]

    @property
    def target(self) -> float | None:
        """The worst value that passes; None where there is no pass or fail."""
        if self.paper is None or self.doubt:
            return None
        mean = self.paper.mean
        return {"accuracy": mean - 1, "forgetting": mean + 1, "size": mean * 1.01, "free": None}[self.metric.kind]

    def judge(self, ours: Summary) -> Verdict | None:
        """Our mean against the paper's; None where nothing is compared."""
        wanted = self.target
        if wanted is None:
            return None
        # 54.8 - 1 and the mean of some floats must not differ in their last bit alone.
        slack = 1e-9
        passed = ours.mean >= wanted - slack if self.metric.kind == "accuracy" else ours.mean <= wanted + slack
        if self.metric.kind == "size":
            return Verdict(passed, True)  # the same for every seed
        low, high = ours.t_interval
        return Verdict(passed, not math.isnan(low) and not low + slack < wanted < high - slack)


@dataclass(frozen=True)
class Part:
    """A table, or one of its panels.

    Attributes:
        source: The table or figure of the paper, by its LaTeX label; or the page that has the
            numbers of others.
        ranked: Whether the best and the second best of each column are marked.
        theirs: What the numbers beside ours are called.
    """

    title: str
    source: str
    entries: tuple[Entry, ...]
    digits: int = 2
    ranked: bool = False
    theirs: str = "paper"

    @property
    def rows(self) -> list[str]:
        """Headings of the rows, in order."""
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[str]:
        """Headings of the columns, in order."""
        return list(dict.fromkeys(entry.column for entry in self.entries))

    @cached_property
    def at(self) -> dict[tuple[str, str], Entry]:
        """The entries by row and column."""
        return {(entry.row, entry.column): entry for entry in self.entries}

    @property
    def printed(self) -> int:
        """For how many entries the paper prints a number."""
        return sum(entry.paper is not None for entry in self.entries)


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
        notes: Sentences below it, each with the methods that it is about; without any it is about
            the whole table.
        section: The section of the page of all tables in which it stands.
    """

    title: str
    parts: Collection[Part]
    notes: Mapping[str, Collection[str]]
    section: str
    caption: str
    figures: Collection[Figure] = ()

    @property
    def entries(self) -> list[Entry]:
        """The cells of all tables."""
        return [entry for part in self.parts for entry in part.entries]

    def only(self, wanted: Callable[[Entry], bool]) -> PaperTable:
        """The table with some of its cells alone, and the figures and notes that are about them."""

        def kept(part: Part) -> Part:
            return replace(part, entries=tuple(filter(wanted, part.entries)))

        parts = [part for part in map(kept, self.parts) if part.entries]
        figures = []
        for figure in self.figures:
            panels = [replace(panel, part=kept(panel.part)) for panel in figure.panels]
            figures.append(replace(figure, panels=tuple(panel for panel in panels if panel.part.entries)))
        methods = {entry.method for part in parts for entry in part.entries}
        notes = {note: about for note, about in self.notes.items() if not about or methods.intersection(about)}
        return replace(self, parts=parts, figures=[figure for figure in figures if figure.panels], notes=notes)


def mose(
    presets: Presets, memory: int, stream: str = CIFAR, *, tasks: int | None = None, **options: Any
) -> dict[str, Any]:
    """Settings of MOSE: the preset, with the submission's augmentation unless another is given."""
    changes: dict[str, Any] = {"preset": presets.mose, "stream.name": stream, "memory": memory}
    if tasks is not None:
        changes["stream.tasks"] = tasks
    return changes | {f"options.{name}": value for name, value in {"augment": "simclr", **options}.items()}


def baseline(
    presets: Presets, method: str, memory: int, stream: str = CIFAR, *, epochs: int = 1, **options: Any
) -> dict[str, Any]:
    """Settings of a baseline."""
    changes = {"method": method, "preset": presets.baselines, "stream.name": stream, "memory": memory, "epochs": epochs}
    return changes | {f"options.{name}": value for name, value in options.items()}


def thousands(memory: int) -> str:
    """``M = 200`` or ``M = 5k``."""
    return f"M = {memory // 1000}k" if memory % 1000 == 0 else f"M = {memory}"


def by_task(
    row: str,
    runs: dict[str, Any],
    metric: Callable[[int], Metric],
    average: Metric,
    theirs: Mapping[str, Published] = MappingProxyType({}),
) -> list[Entry]:
    """A row of a table by task: ten tasks and their average, with the paper's numbers if given."""
    entries = [Entry(row, f"task {task + 1}", runs, metric(task), theirs.get(str(task + 1))) for task in range(TASKS)]
    return [*entries, Entry(row, "average", runs, average, theirs.get("average"))]


def final_by_task(
    row: str, runs: dict[str, Any], classifier: str, expert: str, theirs: Mapping[str, Published] = MappingProxyType({})
) -> list[Entry]:
    """A row of accuracies after the last task, by task."""
    average = average_accuracy(classifier, expert)
    return by_task(row, runs, lambda task: accuracy_after(None, task, classifier, expert), average, theirs)


def by_memory(
    parts: Iterable[Part], values: str, title: str = "", *, ends: Iterable[Part] | None = None
) -> tuple[Panel, ...]:
    """A panel for each of :data:`MAIN_MEMORIES`, whose titles end with it."""
    sizes = map(thousands, MAIN_MEMORIES)
    return tuple(
        Panel(part, f"{title}{size}", values, ends=end)
        for size, part, end in zip(sizes, parts, ends or [None] * len(MAIN_MEMORIES), strict=True)
    )
