"""What the descriptions of the paper's tables share: settings of runs, rows by task, names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mose_fast.experiments.paper import measures
from mose_fast.experiments.paper.description import Entry, Figure, Panel, PaperTable, Part
from mose_fast.experiments.paper.measures import Metric
from mose_fast.present.published import Published
from mose_fast.settings.run import RunConfig

__all__ = [
    "BASELINE_PRESETS",
    "CIFAR",
    "DATA_SETS",
    "DEFAULT_PRESETS",
    "MAIN_MEMORIES",
    "NO_NUMBER",
    "SMALL_MEMORIES",
    "TASKS",
    "TINY",
    "Presets",
    "baseline",
    "by_memory",
    "by_task",
    "final_by_task",
    "mose",
    "table",
    "thousands",
]

#: The data sets of the tables, by the names of their streams.
DATA_SETS = CIFAR, TINY = "split-cifar100", "split-tiny-imagenet"
MAIN_MEMORIES = (1000, 2000, 5000)
SMALL_MEMORIES = (200, 500, 1000, 2000)
TASKS = 10
NO_NUMBER = "The paper shows a figure without numbers; there is no pass or fail."

#: Presets of baselines with which tables can be made, the default first: the shared protocol of
#: the paper's section 5.1, and each method's own values in it, as the appendix says.
BASELINE_PRESETS = ("table", "sources")


class Presets(NamedTuple):
    """Presets of a table's runs.

    Attributes:
        mose: MOSE's, ``released`` or ``paper``.
        baselines: That of all other methods, one of :data:`BASELINE_PRESETS`.
    """

    mose: str = RunConfig.preset
    baselines: str = BASELINE_PRESETS[0]


#: Those that a table has unless others are chosen.
DEFAULT_PRESETS = Presets()


def table(
    title: str,
    parts: Iterable[Part],
    *notes: str | tuple[str, Collection[str]],
    section: str,
    caption: str,
    figures: Iterable[Figure] = (),
) -> PaperTable:
    """A table's description, with its notes as further arguments: texts, or pairs of a text and the
    methods that it is about.
    """
    about = dict(note for note in notes if not isinstance(note, str))
    texts = tuple(note if isinstance(note, str) else note[0] for note in notes)
    return PaperTable(title, tuple(parts), texts, section, caption, tuple(figures), about)


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
    average = measures.average_accuracy(classifier, expert)
    return by_task(row, runs, lambda task: measures.final_accuracy(task, classifier, expert), average, theirs)


def by_memory(
    parts: Iterable[Part], values: str, title: str = "", *, ends: Iterable[Part] | None = None
) -> tuple[Panel, ...]:
    """A panel for each of :data:`MAIN_MEMORIES`, whose titles end with it."""
    sizes = map(thousands, MAIN_MEMORIES)
    return tuple(
        Panel(part, f"{title}{size}", values, ends=end)
        for size, part, end in zip(sizes, parts, ends or [None] * len(MAIN_MEMORIES), strict=True)
    )
