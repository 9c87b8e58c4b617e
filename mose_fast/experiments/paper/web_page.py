"""The page of tables and figures of the paper: one HTML file that needs no other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mose_fast._version import __version__
from mose_fast.experiments.cells import Failure
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import RULE, Part, Verdict
from mose_fast.experiments.paper.measured import Measured, ranked
from mose_fast.experiments.paper.measures import Results
from mose_fast.experiments.paper.plan import Plan, departure_lines, state_lines
from mose_fast.experiments.paper.text_page import cautions, provenance
from mose_fast.present.page import fill
from mose_fast.present.published import RUNS

__all__ = ["MARK", "Section", "web_page"]

#: What tells a page of this command from any other file, in its head.
MARK = ("generator", "mose-fast paper")

# Drawings are made for print, with letters of 7 points.
_LARGER = 1.5


@dataclass(frozen=True)
class Section:
    """A table of the paper on the page.

    Attributes:
        measured: Our numbers, as :func:`mose_fast.experiments.paper.measured.measure` gives them.
        runs: The runs behind them, likewise.
        pictures: SVG files of its figures, in their order.
    """

    plan: Plan
    measured: Sequence[Mapping[tuple[str, str], Measured]]
    runs: Sequence[tuple[Cell, Results]]
    pictures: Sequence[Path]

    @property
    def title(self) -> str:
        """The title without the paper's labels."""
        return re.sub(r" \([^()]*:[^()]*\)$", "", self.plan.description.title)

    @property
    def verdicts(self) -> list[Verdict]:
        return [m.verdict for cells in self.measured for m in cells.values() if m.verdict is not None]

    def drawings(self) -> list[tuple[bytes, int | None, str]]:
        """Content, width on the page in pixels and caption of each figure."""
        found = []
        for figure, path in zip(self.plan.description.figures, self.pictures, strict=True):
            svg = path.read_bytes()
            size = re.search(rb'<svg[^>]*?\bwidth="([\d.]+)pt"', svg)
            width = round(float(size[1]) * 4 / 3 * _LARGER) if size else None
            found.append((svg, width, f"{figure.caption} ({figure.source})"))
        return found

    def tables(self) -> list[dict[str, Any]]:
        """What the template shows of each part."""
        description = self.plan.description
        drawn = [panel.part for figure in description.figures for panel in figure.panels]
        return [
            _shown(part, cells, drawn=part in drawn and len(description.parts) > 1)
            for part, cells in zip(description.parts, self.measured, strict=True)
        ]


def _shown(part: Part, cells: Mapping[tuple[str, str], Measured], *, drawn: bool) -> dict[str, Any]:
    ours, theirs = ranked(part, cells)
    printed = sum(entry.paper is not None for entry in part.entries)
    return {
        "part": part,
        "cells": cells,
        "judged": any(m.verdict is not None for m in cells.values()),
        "printed": printed,
        "ranks": (ours, theirs),
        # A part that the paper shows as a figure, with few or no printed numbers, is a figure here,
        # and its tables are folded.
        "folded": drawn and 2 * printed <= len(part.entries),
    }


def web_page(sections: Sequence[Section], failures: Sequence[Failure], left_out: Collection[str] = ()) -> str:
    """The page."""
    departures = departure_lines([section.plan for section in sections])
    runs = list({cell.name: run for section in sections for cell, run in section.runs}.values())
    all_runs = {cell.name for section in sections for cell in section.plan.cells}
    said = state_lines(len(all_runs), len(runs) + len(failures), left_out) + departures + cautions(runs)
    chapters: dict[str, list[Section]] = {}
    for section in sections:
        chapters.setdefault(section.plan.description.section, []).append(section)
    return fill(
        "paper.html",
        mark=MARK,
        title="The paper's results and ours",
        heading="MOSE: the paper's tables and figures, computed again",
        sections=sections,
        chapters=chapters,
        said=[f"{line[:1].upper()}{line[1:]}." for line in said],
        runs=len(runs),
        their_runs=RUNS,
        seeds=len(sections[0].plan.seeds),
        judged=not departures,
        rule=RULE,
        marks=(Verdict(True, True), Verdict(False, True)),
        provenance=[line.removeprefix("- ") for line in provenance(runs)],
        failures=[f"{failure.name}: {failure.reason}" for failure in failures],
        version=__version__,
    )
