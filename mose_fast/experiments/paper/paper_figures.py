"""The figures of a table of the paper, for print: our means with 95 % t intervals over the seeds,
and the paper's numbers as faint marks.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.paper.description import Entry, Figure, Panel
from mose_fast.experiments.paper.measured import Measured
from mose_fast.experiments.paper.plan import Plan
from mose_fast.present.drawing import COLOURS, STYLE, curve, files, grid, legend, looks_of
from mose_fast.runs.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

    from mose_fast.present.statistics import Summary

#: Files of a figure, by ending.
KINDS = ("svg", "pdf", "png")

# In inches: one column and both of a page, as conferences have them; the height of a panel with
# curves, and of a bar.
_WIDTHS, _HEIGHT, _BAR = {False: 3.25, True: 6.875}, 1.7, 0.14
_LETTERS, _LINE = 19, 0.12  # letters in an inch of text, inches of a line
# An interval of a bar.
_INTERVAL = {"color": "0.2", "linewidth": 0.8, "marker": "|", "markersize": 3}
#: Matplotlib's settings for :func:`draw`, and for writing what it draws.
PRINT_STYLE = STYLE | {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.titlepad": 4,
    "axes.labelpad": 2.5,
    "axes.linewidth": 0.6,
    "axes.ymargin": 0.08,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.pad": 2.5,
    "ytick.major.pad": 2,
    "legend.fontsize": 7,
    "legend.columnspacing": 1.4,
    "legend.handlelength": 2.6,
    "legend.borderpad": 0.2,
    "legend.borderaxespad": 0.2,
    "savefig.dpi": 300,
}

# The entries that are drawn in a panel, by row and place on the horizontal axis.
_Points = Mapping[str, Mapping[int, Entry]]


def figure_files(plan: Plan, folder: SweepFolder) -> list[Path]:
    """All files that :func:`write_figures` writes."""
    return [_path(plan, folder, figure, kind) for figure in plan.description.figures for kind in KINDS]


def write_figures(measured: Measured, folder: SweepFolder) -> list[bytes]:
    """Draws the figures of a table, each as SVG, PDF and PNG in the folder of the runs; returns the
    SVGs.

    A figure shows what the finished runs have, and says what is missing. The same runs give the
    same files.

    Raises:
        RunError: A file cannot be written.
    """
    plan, found = measured.plan, []
    if not plan.description.figures:
        return found
    # Not at the top: matplotlib takes half a second that other commands need not pay.
    from matplotlib import rc_context

    for figure in plan.description.figures:
        with rc_context(PRINT_STYLE):
            drawn = files(draw(figure, measured), KINDS)
        for kind, content in drawn.items():
            write_atomically(_path(plan, folder, figure, kind), content)
        found.append(drawn["svg"])
    return found


def _path(plan: Plan, folder: SweepFolder, figure: Figure, kind: str) -> Path:
    return folder.path / f"{figure.stem(plan.stem)}.{kind}"


def draw(figure: Figure, measured: Measured) -> Drawing:
    """A figure with one axes for each panel; it says if runs depart from the paper's protocol."""
    ours, panels = measured.ours, [_points(panel) for panel in figure.panels]
    columns, bars = min(figure.columns, len(panels)), any(panel.bars for panel in figure.panels)
    height = _BAR * len(panels[0]) + 0.7 if bars else _HEIGHT
    width = _WIDTHS[figure.wide]
    drawing, axes = grid(len(panels), columns=columns, width=width, height=height, share=False)
    looks = looks_of(row for points in panels for row in points)
    published = [_published(panel, points) for panel, points in zip(figure.panels, panels, strict=True)]
    for i, (axis, points, theirs) in enumerate(zip(axes, panels, published, strict=True)):
        axis.set_title(f"{_letters([i])} {figure.panels[i].title}")
        if bars:
            _bars(axis, points, ours, theirs)
            axis.set_yticks(range(len(points)), list(points) if i % columns == 0 else [])
            axis.set_xlabel(figure.panels[i].values)
            continue
        _share(axes, figure, i)
        axis.set_xlabel(figure.x)
        for row, by_place in points.items():
            summaries = [ours.get(entry) for entry in by_place.values()]
            curve(axis, list(by_place), summaries, looks[row], row, scale=0.8)
            axis.plot([*theirs[row]], [*theirs[row].values()], marker=looks[row].marker, **_faint(looks[row].colour))
        _ticks(axis, sorted({x for by_place in points.values() for x in by_place}), figure.wide)
    drawn = [[entry for by_place in points.values() for entry in by_place.values()] for points in panels]
    for axis, entries in zip(axes, drawn, strict=True):
        if any(entry.metric.kind == "accuracy" for entry in entries):
            # Intervals of few seeds may be wider than all that an accuracy can be.
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, -2), min(high, 102))
    seeds = sorted({ours[entry].n for entries in drawn for entry in entries if entry in ours})
    _explain(axes[-1], seeds, theirs=any(at for theirs in published for at in theirs.values()), bars=bars)
    legend(drawing, axes, columns=6 if figure.wide else 3)
    told = ["Trial runs, not by the paper's protocol"] if measured.plan.departures else []
    told += ["One seed, so no interval"] if seeds == [1] else []
    told += [f"Missing: {gaps}"] if (gaps := _gaps(panels, ours)) else []
    # Lines above the panels, for which the figure grows.
    if lines := textwrap.wrap(". ".join([*told, ""]), round(_LETTERS * width)):
        drawing.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=PRINT_STYLE["font.size"])
        drawing.set_figheight(drawing.get_figheight() + _LINE * (1 + len(lines)))
    return drawing


def _points(panel: Panel) -> _Points:
    if panel.bars:
        places = {panel.bars: 0}
    else:
        places = {column: int(found[0]) for column in panel.part.columns if (found := re.search(r"\d+$", column))}
    at = panel.part.at
    return {row: {x: at[row, column] for column, x in places.items() if (row, column) in at} for row in panel.part.rows}


def _published(panel: Panel, points: _Points) -> dict[str, dict[int, float]]:
    found = {
        row: {x: entry.paper.mean for x, entry in by_place.items() if entry.paper} for row, by_place in points.items()
    }
    for entry in panel.ends.entries if panel.ends else ():
        if entry.column == "average" and entry.paper and entry.row in points:
            found[entry.row][max(points[entry.row])] = entry.paper.mean
    return found


def _share(axes: Sequence[Axes], figure: Figure, i: int) -> None:
    """One scale for panels of the same values, labelled unless the left neighbour has it."""
    shown = [panel.values for panel in figure.panels]
    first = shown.index(shown[i])
    if first < i:
        axes[i].sharey(axes[first])
    if i % figure.columns and shown[i - 1] == shown[i]:
        axes[i].tick_params(labelleft=False)
    else:
        axes[i].set_ylabel(shown[i])


def _bars(
    axis: Axes, points: _Points, ours: Mapping[Entry, Summary], published: Mapping[str, Mapping[int, float]]
) -> None:
    for at, (row, by_place) in enumerate(points.items()):
        if summary := ours.get(by_place[0]):
            # The paper's figure has MOSE in another colour, too.
            colour, mean = COLOURS["green" if row == "MOSE" else "sky"], summary.mean
            axis.barh(at, mean, height=0.7, color=colour)
            ends = [end for end in summary.t_interval if not math.isnan(end)]
            axis.plot(ends, [at] * len(ends), **_INTERVAL)
            text = f"{mean:.{1 if mean >= 1 else 2}f}"
            axis.text(1, at, text, ha="right", va="center", transform=axis.get_yaxis_transform())
        axis.plot(list(published[row].values()), [at] * len(published[row]), marker="o", **_faint("black"))
    axis.set_ylim(len(points) - 0.4, -0.6)
    axis.set_xlim(0, 1.15 * axis.get_xlim()[1])  # with room for the numbers
    axis.grid(axis="y", visible=False)


def _explain(axis: Axes, seeds: Sequence[int], *, theirs: bool, bars: bool) -> None:
    """Names of intervals and of the paper's marks for the legend, by marks without a place."""
    interval = f"95 % interval, n = {seeds[0]}{f' to {seeds[-1]}' if seeds[1:] else ''}" if seeds else ""
    if seeds and seeds[-1] > 1 and bars:
        axis.plot([], [], **_INTERVAL, label=interval)
    elif seeds and seeds[-1] > 1:
        axis.fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label=interval)
    if theirs:
        axis.plot([], [], marker="o", **_faint("black"), label="the paper")


def _faint(colour: str) -> dict[str, Any]:
    line = {"linestyle": "none", "markersize": 4.5, "markeredgewidth": 0.8, "markerfacecolor": "none"}
    return {**line, "markeredgecolor": colour, "alpha": 0.5, "zorder": 1}


def _ticks(axis: Axes, places: Sequence[int], wide: bool) -> None:
    # Ten numbers do not fit below a panel that is half a column wide.
    axis.set_xticks([x for x in places if wide or len(places) <= 8 or x % 2 == 0])
    margin = 0.04 * (places[-1] - places[0])
    axis.set_xlim(places[0] - margin, places[-1] + margin)


def _gaps(panels: Sequence[_Points], ours: Mapping[Entry, Summary]) -> str:
    """Which points have no value, those of equal curves together."""
    missing: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for i, points in enumerate(panels):
        for row, by_place in points.items():
            gap = tuple(x for x, entry in by_place.items() if entry not in ours)
            if gap:
                missing.setdefault((row, () if len(gap) == len(by_place) else gap), []).append(i)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for (row, gap), where in missing.items():
        alike.setdefault((gap, tuple(where)), []).append(row)
    return "; ".join(
        f"{', '.join(rows)} {f'at {_range(gap)} ' if gap else ''}in {_letters(where)}"
        for (gap, where), rows in alike.items()
    )


def _range(values: Sequence[int]) -> str:
    """``3 to 10``, or ``4, 8`` where there are two, or some between are not there."""
    consecutive = len(values) > 2 and values[-1] - values[0] == len(values) - 1
    return f"{values[0]} to {values[-1]}" if consecutive else ", ".join(map(str, values))


def _letters(panels: Sequence[int]) -> str:
    """``(a) to (c)``, or ``(a), (c)`` where some between are not there."""
    return re.sub(r"\d+", lambda found: f"({'abcdefghijkl'[int(found[0])]})", _range(panels))
