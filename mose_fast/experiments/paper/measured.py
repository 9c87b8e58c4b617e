"""Our numbers for the cells of a table of the paper, from the finished runs behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mose_fast.experiments.cells import Failure
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import Entry, Part, Verdict
from mose_fast.experiments.paper.measures import Metric, Results
from mose_fast.experiments.paper.plan import Plan
from mose_fast.present.statistics import Summary, summarise
from mose_fast.present.table import counted
from mose_fast.runs.files import RunFolder
from mose_fast.runs.store import read_run

# What the list of runs needs of the results: the matrices of a hundred tasks are large.
_FACTS = ("seconds", "gpu", "processor", "threads", "versions", "commit", "native_backend", "config", "resolved")


class FinishedRun(NamedTuple):
    """What is kept of a finished run.

    Attributes:
        facts: The part of its results that tells how and where it ran, and its row of the store.
        values: What each metric read from it.
    """

    cell: Cell
    facts: Results
    values: Mapping[Metric, Any]


@dataclass(frozen=True)
class Measured:
    """A table of the paper with our numbers.

    Attributes:
        ours: Statistics over the seeds, of the cells for which a finished run has a number.
        runs: The finished runs behind it, each once.
    """

    plan: Plan
    ours: Mapping[Entry, Summary]
    runs: Sequence[FinishedRun] = ()

    def verdict(self, entry: Entry) -> Verdict | None:
        """None where nothing is compared."""
        ours = self.ours.get(entry)
        return None if ours is None or self.plan.departures else entry.judge(ours)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Those of all cells that are judged."""
        found = map(self.verdict, self.plan.description.entries)
        return [verdict for verdict in found if verdict is not None]

    def ranks(self, part: Part) -> tuple[dict[Entry, int], dict[Entry, int]]:
        """1 for the best number of each column as printed, 2 for the second best, among ours and
        among the paper's; both empty where the part's columns are not ranked.
        """
        ours: dict[Entry, int] = {}
        theirs: dict[Entry, int] = {}
        for column in part.columns if part.ranked else ():
            entries = [entry for entry in part.entries if entry.column == column]
            for ranks, values in (
                (ours, {entry: self.ours[entry].mean for entry in entries if entry in self.ours}),
                (theirs, {entry: entry.paper.mean for entry in entries if entry.paper}),
            ):
                printed = {entry: round(value, part.digits) for entry, value in values.items()}
                best = sorted(set(printed.values()), reverse=entries[0].metric.kind == "accuracy")[:2]
                ranks |= {entry: best.index(value) + 1 for entry, value in printed.items() if value in best}
        return ours, theirs


class FinishedRuns:
    """The finished runs in a folder. Each is read once, whichever tables have it and however often
    their pages are written.

    Args:
        names: Those of the runs' folders, by name of the cell.
    """

    def __init__(self, plans: Iterable[Plan], folder: SweepFolder, names: Mapping[str, str]) -> None:
        self.folder, self.names = folder, names
        self._metrics: dict[str, set[Metric]] = {}
        for plan in plans:
            for entry in plan.description.entries:
                for runs in filter(None, (entry.runs, entry.over)):
                    for cell in plan.cells_of(runs):
                        self._metrics.setdefault(cell.name, set()).add(entry.metric)
        self._read: dict[str, FinishedRun] = {}

    def measure(self, plan: Plan, failures: Iterable[Failure] = ()) -> Measured:
        """Our numbers for a table, without the runs that could not be finished.

        Raises:
            RunDamaged: A file of a run is damaged.
        """
        unfinished = {failure.name for failure in failures}
        ours: dict[Entry, Summary] = {}
        runs: dict[str, FinishedRun] = {}
        for entry in plan.description.entries:
            found = self._of(plan.cells_of(entry.runs), unfinished)
            runs |= {run.cell.name: run for run in found}
            values = _by_run(entry, found)
            if entry.over is not None:
                # Of seeds that both settings have on the same machine.
                over = _by_run(entry, self._of(plan.cells_of(entry.over), unfinished))
                values = {run: value / over[run] for run, value in values.items() if over.get(run)}
            if values:
                ours[entry] = summarise(values.values())
        return Measured(plan, ours, list(runs.values()))

    def _of(self, cells: Iterable[Cell], unfinished: Collection[str]) -> list[FinishedRun]:
        found = []
        for cell in cells:
            name = self.names[cell.name]
            path = self.folder.run(name)
            if name in unfinished:
                continue
            if cell.name not in self._read and RunFolder(path).results.is_file():
                row, results = read_run(path)
                row = {name: value for name, value in row.items() if name not in ("metrics", "config")}
                facts = {**{name: results[name] for name in _FACTS}, "row": {**row, "folder": name}}
                values = {metric: metric.of_run(results) for metric in self._metrics[cell.name]}
                self._read[cell.name] = FinishedRun(cell, facts, values)
            if cell.name in self._read:
                found.append(self._read[cell.name])
        return found


def place(results: Results) -> str:
    """The GPU or the processor and its threads that a run had."""
    return results["gpu"] or f"{results['processor']}, {counted(results['threads'], 'thread')}"


def _by_run(entry: Entry, runs: Sequence[FinishedRun]) -> dict[tuple[int, str], float]:
    values = entry.metric.combine([run.values[entry.metric] for run in runs]) if runs else []
    return {
        (run.cell.config.seed, place(run.facts)): value
        for run, value in zip(runs, values, strict=True)
        if value is not None
    }
