"""The page of all tables and figures of the paper: one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mose_fast._version import __version__
from mose_fast.experiments.cells import Failure
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import RULE, Part
from mose_fast.experiments.paper.measured import Measured, ranked
from mose_fast.experiments.paper.measures import Results
from mose_fast.experiments.paper.plan import Plan, departure_lines, state_lines
from mose_fast.experiments.paper.text_page import cautions, provenance
from mose_fast.present.published import RUNS, Published
from mose_fast.present.report_tables import counted
from mose_fast.present.statistics import Summary

__all__ = ["MARK", "Section", "web_page"]

#: What tells a page of this command from any other file.
MARK = '<meta name="generator" content="mose-fast paper all">'

# Drawings are made for print, with letters of 7 points.
_LARGER = 1.5
# Columns above which a table is set narrower.
_MANY = 8

_STYLE = """
body { font: 16px/1.55 Charter, 'Bitstream Charter', Georgia, serif; color: #1a1a1a; background: #fff; }
body { margin: 2rem auto 4rem; max-width: 70rem; padding: 0 1.2rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 0; border-bottom: 1px solid #bbb; }
h3 { font-size: 1.05rem; margin: 2.2rem 0 .3rem; }
p, li { max-width: 46rem; } a { color: #0050a0; }
.contents { columns: 2; column-gap: 2.5rem; padding-left: 1.2rem; } .contents li { break-inside: avoid; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font: .8rem/1.3 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
table { border-top: 2px solid #333; border-bottom: 2px solid #333; margin: .2rem 0 .6rem; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; vertical-align: top; }
thead th { border-bottom: 1px solid #333; white-space: normal; vertical-align: bottom; }
tbody tr + tr > * { border-top: 1px solid #e6e6e6; }
th:first-child { text-align: left; font-weight: normal; position: sticky; left: 0; background: #fff; }
thead th { font-weight: 600; }
.many { font-size: .74rem; } .many th, .many td { padding: .25rem .3rem; }
.sd { color: #555; font-size: .9em; } .paper { display: block; color: #6a6a6a; }
.best { font-weight: 700; } .second { font-style: italic; }
.mark { display: inline-block; width: 1.1em; text-align: left; font-weight: 700; }
.pass { color: #0a7a4b; } .miss { color: #c0392b; } .unsure { opacity: .55; } .none { visibility: hidden; }
figure { margin: .8rem 0; } figcaption { font-size: .9rem; color: #333; max-width: 46rem; }
figure img { display: block; max-width: 100%; height: auto; }
.part { font: 600 .8rem system-ui, sans-serif; margin: .9rem 0 0; }
.box { background: #fff6e0; border-left: 4px solid #e69f00; padding: .5rem 1rem; margin: 1rem 0; max-width: 46rem; }
details { margin: .4rem 0; font-size: .9rem; } summary { cursor: pointer; color: #0050a0; }
.facts li { font-size: .85rem; }
@media screen and (max-width: 700px) {
  body { margin: 1rem auto; padding: 0 .7rem; font-size: 15px; } .contents { columns: 1; }
  th, td { padding: .25rem .5rem; } figure img { max-width: none; }
  th:first-child { white-space: normal; min-width: 4.5rem; border-right: 1px solid #ddd; }
}
@page { size: A4; margin: 14mm; }
@media print {
  body { margin: 0; max-width: none; padding: 0; font-size: 9.5pt; } h2, h3, .part { break-after: avoid; }
  .wide { overflow: visible; } table { font-size: 6.8pt; } th, td { padding: .1rem .25rem; }
  tr, figure { break-inside: avoid; } th:first-child { position: static; }
  .many { font-size: 5.6pt; } .many th, .many td { padding: .1rem .12rem; } .many .mark { width: .9em; }
}
"""


@dataclass(frozen=True)
class Section:
    """A table of the paper on the page.

    Attributes:
        plan: Its runs.
        measured: Our numbers, as :func:`mose_fast.experiments.paper.measured.measure` gives them.
        runs: The runs behind them, likewise.
        pictures: SVG files of its figures, in their order.
    """

    plan: Plan
    measured: Sequence[Mapping[tuple[str, str], Measured]]
    runs: Sequence[tuple[Cell, Results]]
    pictures: Sequence[Path]


def web_page(sections: Sequence[Section], failures: Sequence[Failure], left_out: Collection[str] = ()) -> str:
    """The page.

    Args:
        sections: The tables in the page's order.
        failures: Runs that could not be finished.
        left_out: The data sets that are left out.
    """
    seeds = len(sections[0].plan.seeds)
    departures = departure_lines([section.plan for section in sections])
    runs = list({cell.name: run for section in sections for cell, run in section.runs}.values())
    all_runs = {cell.name for section in sections for cell in section.plan.cells}
    said = state_lines(len(all_runs), len(runs) + len(failures), left_out) + departures + cautions(runs)
    body: list[str] = []
    for title in dict.fromkeys(section.plan.description.section for section in sections):
        body.append(f"<h2>{_text(title)}</h2>")
        body += [_section(section) for section in sections if section.plan.description.section == title]
    unfinished = [f"{failure.name}: {failure.reason}" for failure in failures]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"{MARK}<title>The paper's results and ours</title><style>{_STYLE}</style></head><body>",
            "<h1>MOSE: the paper's tables and figures, computed again</h1>",
            "<p>Our numbers beside those of Yan et al., <i>Orchestrate Latent Expertise</i>, CVPR 2024, on test images:"
            f" {counted(len(runs), 'run')}, {counted(seeds, 'seed')} for each setting. The paper's are means of"
            f" {RUNS} runs. Captions are ours; each names the table or figure of the paper by its LaTeX label.</p>",
            *(f'<p class="box">{html.escape(f"{line[:1].upper()}{line[1:]}.")}</p>' for line in said),
            _legend(judged=not departures, seeds=seeds),
            f'<ul class="contents">{"".join(_line_of_contents(section) for section in sections)}</ul>',
            *body,
            "<h2>Runs</h2>",
            _list([line.removeprefix("- ") for line in provenance(runs)], "facts"),
            *([f"<h3>Not finished</h3>{_list(unfinished, 'facts')}"] if unfinished else []),
            f"<p>mose-fast {__version__}.</p></body></html>\n",
        ]
    )


def _legend(*, judged: bool, seeds: int) -> str:
    spread = "mean ± standard deviation over the seeds" if seeds > 1 else "the value of one seed"
    told = f"In each cell: ours, {spread}, and below it in grey the paper's number; a dash where there is none."
    if not judged:
        return f"<p>{told}</p>"
    marks = f"{_mark('pass')} passes, {_mark('miss')} misses; pale: not sure with these seeds."
    return f"<p>{told} {marks}</p><details><summary>What passes</summary><p>{_text(RULE)}</p></details>"


def _line_of_contents(section: Section) -> str:
    verdicts = [m.verdict for cells in section.measured for m in cells.values() if m.verdict is not None]
    passed, unsure = sum(v.passed for v in verdicts), sum(not v.sure for v in verdicts)
    told = f": {passed} of {len(verdicts)} pass" + (f", {unsure} not sure" if unsure else "") if verdicts else ""
    title = _title(section.plan)
    return f'<li><a href="#{section.plan.name}">{_text(title)}</a>{told}</li>'


def _title(plan: Plan) -> str:
    """The title without the paper's labels."""
    return re.sub(r" \([^()]*:[^()]*\)$", "", plan.description.title)


def _section(section: Section) -> str:
    description = section.plan.description
    labels = ", ".join(dict.fromkeys(part.source for part in description.parts))
    lines = [
        f'<section id="{section.plan.name}"><h3>{_text(_title(section.plan))}</h3>',
        f"<p>{_text(description.caption)} <small>({_text(labels)})</small></p>",
    ]
    pictures = zip(description.figures, section.pictures, strict=True)
    lines += [_picture(path, f"{figure.caption} ({figure.source})") for figure, path in pictures]
    drawn = [panel.part for figure in description.figures for panel in figure.panels]
    shown, folded = [], []
    for part, cells in zip(description.parts, section.measured, strict=True):
        # A part that the paper shows as a figure, with few or no printed numbers, is a figure here,
        # and its tables are folded.
        printed = sum(entry.paper is not None for entry in part.entries)
        few = part in drawn and 2 * printed <= len(part.entries) and len(description.parts) > 1
        (folded if few else shown).append(_table(part, cells))
    lines += shown
    if folded:
        lines.append(f"<details><summary>Numbers of the figures</summary>{''.join(folded)}</details>")
    lines.append(f"<details><summary>Notes</summary>{_list(description.notes)}</details>" if description.notes else "")
    return "\n".join([*lines, "</section>"])


def _picture(path: Path, caption: str) -> str:
    svg = path.read_bytes()
    size = re.search(rb'<svg[^>]*?\bwidth="([\d.]+)pt"', svg)
    width = f' width="{round(float(size[1]) * 4 / 3 * _LARGER)}"' if size else ""
    # As an image of its own, since names inside two SVG drawings on one page would clash.
    data = base64.b64encode(svg).decode()
    return (
        f'<figure><div class="wide" tabindex="0"><img{width} alt="{html.escape(caption)}"'
        f' src="data:image/svg+xml;base64,{data}"></div><figcaption>{_text(caption)}</figcaption></figure>'
    )


def _table(part: Part, measured: Mapping[tuple[str, str], Measured]) -> str:
    ours, theirs = ranked(part, measured)
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in ["", *part.columns])
    judged = any(m.verdict is not None for m in measured.values())
    numbers = any(entry.paper is not None for entry in part.entries)
    rows = []
    for row in part.rows:
        cells = []
        for column in part.columns:
            m = measured.get((row, column))
            text = _number(m.ours if m else None, part.digits, ours.get((row, column)))
            text = (_verdict(m) if judged else "") + text
            if numbers:
                paper = _published(m, part.digits, theirs.get((row, column)))
                text += f'<span class="paper">{paper}</span>'
            cells.append(f"<td>{text}</td>")
        rows.append(f'<tr><th scope="row">{_text(row)}</th>{"".join(cells)}</tr>')
    kind = ' class="many"' if len(part.columns) > _MANY else ""
    return (
        f'<p class="part">{_text(part.title)}</p><div class="wide" tabindex="0"><table{kind}>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _number(ours: Summary | None, digits: int, rank: int | None) -> str:
    if ours is None:
        return "-"
    return _styled(f"{ours.mean:.{digits}f}", rank) + _deviation(ours.sd if ours.n > 1 else None, digits)


def _published(m: Measured | None, digits: int, rank: int | None) -> str:
    paper: Published | None = None if m is None else m.entry.paper
    if paper is None:
        return "-"
    doubt = f'<abbr title="{html.escape(m.entry.doubt)}">?</abbr>' if m.entry.doubt else ""
    return _styled(f"{paper.mean:.{digits}f}", rank) + _deviation(paper.sd, digits) + doubt


def _styled(number: str, rank: int | None) -> str:
    style = {None: "", 1: ' class="best"', 2: ' class="second"'}[rank]
    return f"<span{style}>{number}</span>" if style else number


def _deviation(sd: float | None, digits: int) -> str:
    return "" if sd is None else f'<span class="sd"> ± {sd:.{digits}f}</span>'


def _verdict(m: Measured | None) -> str:
    if m is None or m.verdict is None:
        return _mark("none")
    return _mark("pass" if m.verdict.passed else "miss", "" if m.verdict.sure else " unsure")


def _mark(kind: str, further: str = "") -> str:
    sign = {"pass": "✓", "miss": "✗", "none": "✓"}[kind]
    told = "" if kind == "none" else f' title="{kind}{", not sure" if further else ""}"'
    return f'<span class="mark {kind}{further}"{told}>{sign}</span>'


def _list(items: Sequence[str], kind: str = "") -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{_text(item)}</li>" for item in items)}</ul>'


def _text(text: str) -> str:
    """HTML of a text in which ``M = 1k`` is not broken."""
    return html.escape(text).replace(" = ", "&nbsp;=&nbsp;")
