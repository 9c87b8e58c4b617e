"""The pages of the paper's tables as Markdown, CSV and HTML: our numbers beside the paper's."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mose_fast._version import __version__
from mose_fast.experiments.cells import Failure
from mose_fast.experiments.forecast import Forecast, duration
from mose_fast.experiments.paper.description import RULE, Entry, Part, Verdict
from mose_fast.experiments.paper.measured import FinishedRun, Measured, place
from mose_fast.experiments.paper.plan import Plan, departure_lines
from mose_fast.present.page import fill
from mose_fast.present.published import RUNS
from mose_fast.present.statistics import Summary, code_warnings, summarise
from mose_fast.present.table import Cell, Interval, Number, Spread, Table, cell_text
from mose_fast.settings.knob import as_text

#: What tells a page of this command from any other file, in its head.
MARK = ("generator", "mose-fast paper")

# Pixels of the page for each point of a drawing, which is made for print, with letters of 7 points.
_SCALE = 1.5 * 4 / 3


def overview(plan: Plan) -> str:
    """The paper's cells and what passes, before anything has run."""
    lines = [f"{plan.name}: {plan.description.title}"]
    for part in plan.description.parts:
        table = Table("paper", "", ["", "", *part.columns])
        for row in part.rows:
            entries = [part.at.get((row, column)) for column in part.columns]
            nothing = None if part.printed else "no number"
            table.rows.append([row, part.theirs, *(_paper(entry, part.digits) or nothing for entry in entries)])
            to_pass = [_to_pass(entry, part.digits) for entry in entries]
            table.rows += [[row, "to pass", *to_pass]] if any(to_pass) else []
        lines += ["", f"{part.title} ({part.source})", table.markdown().rstrip()]
    return "\n".join([*lines, "", *plan.description.notes, RULE, *departure_lines([plan])])


def listing(plans: Sequence[Plan], folders: Mapping[str, str], forecast: Forecast) -> str:
    """The tables with their runs and what they take; a run that several tables share is counted in
    the first of them.
    """
    table = Table("tables", "", ["table", "runs", "shared", "to do", "computing", "content"])
    earlier: set[str] = set()
    for plan in plans:
        names = {folders[cell.name] for cell in plan.cells}
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


def text_page(measured: Measured, failures: Sequence[Failure]) -> tuple[str, str]:
    """The page of a table in Markdown, and all its cells as CSV."""
    plan, runs, verdicts = measured.plan, measured.runs, measured.verdicts
    lines = [f"# {plan.name}: {plan.description.title}", "", f"    {plan.command}", ""]
    lines += [f"**{line}**\n" for line in _said([plan], runs, failures, plan.left_out)]
    if verdicts:
        passed, unsure = sum(v.passed for v in verdicts), sum(not v.sure for v in verdicts)
        lines += [
            f"{passed} of {len(verdicts)} judged cells pass; {unsure} of these verdicts are not sure with these seeds.",
            "",
        ]
    for part in plan.description.parts:
        lines += [f"## {part.title}", "", _part_table(part, measured).markdown()]
    for figure in plan.description.figures:
        lines += [f"![{figure.source}]({figure.stem(plan.stem)}.svg)", "", f"{figure.caption} ({figure.source})", ""]
    lines += ["## Notes", "", *(f"- {note}" for note in plan.description.notes)]
    lines += [] if plan.departures else [f"- {RULE}"]
    lines += [
        "- Ours, of test images: mean ± standard deviation over the seeds, and 95 % interval of the mean by Student's"
        f" t; the paper's: {RUNS} runs."
    ]
    lines += [f"- Not finished: {failure.name}: {failure.reason}" for failure in failures]
    provenance = [f"- {line}" for line in _provenance(runs)] or ["No run is finished."]
    lines += ["", "## Runs", "", _runs_table(runs).markdown(), *provenance]
    return "\n".join(lines) + "\n", _long_table(measured).csv()


def cautions(runs: Iterable[FinishedRun]) -> list[str]:
    """What differs in the code and the machines that computed the runs, a sentence each."""
    return [f"caution: {warning}" for warning in code_warnings(run.facts["row"] for run in runs)]


def _said(
    plans: Sequence[Plan], runs: Sequence[FinishedRun], failures: Collection[Failure], left_out: Collection[str]
) -> list[str]:
    """What a reader must know first: what is missing or departs from the protocol, and cautions."""
    wanted, ended = len({cell.name for plan in plans for cell in plan.cells}), len(runs) + len(failures)
    lines = [f"unfinished: {ended} of {wanted} runs have ended so far"] if ended < wanted else []
    lines += [f"without {', '.join(left_out)}"] if left_out else []
    return [f"{line[:1].upper()}{line[1:]}." for line in (*lines, *departure_lines(plans), *cautions(runs))]


def _part_table(part: Part, measured: Measured) -> Table:
    """For each row of the paper: our numbers, their intervals, its numbers, the verdicts."""
    about = f"Numbers beside ours: {part.source}." if part.printed else f"{part.source} has no numbers."
    table = Table(part.title, about, ["", "", *part.columns])
    ranks, their_ranks = measured.ranks(part)
    for row in part.rows:
        entries = [part.at.get((row, column)) for column in part.columns]
        ours = [measured.ours.get(entry) for entry in entries]
        lines: dict[str, list[Cell]] = {
            "ours": [_marked(_spread(s, part.digits), ranks.get(e)) for e, s in zip(entries, ours, strict=True)],
            "95 % interval": [_interval(summary, part.digits) for summary in ours],
            part.theirs: [_marked(_paper(e, part.digits), their_ranks.get(e)) for e in entries] if part.printed else [],
            "verdict": [_verdict(measured, entry) for entry in entries],
        }
        table.rows += [[row, name, *line] for name, line in lines.items() if name == "ours" or any(line)]
    return table


def _marked(cell: Cell, rank: int | None) -> Cell:
    """Bold for the best of a column, italic for the second best."""
    mark = {None: "", 1: "**", 2: "*"}[rank]
    return f"{mark}{cell_text(cell)}{mark}" if mark else cell


def _long_table(measured: Measured) -> Table:
    table = Table("cells", "", spreads=("ours", "paper"), intervals=("interval",))
    for part in measured.plan.description.parts:
        digits = part.digits + 1
        for entry in part.entries:
            ours, paper = measured.ours.get(entry), entry.paper
            table.add(
                {
                    "part": part.title,
                    "source": part.source,
                    "row": entry.row,
                    "column": entry.column,
                    "metric": entry.metric.name,
                    "n": ours.n if ours else 0,
                    "ours": _spread(ours, digits),
                    "interval": _interval(ours, digits),
                    "paper": _paper(entry, part.digits),
                    "difference": Number(ours.mean - paper.mean, digits) if ours and paper else None,
                    "to pass": _to_pass(entry, part.digits),
                    "verdict": _verdict(measured, entry),
                }
            )
    return table


def _spread(summary: Summary | None, digits: int) -> Cell:
    return None if summary is None else Spread(summary.mean, summary.sd if summary.n > 1 else None, digits)


def _interval(summary: Summary | None, digits: int) -> Cell:
    return None if summary is None or summary.n < 2 else Interval(*summary.t_interval, digits)


def _paper(entry: Entry | None, digits: int) -> Cell:
    return Spread(*entry.paper, digits) if entry and entry.paper else None


def _to_pass(entry: Entry | None, digits: int) -> str | None:
    if entry is None or entry.target is None:
        return None
    return f"{'>=' if entry.metric.kind == 'accuracy' else '<='} {entry.target:.{digits}f}"


def _verdict(measured: Measured, entry: Entry | None) -> str | None:
    if entry not in measured.ours:
        return None
    verdict = measured.verdict(entry)
    return str(verdict) if verdict else "not judged" if entry.doubt else None


def _runs_table(runs: Iterable[FinishedRun]) -> Table:
    by_setting: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_setting.setdefault(run.cell.label, []).append(run)
    about = "Settings that differ from the method's preset. Each run's folder is named by these settings and its seed."
    table = Table("runs", about, ["setting", "seeds", "minutes a run"])
    for label, same in by_setting.items():
        minutes = summarise(run.facts["seconds"]["total"] / 60 for run in same)
        table.rows.append([label, ", ".join(str(run.cell.config.seed) for run in same), _spread(minutes, 2)])
    return table


def _provenance(runs: Sequence[FinishedRun]) -> list[str]:
    """Machine, code and precision of the runs; several values where runs differ."""

    def values(value: Callable[[Any], Any]) -> str:
        return ", ".join(dict.fromkeys(as_text(value(run.facts)) for run in runs))

    if not runs:
        return []
    versions = [f"{name} {values(lambda run, n=name: run['versions'][n])}" for name in runs[0].facts["versions"]]
    return [
        f"computed on: {values(place)}",
        f"commit: {values(lambda run: run['commit'])}; native library: {values(lambda run: run['native_backend'])}",
        f"versions: {'; '.join(versions)}",
        f"data: {values(lambda run: run['config']['stream'].get('fingerprint') or 'of runs before fingerprints')}",
        f"precision: {values(lambda run: run['resolved']['precision'])};"
        f" deterministic: {values(lambda run: run['config']['deterministic'])}",
    ]


class Section(NamedTuple):
    """A table of the paper on the HTML page, and its figures as SVG."""

    measured: Measured
    drawings: Sequence[bytes] = ()

    @property
    def title(self) -> str:
        """The title without the paper's labels."""
        return re.sub(r" \([^()]*:[^()]*\)$", "", self.measured.plan.description.title)

    @property
    def pictures(self) -> list[tuple[bytes, int | None, str]]:
        """Content, width on the page in pixels and caption of each figure."""
        found = []
        for figure, svg in zip(self.measured.plan.description.figures, self.drawings, strict=True):
            size = re.search(rb'<svg[^>]*?\bwidth="([\d.]+)pt"', svg)
            found.append((svg, round(float(size[1]) * _SCALE) if size else None, f"{figure.caption} ({figure.source})"))
        return found

    @property
    def parts(self) -> list[tuple[Part, bool, bool]]:
        """Each part, whether it is judged, and whether it is folded: a part that the paper shows as
        a figure, with few or no printed numbers, is a figure here.
        """
        description, verdict = self.measured.plan.description, self.measured.verdict
        drawn = [panel.part for figure in description.figures for panel in figure.panels]
        return [
            (
                part,
                any(map(verdict, part.entries)),
                part in drawn and len(description.parts) > 1 and 2 * part.printed <= len(part.entries),
            )
            for part in description.parts
        ]


def web_page(sections: Sequence[Section], failures: Sequence[Failure] = (), left_out: Collection[str] = ()) -> str:
    """The page of tables and their figures: one HTML file that needs no other."""
    plans = [section.measured.plan for section in sections]
    runs = list({run.cell.name: run for section in sections for run in section.measured.runs}.values())
    chapters: dict[str, list[Section]] = {}
    for section in sections:
        chapters.setdefault(section.measured.plan.description.section, []).append(section)
    return fill(
        "paper.html",
        mark=MARK,
        title="The paper's results and ours",
        heading="MOSE: the paper's tables and figures, computed again",
        sections=sections,
        chapters=chapters,
        said=_said(plans, runs, failures, left_out),
        runs=len(runs),
        their_runs=RUNS,
        seeds=len(plans[0].seeds),
        judged=not departure_lines(plans),
        rule=RULE,
        marks=(Verdict(True, True), Verdict(False, True)),
        provenance=_provenance(runs) or ["No run is finished."],
        failures=[f"{failure.name}: {failure.reason}" for failure in failures],
        version=__version__,
    )
