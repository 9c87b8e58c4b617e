"""Our numbers for the cells of a table of the paper, from the finished runs behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mose_fast.experiments.cells import Failure
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import Entry, Part, Verdict, judge, ranks
from mose_fast.experiments.paper.measures import Results
from mose_fast.experiments.paper.plan import Plan, settings_key
from mose_fast.present.report_tables import counted
from mose_fast.present.statistics import Summary, summarise

__all__ = ["Measured", "measure", "place", "ranked"]


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
    unfinished = [failure.name for failure in failures]
    divisors: dict[str, list[Results]] = {}
    for entries in by_runs.values():
        # One setting at a time: the matrices of a hundred tasks are large.
        found = plan.finished(entries[0][1].runs, folder, unfinished)
        results = [run for _, _, run in found]
        for number, entry in entries:
            over = None
            if entry.over is not None:
                key = settings_key(entry.over)
                if key not in divisors:
                    divisors[key] = [run for _, _, run in plan.finished(entry.over, folder, unfinished)]
                over = divisors[key]
            values = _values(entry, results, over)
            ours = summarise(values, resamples=0) if values else None
            verdict = None if plan.departures else judge(entry.metric, entry.standard, ours)
            measured[number][entry.row, entry.column] = Measured(entry, ours, verdict)
        runs |= {cell.name: (cell, _facts(cell, row, run)) for cell, row, run in found}
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
    """The card or the processor and its threads that a run had."""
    return results["card"] or f"{results['processor']}, {counted(results['threads'], 'thread')}"


def _values(entry: Entry, results: Sequence[Results], over: Sequence[Results] | None) -> list[float]:
    """The runs' values. Those of an entry that divides are of seeds that both settings have on the
    same machine.
    """

    def by_run(runs: Sequence[Results]) -> dict[tuple[int, str], float]:
        read = entry.metric.read(runs) if runs else []
        return {(r["config"]["seed"], place(r)): v for r, v in zip(runs, read, strict=True) if v is not None}

    values = by_run(results)
    if over is None:
        return list(values.values())
    divisors = by_run(over)
    return [value / divisors[run] for run, value in values.items() if divisors.get(run)]


def _facts(cell: Cell, row: Mapping[str, Any], results: Results) -> Results:
    """The part of the results that the list of runs needs, without the large accuracy matrices, and
    the run's row.
    """
    names = ("seconds", "card", "processor", "threads", "versions", "commit", "native_backend", "config", "resolved")
    row = {name: value for name, value in row.items() if name not in ("metrics", "config")}
    return {**{name: results[name] for name in names}, "row": {**row, "folder": cell.name}}
