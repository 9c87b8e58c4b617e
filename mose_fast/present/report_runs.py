"""Reads finished runs from their folders and groups them by everything but the seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mose_fast import evaluate
from mose_fast.learner.named_settings import dotted, telling_apart
from mose_fast.output import readable
from mose_fast.present import published
from mose_fast.runs.files import RunError, check_folders
from mose_fast.runs.store import RunDamaged, find_runs, read_run

__all__ = ["Group", "Run", "Skipped", "View", "group_runs", "read_folders"]

# What data, machine and method's file made of the settings: equal names may stand for different
# data and methods, and precision auto for different precisions.
_RESOLVED = ("tasks", "classes", "image_size", "class_order", "precision", "method_version")
# Shown in columns of their own or implied by the preset.
_SHOWN_APART = ("method", "preset", "memory", "class_order")


class Skipped(NamedTuple):
    """A folder that is left out of the report, and the reason."""

    folder: Path
    reason: str


class View(NamedTuple):
    """A classifier of a run: ``ncm`` or ``linear``, and the expert as results name it."""

    classifier: str
    expert: str

    def __str__(self) -> str:
        kind = "NCM" if self.classifier == "ncm" else "linear"
        return f"{kind}, mean of experts" if self.expert.startswith("mean") else f"{kind}, expert {self.expert}"


class Anytime(NamedTuple):
    """The accuracy at any time of a run, of the classifier of ``predict()``.

    Attributes:
        images: Images that had arrived at each evaluation, int64 [n].
        task_ends: Those at the ends of tasks, int64 [T].
        accuracy: Accuracy at each evaluation, [n].
        average: Mean over all evaluations by view.
    """

    images: NDArray[np.int64]
    task_ends: NDArray[np.int64]
    accuracy: NDArray[np.float64]
    average: Mapping[View, float]


@dataclass(frozen=True)
class Run:
    """The part of ``results.json`` that a report needs. With 100 tasks, the whole file would take a
    hundred times as much memory.

    Attributes:
        row: The run's row of the store (:data:`mose_fast.runs.store.COLUMNS`), without its long
            texts.
        config: Every setting; those that the run's version did not have with their defaults.
        changes: Options that differ from the preset.
        facts: Metrics by classifier and expert, as in ``results.json``.
        final: Accuracy of each task after the last one by view, [T] each.
        running: Mean accuracy over the tasks seen by view, [T] each; without task boundaries,
            accuracy on the classes seen after each of P parts, [P]. NaN where nothing was
            evaluated.
        matrix: Accuracy matrix of ``view``, [T, T]; without task boundaries [P, 1].
        boundaries: Whether the stream had task boundaries; else it is one task.
        bof: Buffer overfitting by view, [T] each; NaN where undefined.
        anytime: The accuracy at any time; None if it was not measured.
        untrained: ACC before training by view.
        confusion: Test images of ``view`` by task and predicted task, int64 [T, T].
    """

    folder: Path
    row: Mapping[str, Any]
    seed: int
    config: Mapping[str, Any]
    changes: Mapping[str, Any]
    facts: Mapping[str, Any]
    view: View
    views: tuple[View, ...]
    final: Mapping[View, NDArray[np.float64]]
    running: Mapping[View, NDArray[np.float64]]
    matrix: NDArray[np.float64]
    boundaries: bool
    bof: Mapping[View, NDArray[np.float64]]
    anytime: Anytime | None
    untrained: Mapping[View, float]
    confusion: NDArray[np.int64]

    @property
    def tasks(self) -> int:
        return self.matrix.shape[1]

    @property
    def stream(self) -> str:
        """Name of the stream, without the path of the user's own data, and its kind."""
        kind = "" if self.row["kind"] == "tasks" else f", {self.row['kind']}"
        return Path(self.row["stream"]).name + kind

    @property
    def complete(self) -> bool:
        """Whether there are tasks, and there was an evaluation after every one."""
        return self.boundaries and self.facts["evaluated_after"] == list(range(self.tasks))

    def metric(self, name: str, view: View) -> float | None:
        """A metric such as ``acc`` of a view, as a fraction; None if the run has none."""
        return self.facts[name][view.classifier].get(view.expert)


@dataclass
class Group:
    """Runs that differ only in their seed.

    Attributes:
        label: Method, its preset if the report has several of it, and the settings in which it
            differs from other groups, without the memory size.
    """

    label: str
    memory: int
    runs: list[Run] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Label and memory size, which are unique to the group."""
        return f"{self.label}, M = {self.memory}"

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def view(self) -> View:
        """Classifier and expert of ``predict()``."""
        return self.runs[0].view

    def shown_views(self) -> list[View]:
        """What tables show of ``predict()``'s classifier: last expert and any mean of experts."""
        shown = (self.last, self.mean, self.view.expert)
        return [v for v in self.runs[0].views if v.classifier == self.view.classifier and v.expert in shown]

    @property
    def experts(self) -> int:
        return sum(v.classifier == "ncm" for v in self.runs[0].views) - 1

    @property
    def last(self) -> str:
        return str(self.experts)

    @property
    def mean(self) -> str | None:
        """Name of the mean of experts; None if there is only one expert."""
        return {"ncm": "mean_distance", "linear": "mean_logit"}[self.view.classifier] if self.experts > 1 else None

    def values(self, name: str, view: View) -> dict[int, float]:
        """A metric by seed, without the runs that lack it."""
        found = {run.seed: run.metric(name, view) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}


def read_folders(folders: Iterable[str | Path]) -> tuple[list[Run], list[Skipped]]:
    """Reads every finished run in or below some folders.

    Returns:
        The runs in the order of their folders' names, and the run folders that cannot be used, each
        with the reason.

    Raises:
        RunError: A folder does not exist, or there is no finished run at all.
    """
    folders = [*map(Path, folders)]
    check_folders(folders)
    found: dict[Path, None] = {}
    for folder in folders:
        found.update(dict.fromkeys(find_runs(folder)))
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for folder in found:
        try:
            runs.append(_read(folder))
        except RunDamaged as error:
            skipped.append(Skipped(folder, str(error).removeprefix(f"{folder}: ")))
    if not runs:
        reasons = "".join(f"; {folder}: {reason}" for folder, reason in skipped[:3])
        raise RunError(f"there is no finished run in {', '.join(map(str, folders))}{reasons}")
    return runs, skipped


def group_runs(runs: Iterable[Run]) -> tuple[list[Group], list[Skipped]]:
    """Groups runs by all settings but the seed.

    Returns:
        The groups ordered by label and memory, and the runs that are left out because another run
        has the same settings and seed.
    """
    settings: dict[str, dict[str, Any]] = {}
    members: dict[str, dict[int, Run]] = {}
    skipped: list[Skipped] = []
    runs = list(runs)
    several = len({run.row["data"] for run in runs} - {None}) > len({run.row["stream"] for run in runs})
    for run in runs:
        # If the data of a stream have changed, which only a forced report shows, runs on different
        # data are kept apart.
        flat = {**_flat(run), "data": run.row["data"]} if several else _flat(run)
        key = json.dumps(flat, sort_keys=True)
        settings[key] = flat
        same = members.setdefault(key, {})
        if run.seed in same:
            skipped.append(
                Skipped(run.folder, f"has the same settings and seed as {same[run.seed].folder}, which is shown")
            )
        else:
            same[run.seed] = run
    labels = _labels({key: (settings[key], next(iter(same.values()))) for key, same in members.items()})
    groups = [
        Group(labels[key], settings[key]["memory"], [same[seed] for seed in sorted(same)])
        for key, same in members.items()
    ]
    return sorted(groups, key=lambda g: (g.label, g.memory)), skipped


_FACTS = ("acc", "af_paper", "af_released", "bwt", "average_anytime_accuracy", "new_task_accuracy", "evaluated_after")


def _read(folder: Path) -> Run:
    row, results = read_run(folder)
    try:
        return _extract(folder, row, results)
    except (LookupError, TypeError, ValueError) as error:
        raise RunDamaged(f"results.json is incomplete ({type(error).__name__}: {error})") from error


def _extract(folder: Path, row: dict[str, Any], results: dict[str, Any]) -> Run:
    tasks, boundaries = len(results["tasks"]), results["evaluation_points"] is None
    evaluated = results["evaluated_after"]
    view = View(results["resolved"]["classifier"], results["resolved"]["expert"])
    final, running, bof = {}, {}, {}
    for classifier, experts in results["accuracy"].items():
        for expert, rows in experts.items():
            matrix = _matrix(rows, tasks, boundaries, f"accuracy of {classifier}, {expert}")
            this = View(classifier, expert)
            final[this] = matrix[-1].copy()
            running[this] = np.full(len(matrix), np.nan)
            running[this][evaluated] = evaluate.running_accuracy(matrix)[evaluated]
            bof[this] = np.array(results["bof"][classifier][expert], np.float64)
            if bof[this].shape != (tasks,):
                raise ValueError(f"bof of {classifier}, {expert} has shape {bof[this].shape}; wanted [{tasks}]")
    confusion = np.array(results["confusion_by_task"])
    if confusion.shape != (tasks, tasks) or confusion.dtype.kind != "i" or (confusion < 0).any():
        raise ValueError(f"confusion_by_task has shape {confusion.shape}; wanted [{tasks}, {tasks}] with counts")
    return Run(
        folder=folder,
        row={name: value for name, value in row.items() if name not in ("metrics", "config")},
        seed=row["seed"],
        config=json.loads(row["config"]),
        changes=results["changes_from_preset"],
        facts={name: results[name] for name in _FACTS},
        view=view,
        views=tuple(final),
        final=final,
        running=running,
        matrix=_matrix(results["accuracy"][view.classifier][view.expert], tasks, boundaries, "accuracy"),
        boundaries=boundaries,
        bof=bof,
        anytime=_anytime(results["anytime"], view),
        untrained={v: results["untrained"]["acc"][v.classifier][v.expert] for v in final},
        confusion=confusion,
    )


def _anytime(curve: dict[str, Any] | None, view: View) -> Anytime | None:
    if curve is None:
        return None
    images = np.array(curve["images_seen"])
    accuracy = np.array(curve["accuracy"][view.classifier][view.expert], np.float64)
    if accuracy.shape != images.shape:
        raise ValueError(f"anytime has {len(accuracy)} accuracies; wanted {len(images)}")
    average = {View(c, e): value for c, experts in curve["average"].items() for e, value in experts.items()}
    return Anytime(images, images[np.array(curve["ends_task"])], accuracy, average)


def _matrix(rows: Any, tasks: int, boundaries: bool, what: str) -> NDArray[np.float64]:
    matrix = np.array(rows, np.float64)
    parts = tasks if boundaries else len(matrix)
    if matrix.shape != (parts, tasks):
        raise ValueError(f"{what} has shape {matrix.shape}; wanted [{parts}, {tasks}]")
    if not ((matrix >= 0) & (matrix <= 1)).all():
        raise ValueError(f"{what} leaves [0, 1]")
    return matrix


def _flat(run: Run) -> dict[str, Any]:
    """All settings that make two runs different experiments, by dotted name."""
    apart = telling_apart(run.config["method"]) - {"stream.tasks"}  # None or a number may be the same
    flat = {name: value for name, value in dotted(run.config).items() if name in apart}
    return flat | {name: run.row[name] for name in _RESOLVED}


def _labels(groups: Mapping[str, tuple[dict[str, Any], Run]]) -> dict[str, str]:
    """By key: method, its preset if it has several, and differing settings."""
    own: dict[str, dict[str, Any]] = {}
    for key, (flat, run) in groups.items():
        plain = {
            name: value for name, value in flat.items() if not name.startswith("options.") and name not in _SHOWN_APART
        }
        own[key] = {**plain, **{f"options.{name}": value for name, value in run.changes.items()}}
    names = sorted({name for values in own.values() for name in values})
    varying = [name for name in names if len({json.dumps(values.get(name, "preset's")) for values in own.values()}) > 1]
    presets = defaultdict(set)
    for flat, _ in groups.values():
        presets[flat["method"]].add(flat["preset"])
    labels = {}
    for key, (flat, _) in groups.items():
        method = published.method_name(flat["method"])
        named = f"{method} {flat['preset']}" if len(presets[flat["method"]]) > 1 else method
        told = [
            f"{name.rpartition('.')[2] if name.startswith('options.') else name}={_plain(own[key][name])}"
            for name in varying
            if name in own[key]
        ]
        labels[key] = readable(", ".join([named, *told]))
    return labels


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    # Of a path, for example to the user's own data, only the last part is shown.
    return Path(value).name if isinstance(value, str) else str(value)
