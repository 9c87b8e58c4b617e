"""The figures of a report: accuracies in percent, with 95 % t intervals over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mose_fast.present.drawing import COLOURS, STYLE, Look, curve, files, grid, legend, looks_of
from mose_fast.present.report_runs import Group
from mose_fast.present.report_tables import images, part_name, seeds
from mose_fast.present.statistics import summarise
from mose_fast.present.table import counted
from mose_fast.runs.figure import lettering

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Curves in a panel, panels in a figure, and bars in one, at most: beyond, the settings with the
#: highest ACC are shown.
CURVES, PANELS, BARS = 8, 12, 24

_PHASES = {
    "train": (COLOURS["blue"], ""),
    "capture": (COLOURS["sky"], "\\\\"),
    "evaluate": (COLOURS["orange"], "//"),
    "checkpoint": (COLOURS["grey"], ".."),
    "other": (COLOURS["purple"], "xx"),
}


class Picture(NamedTuple):
    """A figure."""

    name: str
    title: str
    caption: str
    svg: bytes
    pdf: bytes


def figures(groups: Sequence[Group]) -> list[Picture]:
    """Every figure that the runs have data for, in the order of the page."""
    # Not at the top: matplotlib takes half a second that other commands need not pay.
    from matplotlib import rc_context

    looks = looks_of(g.label for g in groups)
    with rc_context(STYLE), lettering(g.name for g in groups):
        made = [
            draw(groups, looks)
            for draw in (_curves, _anytime, _new_and_overfitted, _tradeoffs, _matrices, _confusions, _times)
        ]
        return [picture for picture in made if picture is not None]


def _curves(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture | None:
    panels, left_out = _by_memory([g for g in groups if len(g.first.evaluated) > 1])
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for axis, (memory, shown) in zip(axes, panels.items(), strict=True):
        for g in shown:
            _band(axis, g.first.evaluated + 1, 100 * np.array([run.running for run in g.runs]), looks[g.label], g.label)
        classes = {tuple(run.row[k] for k in ("classes", "tasks")) for g in shown for run in g.runs}
        if len(classes) == 1 and part_name(shown) == "task":
            ((total, tasks),) = classes
            seen = np.arange(1, tasks + 1)
            axis.plot(seen, 100 * tasks / (total * seen), color="0.5", linewidth=1, linestyle=":", label="chance")
        axis.set(title=f"M = {memory}", xlabel=f"{part_name(shown)}s seen", ylim=(0, 100))
        _whole_ticks(axis, max(len(run.matrix) for g in shown for run in g.runs))
    part = part_name(g for shown in panels.values() for g in shown)
    _label_left(axes, f"accuracy on the {'tasks' if part == 'task' else 'classes'} seen (%)")
    legend(figure, axes)
    what, dotted, title = (
        "Mean accuracy over the tasks seen so far, after each task",
        " Dotted: chance, where all tasks have as many classes.",
        "Accuracy against task",
    )
    if part == "part":
        what = "Accuracy on the classes seen so far, after each part of the stream, which has no task boundaries"
        dotted, title = "", "Accuracy over the stream"
    bands = f"{_band_text(groups)}{dotted}{left_out}"
    caption = f"{what}, by the classifier of predict(), one panel for each memory size. {bands}"
    return _picture("accuracy", title, caption, figure)


def _anytime(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture | None:
    # Runs of a group that were evaluated at other times are not averaged.
    together = [
        g
        for g in groups
        if g.first.anytime and len({tuple(run.anytime.images) if run.anytime else None for run in g.runs}) == 1
    ]
    panels, left_out = _by_memory(together)
    if not panels:
        return None
    figure, axes = grid(len(panels))
    for axis, (memory, shown) in zip(axes, panels.items(), strict=True):
        for end in {int(at) for g in shown for at in g.first.anytime.task_ends}:
            axis.axvline(end, color="0.8", linewidth=0.8, zorder=0)
        for g in shown:
            curves = 100 * np.array([run.anytime.accuracy for run in g.runs])
            _band(axis, g.first.anytime.images, curves, looks[g.label], g.label)
        axis.set(title=f"M = {memory}", xlabel="images seen", ylim=(0, 100))
        axis.grid(axis="x", visible=False)
    _label_left(axes, "accuracy on the classes seen (%)")
    legend(figure, axes)
    sizes = sorted({run.config["anytime_images"] for g in together for run in g.runs})
    caption = (
        f"Accuracy at any time: on {' or '.join(map(str, sizes))} fixed {images(together)} images of the classes seen"
        " so far, by the classifier of predict(), against the images that have arrived; vertical lines are ends of"
        f" {part_name(together)}s. There, class means are of the whole memory; between them, of a few stored"
        f" images of each class. {_band_text(together)}{left_out}"
    )
    return _picture("anytime", "Accuracy at any time", caption, figure)


def _new_and_overfitted(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture | None:
    panels, left_out = _by_memory([g for g in groups if g.first.tasks > 1])
    if not panels:
        return None
    figure, axes = grid(2 * len(panels), columns=2, share=False)
    for (memory, shown), new, bof in zip(panels.items(), axes[::2], axes[1::2], strict=True):
        for g in shown:
            tasks = np.arange(1, g.first.tasks + 1)
            if all(run.complete for run in g.runs):
                _band(new, tasks, 100 * np.array([np.diagonal(run.matrix) for run in g.runs]), looks[g.label], g.label)
            _band(bof, tasks, np.array([run.bof for run in g.runs]), looks[g.label], g.label)
        for axis in (new, bof):
            _whole_ticks(axis, max(run.tasks for g in shown for run in g.runs))
        new.set(title=f"new task, M = {memory}", xlabel="task", ylabel="accuracy just after it (%)", ylim=(0, 100))
        bof.set(title=f"buffer overfitting, M = {memory}", xlabel="task", ylabel="BOF after the last task")
    legend(figure, axes)
    caption = (
        "Left: accuracy on each task just after it was learned (plasticity). Right: buffer overfitting of each task"
        " after the last one, (accuracy on its samples in the memory - accuracy on its"
        f" {images(groups)} images) / the latter; a task without samples, or with an accuracy of 0, has none."
        f" Classifier of predict(). {_band_text(groups)}{left_out}"
    )
    return _picture("new-task-and-bof", "New tasks and buffer overfitting", caption, figure)


def _tradeoffs(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture:
    from matplotlib.transforms import ScaledTranslation

    on_gpu = all(run.row["peak_bytes_device"] is not None for g in groups for run in g.runs)
    seconds = [_mean_of(g, "seconds_total") for g in groups]
    peaks = [_mean_of(g, "peak_bytes_device" if on_gpu else "peak_bytes", 2**20) for g in groups]
    acc = [100 * g.acc.mean for g in groups]
    ends = 100 * np.array([g.acc.t_interval for g in groups])
    sizes, labels = sorted({g.memory for g in groups}), list(looks)
    figure, axes = grid(3, columns=3)
    for x, axis in ((seconds, axes[0]), (peaks, axes[1]), ([float(g.memory) for g in groups], axes[2])):
        for g, at, y, (low, high) in zip(groups, x, acc, ends, strict=True):
            look = looks[g.label]
            # Side by side where all settings share few memory sizes.
            aside = 0.0
            if axis is axes[2] and len(labels) <= CURVES:
                aside = 5 * (labels.index(g.label) - (len(labels) - 1) / 2)
            place = axis.transData + ScaledTranslation(aside / 72, 0, figure.dpi_scale_trans)
            axis.plot([at, at], [low, high], color=look.colour, linewidth=1, alpha=0.5, transform=place)
            size = 6.0 if axis is axes[2] else 4 + 5 * sizes.index(g.memory) / max(1, len(sizes) - 1)
            axis.plot([at], [y], look.marker, color=look.colour, markersize=size, transform=place)
        # By hand, since points that are moved aside do not count for matplotlib's limits.
        margin = 0.06 * (max(x) - min(x)) or 0.06 * max(x) or 1.0
        axis.set_xlim(min(x) - margin, max(x) + margin)
        low, high = np.nanmin([*ends[:, 0], *acc]), np.nanmax([*ends[:, 1], *acc])
        axis.set_ylim(max(0.0, low - 2), min(100.0, high + 2))
        axis.locator_params(axis="x", nbins=6)
        if axis is not axes[2]:
            front = _front(x, acc)
            axis.step([x[i] for i in front], [acc[i] for i in front], where="post", color="0.5", linewidth=1, zorder=0)
    for label, look in looks.items():
        at = sorted((g.memory, y) for g, y in zip(groups, acc, strict=True) if g.label == label)
        told = label if len(looks) <= CURVES else None
        axes[2].plot([m for m, _ in at], [y for _, y in at], color=look.colour, linestyle=look.dashes, linewidth=1)
        axes[2].plot([], [], look.marker, color=look.colour, linestyle=look.dashes, linewidth=1, label=told)
    axes[0].set(title="time", xlabel="seconds a run")
    axes[1].set(title="memory of the machine", xlabel=f"peak MiB {'on the GPU' if on_gpu else 'of the process'}")
    axes[2].set(title="replay memory", xlabel="M (images)")
    if max(sizes) > 4 * min(sizes):
        axes[2].set_xscale("log")
        axes[2].set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
    if len(sizes) <= 6:
        axes[2].set_xticks(sizes, [str(m) for m in sizes])
        axes[2].minorticks_off()
    if len(looks) <= CURVES:
        figure.legend(loc="outside lower center", ncols=min(4, len(looks)))
    _label_left(axes, "ACC (%)")
    machines = {run.row["gpu"] or run.row["processor"] for g in groups for run in g.runs}
    caption = (
        f"ACC (classifier of predict()) against what a run costs: {counted(len(groups), 'setting')}, means over n ="
        f" {seeds(groups)}; vertical lines are 95 % t intervals, larger markers larger replay memories. The grey steps"
        " join the settings that no other beats at lower cost (Pareto front). Computed on"
        f" {', '.join(sorted(machines))}{'' if len(machines) == 1 else '; do not compare times of different machines'}."
    )
    return _picture("tradeoffs", "Accuracy against cost", caption, figure)


def _matrices(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture | None:
    complete = [g for g in groups if all(run.complete for run in g.runs) and g.first.tasks > 1]
    shown, left_out = _best(complete, PANELS)
    if not shown:
        return None
    parts = [(g, 100 * np.mean([run.matrix for run in g.runs], axis=0)) for g in shown]
    figure = _maps(parts, "after task", "accuracy (%)", triangle=True)
    caption = (
        "Accuracy matrix by the classifier of predict(): row k holds the accuracy on each task after learning task k,"
        f" mean over n seeds. The diagonal shows new tasks; fading down a column is forgetting.{left_out}"
    )
    return _picture("accuracy-matrix", "Accuracy matrix", caption, figure)


def _confusions(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture | None:
    shown, left_out = _best([g for g in groups if g.first.tasks > 1], PANELS)
    if not shown:
        return None
    parts = []
    for g in shown:
        counts = np.sum([run.confusion for run in g.runs], axis=0).astype(np.float64)
        parts.append((g, 100 * counts / counts.sum(1, keepdims=True)))
    figure = _maps(
        parts, "task", f"share of the task's {images(groups)} images (%)", across="task of the predicted class"
    )
    caption = (
        "Confusion by task after the last one, classifier of predict(): of the images of each task (row), the"
        " share whose predicted class belongs to each task (column), counted over all n seeds. Mass in the last"
        f" columns is a bias to recent tasks; the diagonal bounds the accuracy.{left_out}"
    )
    return _picture("confusion", "Confusion by task", caption, figure)


def _times(groups: Sequence[Group], looks: Mapping[str, Look]) -> Picture:
    shown, left_out = _best(groups, BARS)
    figure, (axis,) = grid(1, width=7.5, height=0.9 + 0.32 * len(shown))
    rows = range(len(shown))
    left = np.zeros(len(shown))
    for phase, (colour, hatch) in _PHASES.items():
        seconds = np.array([_mean_of(g, f"seconds_{phase}") for g in shown])
        axis.barh(rows, seconds, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=phase)
        left += seconds
    axis.set_yticks(rows, [f"{g.name} (n = {g.n})" for g in shown])
    axis.invert_yaxis()
    axis.set(xlabel="seconds a run, mean")
    axis.grid(axis="y", visible=False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    caption = (
        f"Wall-clock seconds of a run by phase, mean over {seeds(groups)}: training steps, capturing them as graphs,"
        " evaluations, writing checkpoints, and what is in no phase: imports, data, listeners,"
        f" files.{left_out}"
    )
    return _picture("time", "Where the time goes", caption, figure)


def _maps(
    parts: Sequence[tuple[Group, NDArray[np.float64]]],
    down: str,
    unit: str,
    *,
    across: str = "task",
    triangle: bool = False,
) -> Figure:
    """Heat maps of [T, T] values in percent on one scale; ``triangle``: none above the diagonal."""
    columns = min(4, len(parts))
    figure, axes = grid(len(parts), columns=columns, width=2.7 * columns + 0.6, height=3.0, share=False)
    # One scale for all panels, and one hue from light to dark, for print and for colour-blind
    # readers.
    top = max(float(values.max()) for _, values in parts) or 1.0
    picture = None
    for axis, (g, values) in zip(axes, parts, strict=True):
        tasks = len(values)
        drawn = np.ma.masked_where(np.triu(np.ones_like(values), 1) > 0, values) if triangle else values
        picture = axis.imshow(drawn, cmap="Blues", vmin=0, vmax=top, interpolation="nearest")
        axis.grid(visible=False)
        axis.set_title(f"{g.label}\nM = {g.memory}, n = {g.n}", fontsize=8)
        axis.set(xlabel=across, ylabel=down)
        step = 1 if tasks <= 10 else math.ceil(tasks / 5)
        ticks = range(0, tasks, step)
        axis.set_xticks(ticks, [str(t + 1) for t in ticks])
        axis.set_yticks(ticks, [str(t + 1) for t in ticks])
        if tasks <= 10:
            for row, column in zip(*np.nonzero(np.tri(tasks) if triangle else np.ones((tasks, tasks))), strict=True):
                value = values[row, column]
                size, colour = 7 if tasks <= 6 else 5.5, "white" if value > 0.6 * top else "black"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=size, color=colour)
    figure.colorbar(picture, ax=axes, label=unit, shrink=0.8 if len(parts) <= columns else 0.5)
    return figure


def _band(axis: Axes, x: NDArray[np.int64], values: NDArray[np.float64], look: Look, label: str) -> None:
    """The mean of [n, T] values over n with its interval; NaN is left out."""
    if np.isnan(values).all():
        return
    columns = [column[~np.isnan(column)] for column in values.T]
    curve(axis, x, [summarise(column) if len(column) else None for column in columns], look, label)


def _mean_of(g: Group, column: str, unit: int = 1) -> float:
    """The mean of a column of the store over the runs that have it; 0 where none has."""
    found = [run.row[column] / unit for run in g.runs if run.row[column] is not None]
    return summarise(found or [0.0]).mean


def _by_memory(groups: Sequence[Group]) -> tuple[dict[int, list[Group]], str]:
    """Groups by memory, the best of each, and a sentence about those left out."""
    sizes = sorted({g.memory for g in groups})[:PANELS]
    panels = {memory: _ranked([g for g in groups if g.memory == memory], CURVES) for memory in sizes}
    rule = f"up to {CURVES} settings a panel, those with the highest ACC, and up to {PANELS} memory sizes"
    return panels, _left_out(len(groups) - sum(map(len, panels.values())), rule)


def _best(groups: Sequence[Group], most: int) -> tuple[list[Group], str]:
    shown = _ranked(groups, most)
    return shown, _left_out(len(groups) - len(shown), f"the {most} settings with the highest ACC")


def _ranked(groups: Sequence[Group], most: int) -> list[Group]:
    """The ``most`` groups with the highest ACC, in their own order."""
    kept = sorted(range(len(groups)), key=lambda i: -groups[i].acc.mean)[:most]
    return [groups[i] for i in sorted(kept)]


def _left_out(number: int, rule: str) -> str:
    return f" Shown are {rule}; {counted(number, 'setting')} more in the tables." if number else ""


def _front(cost: Sequence[float], gain: Sequence[float]) -> list[int]:
    """Indices of the points that no other beats in both, by rising cost."""
    front: list[int] = []
    for i in sorted(range(len(cost)), key=lambda i: (cost[i], -gain[i])):
        if not front or gain[i] > gain[front[-1]]:
            front.append(i)
    return front


def _band_text(groups: Sequence[Group]) -> str:
    if max(g.n for g in groups) == 1:
        return "One seed each (n = 1), so no interval."
    return f"Lines are means over n = {seeds(groups)}, bands their 95 % t intervals."


def _whole_ticks(axis: Axes, tasks: int) -> None:
    if tasks <= 20:
        axis.set_xticks(range(1, tasks + 1))


def _label_left(axes: Sequence[Axes], text: str) -> None:
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(text)


def _picture(name: str, title: str, caption: str, figure: Figure) -> Picture:
    return Picture(name, title, caption, **files(figure, ("svg", "pdf")))
