"""The page of a table of the paper: our numbers beside the paper's, with verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mose_fast.experiments.cells import Failure
from mose_fast.experiments.forecast import Forecast, duration
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import RULE, Entry, Part, target
from mose_fast.experiments.paper.measured import Measured, place, ranked
from mose_fast.experiments.paper.measures import Results
from mose_fast.experiments.paper.plan import Plan, departure_lines, state_lines
from mose_fast.present.published import RUNS
from mose_fast.present.statistics import Summary, code_warnings, summarise
from mose_fast.present.table import Cell as Shown
from mose_fast.present.table import Interval, Number, Spread, Table, cell_text
from mose_fast.settings.knob import as_text

__all__ = ["cautions", "listing", "overview", "provenance", "render"]


def overview(plan: Plan) -> str:
    """The paper's cells and what passes, before anything has run."""
    lines = [f"{plan.name}: {plan.description.title}"]
    for part in plan.description.parts:
        lines += ["", f"{part.title} ({part.source})", _paper_table(part).markdown().rstrip()]
    return "\n".join([*lines, "", *plan.description.notes, RULE, *departure_lines([plan])])


def listing(plans: Sequence[Plan], forecast: Forecast) -> str:
    """The tables with their runs and what they take; a run that several tables share is counted in
    the first of them.
    """
    table = Table("tables", "", ["table", "runs", "shared", "to do", "computing", "content"])
    earlier: set[str] = set()
    for plan in plans:
        names = {cell.name for cell in plan.cells}
        left = [forecast.costs[name].seconds for name in names - earlier if name in forecast.costs]
        content = plan.description.title
        table.rows.append([plan.name, len(names), len(names & earlier), len(left), duration(sum(left)), content])
        earlier |= names
    table.rows.append(
        ["all", len(earlier), None, len(forecast.costs), duration(forecast.compute_seconds), "each run once"]
    )
    return (
        f"\n{table.markdown().rstrip()}\nshared: runs that an earlier table has, too; to do: the others that are not"
        " finished"
    )


def render(
    plan: Plan,
    measured: Sequence[Mapping[tuple[str, str], Measured]],
    runs: Sequence[tuple[Cell, Results]],
    failures: Sequence[Failure],
) -> tuple[str, str]:
    """The page in Markdown, and all cells as CSV."""
    parts = plan.description.parts
    verdicts = [m.verdict for cells in measured for m in cells.values() if m.verdict is not None]
    lines = [f"# {plan.name}: {plan.description.title}", "", f"    {plan.command}", ""]
    said = state_lines(len(plan.cells), len(runs) + len(failures), plan.left_out)
    said += [*departure_lines([plan]), *cautions([run for _, run in runs])]
    lines += [f"**{line[:1].upper()}{line[1:]}.**\n" for line in said]
    if verdicts:
        passed, unsure = sum(v.passed for v in verdicts), sum(not v.sure for v in verdicts)
        lines += [
            f"{passed} of {len(verdicts)} judged cells pass; {unsure} of these verdicts are not sure with these seeds.",
            "",
        ]
    for part, cells in zip(parts, measured, strict=True):
        lines += [f"## {part.title}", "", _table(part, cells).markdown()]
    for figure in plan.description.figures:
        lines += [f"![{figure.source}]({figure.stem(plan.stem)}.svg)", "", f"{figure.caption} ({figure.source})", ""]
    lines += ["## Notes", "", *(f"- {note}" for note in plan.description.notes)]
    lines += [] if plan.departures else [f"- {RULE}"]
    lines += [
        "- Ours, of test images: mean ± standard deviation over the seeds, and 95 % interval of the mean by Student's"
        f" t; the paper's: {RUNS} runs."
    ]
    lines += [f"- Not finished: {failure.name}: {failure.reason}" for failure in failures]
    lines += ["", "## Runs", "", _runs_table(runs).markdown(), *provenance([run for _, run in runs])]
    return "\n".join(lines) + "\n", _long_table(parts, measured).csv()


def _paper_table(part: Part) -> Table:
    """The paper's numbers and the values that pass."""
    entries = {(entry.row, entry.column): entry for entry in part.entries}
    numbers = any(entry.paper is not None for entry in part.entries)
    table = Table("paper", "", ["", "", *part.columns])
    for row in part.rows:
        line = [entries.get((row, column)) for column in part.columns]
        nothing = None if numbers else "no number"
        table.rows.append([row, "paper", *(_published(entry, part.digits) or nothing for entry in line)])
        to_pass = [None if entry is None else _to_pass(entry, part.digits) for entry in line]
        table.rows += [[row, "to pass", *to_pass]] if any(to_pass) else []
    return table


def _table(part: Part, measured: Mapping[tuple[str, str], Measured]) -> Table:
    """For each row of the paper: our numbers, their intervals, its numbers, the verdicts."""
    numbers = any(entry.paper is not None for entry in part.entries)
    about = f"The paper's numbers: {part.source}." if numbers else f"{part.source} has no numbers."
    table = Table(part.title, about, ["", "", *part.columns])
    ours, theirs = ranked(part, measured)
    for row in part.rows:
        cells = {(row, column): measured.get((row, column)) for column in part.columns}
        summaries = {at: None if m is None else m.ours for at, m in cells.items()}
        papers = {at: _published(m.entry if m else None, part.digits) for at, m in cells.items()}
        lines: dict[str, list[Shown]] = {
            "ours": [_marked(_spread(s, part.digits), ours.get(at)) for at, s in summaries.items()],
            "95 % interval": [_interval(s, part.digits) for s in summaries.values()],
            "paper": [_marked(paper, theirs.get(at)) for at, paper in papers.items()] if numbers else [],
            "verdict": [_verdict(m) for m in cells.values()],
        }
        table.rows += [[row, name, *line] for name, line in lines.items() if name == "ours" or any(line)]
    return table


def _marked(cell: Shown, rank: int | None) -> Shown:
    """Bold for the best of a column, italic for the second best."""
    mark = {None: "", 1: "**", 2: "*"}[rank]
    return f"{mark}{cell_text(cell)}{mark}" if mark else cell


def _verdict(m: Measured | None) -> str | None:
    if m is None or m.verdict is None:
        return "not judged" if m is not None and m.ours and m.entry.doubt else None
    return str(m.verdict)


def _long_table(parts: Sequence[Part], measured: Sequence[Mapping[tuple[str, str], Measured]]) -> Table:
    """One row for each cell."""
    table = Table("cells", "", spreads=("ours", "paper"), intervals=("interval",))
    for part, cells in zip(parts, measured, strict=True):
        digits = part.digits + 1
        for entry in part.entries:
            m = cells[entry.row, entry.column]
            table.add(
                {
                    "part": part.title,
                    "source": part.source,
                    "row": entry.row,
                    "column": entry.column,
                    "metric": entry.metric.name,
                    "n": m.ours.n if m.ours else 0,
                    "ours": _spread(m.ours, digits),
                    "interval": _interval(m.ours, digits),
                    "paper": Spread(entry.paper.mean, entry.paper.sd, part.digits) if entry.paper else None,
                    "difference": Number(m.ours.mean - entry.paper.mean, digits) if m.ours and entry.paper else None,
                    "to pass": _to_pass(entry, part.digits),
                    "verdict": _verdict(m),
                }
            )
    return table


def _spread(summary: Summary | None, digits: int) -> Shown:
    return None if summary is None else Spread(summary.mean, summary.sd if summary.n > 1 else None, digits)


def _interval(summary: Summary | None, digits: int) -> Shown:
    return None if summary is None or summary.n < 2 else Interval(*summary.t_interval, digits)


def _published(entry: Entry | None, digits: int) -> Shown:
    return None if entry is None or entry.paper is None else Spread(entry.paper.mean, entry.paper.sd, digits)


def _to_pass(entry: Entry, digits: int) -> str | None:
    wanted = target(entry.metric, entry.standard)
    relation = ">=" if entry.metric.kind == "accuracy" else "<="
    return None if wanted is None else f"{relation} {wanted:.{digits}f}"


def _runs_table(runs: Sequence[tuple[Cell, Results]]) -> Table:
    by_setting: dict[str, list[tuple[Cell, Results]]] = {}
    for cell, results in runs:
        by_setting.setdefault(cell.label, []).append((cell, results))
    about = "Settings that differ from the method's preset. Each run's folder is named by these settings and its seed."
    table = Table("runs", about, ["setting", "seeds", "minutes a run"])
    for label, same in by_setting.items():
        minutes = summarise([results["seconds"]["total"] / 60 for _, results in same], resamples=0)
        table.rows.append([label, ", ".join(str(cell.config.seed) for cell, _ in same), _spread(minutes, 2)])
    return table


def cautions(runs: Sequence[Results]) -> list[str]:
    """What differs in the code and the machines that computed the runs, a sentence each."""
    return [f"caution: {warning}" for warning in code_warnings([run["row"] for run in runs])]


def provenance(runs: Sequence[Results]) -> list[str]:
    """Machine, code and precision of the runs; several values where runs differ."""

    def values(value: Callable[[Results], Any]) -> str:
        return ", ".join(dict.fromkeys(as_text(value(run)) for run in runs))

    if not runs:
        return ["No run is finished."]
    return [
        f"- computed on: {values(place)}",
        f"- commit: {values(lambda run: run['commit'])}; native library: {values(lambda run: run['native_backend'])}",
        "- versions: "
        + "; ".join(f"{name} {values(lambda run, name=name: run['versions'][name])}" for name in runs[0]["versions"]),
        f"- data: {values(lambda run: run['config']['stream'].get('fingerprint') or 'of runs before fingerprints')}",
        f"- precision: {values(lambda run: run['resolved']['precision'])};"
        f" deterministic: {values(lambda run: run['config']['deterministic'])}",
    ]
