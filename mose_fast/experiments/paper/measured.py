"""Our numbers for the cells of a table of the paper, from the finished runs behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mose_fast.experiments.cells import Failure
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import Entry, Part, Verdict, judge, ranks
from mose_fast.experiments.paper.measures import Metric, Results
from mose_fast.experiments.paper.plan import Plan
from mose_fast.present.statistics import Summary, summarise
from mose_fast.present.table import counted
from mose_fast.runs.files import RunFolder
from mose_fast.runs.store import read_run

__all__ = ["FinishedRuns", "Measured", "measure", "place", "ranked"]


@dataclass(frozen=True)
class Measured:
    """Our number for a cell of the paper's table.

    Attributes:
        ours: Statistics over the seeds; None where no finished run has the number.
        verdict: None where nothing is compared.
    """

    entry: Entry
    ours: Summary | None
    verdict: Verdict | None


class FinishedRuns:
    """The finished runs in a folder. Each is read once, whichever tables have it and however often
    their pages are written.

    Args:
        plans: The tables, whose runs have the names of their folders.
    """

    def __init__(self, plans: Sequence[Plan], folder: SweepFolder) -> None:
        self.folder = folder
        self._metrics: dict[str, set[Metric]] = {}
        for plan in plans:
            for entry in plan.description.entries:
                for runs in filter(None, (entry.runs, entry.over)):
                    for cell in plan.cells_of(runs):
                        self._metrics.setdefault(cell.name, set()).add(entry.metric)
        # Of each run what the tables need: the matrices of a hundred tasks are large.
        self._read: dict[str, FinishedRun] = {}

    def of(self, plan: Plan, runs: Mapping[str, Any], without: Collection[str]) -> list[FinishedRun]:
        """The runs behind an entry with these settings, by seed.

        Raises:
            RunDamaged: A file of a run is damaged.
        """
        found = []
        for cell in plan.cells_of(runs):
            path = self.folder.run(cell.name)
            if cell.name in without:
                continue
            if cell.name not in self._read and RunFolder(path).results.is_file():
                row, results = read_run(path)
                values = {metric: metric.of_run(results) for metric in self._metrics[cell.name]}
                self._read[cell.name] = FinishedRun(cell, _facts(cell, row, results), values)
            if cell.name in self._read:
                found.append(self._read[cell.name])
        return found


@dataclass(frozen=True)
class FinishedRun:
    """What is kept of a finished run.

    Attributes:
        facts: The part of its results that tells how and where it ran.
        values: What each metric read from it.
    """

    cell: Cell
    facts: Results
    values: Mapping[Metric, Any]


def measure(
    plan: Plan, finished: FinishedRuns, failures: Sequence[Failure]
) -> tuple[list[dict[tuple[str, str], Measured]], list[tuple[Cell, Results]]]:
    """Our numbers for all cells, and the runs behind them.

    Returns:
        For each part of the description, its cells by row and column; and the finished runs, each
        once, with the part of their results that tells how and where they ran.
    """
    unfinished = [failure.name for failure in failures]
    measured: list[dict[tuple[str, str], Measured]] = []
    runs: dict[str, tuple[Cell, Results]] = {}
    for part in plan.description.parts:
        measured.append({})
        for entry in part.entries:
            found = finished.of(plan, entry.runs, unfinished)
            runs |= {run.cell.name: (run.cell, run.facts) for run in found}
            values = _by_run(entry, found)
            if entry.over is not None:
                # Of seeds that both settings have on the same machine.
                over = _by_run(entry, finished.of(plan, entry.over, unfinished))
                values = {run: value / over[run] for run, value in values.items() if over.get(run)}
            ours = summarise(values.values(), resamples=0) if values else None
            verdict = None if plan.departures else judge(entry.metric, entry.standard, ours)
            measured[-1][entry.row, entry.column] = Measured(entry, ours, verdict)
    return measured, list(runs.values())


def ranked(
    part: Part, measured: Mapping[tuple[str, str], Measured]
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """The rank in its column, by row and column, of the best two of our numbers and of the paper's;
    both empty where the part's columns are not ranked.
    """
    ours: dict[tuple[str, str], int] = {}
    theirs: dict[tuple[str, str], int] = {}
    for column in part.columns if part.ranked else ():
        cells = [m for m in (measured.get((row, column)) for row in part.rows) if m is not None]
        kind = cells[0].entry.metric.kind
        for found, values in (
            (ours, {m.entry.row: m.ours.mean for m in cells if m.ours}),
            (theirs, {m.entry.row: m.entry.paper.mean for m in cells if m.entry.paper}),
        ):
            found |= {(row, column): rank for row, rank in ranks(values, kind, part.digits).items()}
    return ours, theirs


def place(results: Results) -> str:
    """The GPU or the processor and its threads that a run had."""
    return results["gpu"] or f"{results['processor']}, {counted(results['threads'], 'thread')}"


def _by_run(entry: Entry, runs: Sequence[FinishedRun]) -> dict[tuple[int, str], float]:
    """The values that runs have of an entry's metric, by seed and place."""
    values = entry.metric.combine([run.values[entry.metric] for run in runs]) if runs else []
    return {
        (run.facts["config"]["seed"], place(run.facts)): value
        for run, value in zip(runs, values, strict=True)
        if value is not None
    }


def _facts(cell: Cell, row: Mapping[str, Any], results: Results) -> Results:
    """What the list of runs needs of the results, without the large matrices, and the row."""
    names = ("seconds", "gpu", "processor", "threads", "versions", "commit", "native_backend", "config", "resolved")
    row = {name: value for name, value in row.items() if name not in ("metrics", "config")}
    return {**{name: results[name] for name in names}, "row": {**row, "folder": cell.name}}
