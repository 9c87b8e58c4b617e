"""How figures are drawn: colours and markers, curves with their intervals, legends, files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mose_fast.present.statistics import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe-Ito: told apart by colour-blind readers; markers and dashes tell the curves apart in print.
COLOURS = {
    "blue": "#0072B2",
    "red": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
    "grey": "#999999",
}
_MARKERS = "osD^vP*X"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (5, 5)))

#: Matplotlib's settings for every figure.
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.fonttype": "path",
    # Equal inputs give equal files.
    "svg.hashsalt": "mose-fast",
    "pdf.fonttype": 42,
}

# What a file would say of the day and of the program that wrote it.
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}


class Look(NamedTuple):
    """How a curve looks."""

    colour: str
    marker: str
    dashes: Any


def looks_of(labels: Iterable[str]) -> dict[str, Look]:
    """A look for each label, in their order."""
    colours, n = list(COLOURS.values()), len(COLOURS)
    # Beyond eight labels colours repeat, but with other markers and dashes.
    return {
        label: Look(colours[i % n], _MARKERS[(i + i // n) % n], _DASHES[(i + i // n) % n])
        for i, label in enumerate(dict.fromkeys(labels))
    }


def grid(
    panels: int,
    *,
    columns: int | None = None,
    width: float | None = None,
    height: float = 3.2,
    share: bool | Literal["row"] = True,
) -> tuple[Figure, list[Axes]]:
    """A figure with ``panels`` axes.

    Args:
        width: Width of the figure in inches; None: by the number of columns.
    """
    # Not at the top: matplotlib takes half a second that other commands need not pay.
    from matplotlib.figure import Figure

    columns = columns or min(3, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(width or {1: 6.0, 2: 9.0, 3: 11.5}[columns], height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=share, squeeze=False).ravel().tolist()
    for axis in axes[panels:]:
        axis.set_axis_off()
    return figure, axes[:panels]


def curve(
    axis: Axes, x: Sequence[float], summaries: Sequence[Summary | None], look: Look, label: str, *, scale: float = 1.0
) -> None:
    """Means against ``x`` with their 95 % t intervals as a band, or as a line where a point has one
    and its neighbours do not.

    Args:
        summaries: The statistics at each of them; None where there is no value.
    """
    known = [(at, summary) for at, summary in zip(x, summaries, strict=True) if summary is not None]
    at, means = [at for at, _ in known], [summary.mean for _, summary in known]
    low, high = np.array([summary.t_interval for _, summary in known]).reshape(-1, 2).T
    line = {"linestyle": look.dashes, "linewidth": 1.5 * scale, "markersize": 4 * scale}
    axis.plot(at, means, color=look.colour, label=label, marker=look.marker if len(at) <= 25 else None, **line)
    if np.isnan(low).all():
        return
    axis.fill_between(at, low, high, color=look.colour, alpha=0.15, linewidth=0)
    there = np.pad(~np.isnan(low), 1)
    lone = np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])
    if len(lone):
        axis.vlines(np.array(at)[lone], low[lone], high[lone], color=look.colour, alpha=0.5, linewidth=scale)


def legend(figure: Figure, axes: Sequence[Axes], columns: int = 3) -> None:
    """One legend for all panels, below them."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    # Chance last.
    order = sorted(handles, key=lambda label: label == "chance")
    figure.legend(
        [handles[label] for label in order], order, loc="outside lower center", ncols=min(columns, len(order))
    )


def files(figure: Figure, kinds: Iterable[str]) -> dict[str, bytes]:
    """A figure as ``svg``, ``pdf`` or ``png``; the same bytes for the same figure."""
    # Laid out once for all its files: this takes longer than drawing.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    found = {}
    for kind in kinds:
        written = io.BytesIO()
        figure.savefig(written, format=kind, metadata=_METADATA[kind])
        found[kind] = written.getvalue()
    return found
