"""Our numbers for the cells of a table of the paper, from the finished runs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mose_fast.paper.description import Entry, Verdict, judge
from mose_fast.paper.metrics import Results
from mose_fast.paper.plan import Plan, settings_key
from mose_fast.report.statistics import Summary, summarise
from mose_fast.sweep.cells import Failure
from mose_fast.sweep.folder import SweepFolder
from mose_fast.sweep.grid import Cell

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """Our number for a cell of the paper's table.

    Attributes:
        entry: The cell's description.
        ours: Statistics over the seeds; None where no finished run has the number.
        verdict: None where nothing is compared.
    """

    entry: Entry
    ours: Summary | None
    verdict: Verdict | None


def measure(
    plan: Plan, folder: SweepFolder, failures: Sequence[Failure]
) -> tuple[list[dict[tuple[str, str], Measured]], list[tuple[Cell, Results]]]:
    """Our numbers for all cells, and the runs behind them.

    Args:
        plan: The table's runs.
        folder: The folder of the runs.
        failures: Runs that could not be finished.

    Returns:
        For each part of the description, its cells by row and column; and the finished runs, each
        once, with the part of their results that tells how and where they ran.
    """
    parts = plan.description.parts
    by_runs: dict[str, list[tuple[int, Entry]]] = {}
    for number, part in enumerate(parts):
        for entry in part.entries:
            by_runs.setdefault(settings_key(entry.runs), []).append((number, entry))
    measured: list[dict[tuple[str, str], Measured]] = [{} for _ in parts]
    runs: dict[str, tuple[Cell, Results]] = {}
    for entries in by_runs.values():
        # One setting at a time: the matrices of a hundred tasks are large.
        found = plan.finished(entries[0][1].runs, folder, [failure.name for failure in failures])
        results = [run for _, run in found]
        for number, entry in entries:
            measured[number][entry.row, entry.column] = _measure(entry, results, judged=not plan.departures)
        runs |= {cell.name: (cell, _facts(run)) for cell, run in found}
    return measured, list(runs.values())


def _measure(entry: Entry, results: Sequence[Results], *, judged: bool) -> Measured:
    values = [value for value in (entry.metric.read(results) if results else []) if value is not None]
    ours = summarise(values, resamples=0) if values else None
    return Measured(entry, ours, judge(entry.metric, entry.paper, ours) if judged else None)


def _facts(results: Results) -> Results:
    """The part of the results that the list of runs needs, without the large accuracy matrices."""
    names = ("seconds", "card", "processor", "threads", "versions", "commit", "native_backend", "config", "resolved")
    return {name: results[name] for name in names}
