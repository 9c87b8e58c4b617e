"""Reads finished runs from their folders and groups them by everything but the seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mose_fast import evaluate
from mose_fast.learner.named_settings import dotted, telling_apart
from mose_fast.nn import MEAN_OF_EXPERTS
from mose_fast.output import readable
from mose_fast.present import published
from mose_fast.present.statistics import Summary, summarise
from mose_fast.runs.files import RunError, check_folders
from mose_fast.runs.store import RunDamaged, find_runs, read_run

# What data, machine and method's file made of the settings: equal names may stand for different
# data and methods, and precision auto for different precisions.
_RESOLVED = ("tasks", "classes", "image_size", "class_order", "precision", "method_version")
# Shown in columns of their own or implied by the preset.
_SHOWN_APART = ("method", "preset", "memory", "class_order")
# Metrics of a run, by classifier and expert.
_METRICS = ("acc", "af_paper", "af_released", "average_anytime_accuracy")


class Skipped(NamedTuple):
    """A folder that is left out of the report, and the reason."""

    folder: Path
    reason: str


class View(NamedTuple):
    """A classifier of a run and the expert, as results name them."""

    classifier: str
    expert: str

    def __str__(self) -> str:
        kind = "NCM" if self.classifier == "ncm" else self.classifier.replace("_", " + ")
        if self.expert == "all":
            return f"{kind}, all experts' features"
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
        metrics: Metrics by name, classifier and expert, as in ``results.json``.
        view: The classifier of ``predict()``.
        final: Accuracy of each task after the last one by view, [T] each.
        matrix: Accuracy matrix of ``view``, [T, T]; without task boundaries [P, 1].
        evaluated: Tasks or parts after which there was an evaluation.
        boundaries: Whether the stream had task boundaries; else it is one task.
        bof: Buffer overfitting of ``view``, [T]; NaN where undefined.
        anytime: The accuracy at any time; None if it was not measured.
        untrained: ACC before training by view.
        confusion: Test images of ``view`` by task and predicted task, int64 [T, T].
    """

    folder: Path
    row: Mapping[str, Any]
    config: Mapping[str, Any]
    changes: Mapping[str, Any]
    metrics: Mapping[str, Any]
    view: View
    final: Mapping[View, NDArray[np.float64]]
    matrix: NDArray[np.float64]
    evaluated: NDArray[np.int64]
    boundaries: bool
    bof: NDArray[np.float64]
    anytime: Anytime | None
    untrained: Mapping[View, float]
    confusion: NDArray[np.int64]

    @property
    def seed(self) -> int:
        return self.row["seed"]

    @property
    def tasks(self) -> int:
        return self.matrix.shape[1]

    @property
    def running(self) -> NDArray[np.float64]:
        """Mean accuracy over the tasks seen at each evaluation; without task boundaries, accuracy
        on the classes seen.
        """
        return evaluate.running_accuracy(self.matrix)[self.evaluated]

    @property
    def complete(self) -> bool:
        """Whether there are tasks, and there was an evaluation after every one."""
        return self.boundaries and self.evaluated.tolist() == list(range(self.tasks))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes:
        label: Method, its preset if the report has several of it, and the settings in which it
            differs from other groups, without the memory size.
        runs: By rising seed.
    """

    label: str
    memory: int
    runs: list[Run]

    @property
    def name(self) -> str:
        """Label and memory size, which are unique to the group."""
        return f"{self.label}, M = {self.memory}"

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def first(self) -> Run:
        """Any of the runs, for what all of them share."""
        return self.runs[0]

    @property
    def view(self) -> View:
        """Classifier and expert of ``predict()``."""
        return self.first.view

    @property
    def experts(self) -> int:
        return sum(v.classifier == "ncm" and v.expert.isdigit() for v in self.first.final)

    @property
    def last(self) -> str:
        return str(self.experts)

    @property
    def mean(self) -> str | None:
        """Name of the mean of experts; None if there is only one expert."""
        return MEAN_OF_EXPERTS[self.view.classifier] if self.experts > 1 else None

    @cached_property
    def acc(self) -> Summary:
        """ACC over the seeds, as a fraction, of ``predict()``'s classifier."""
        return summarise(self.values("acc", self.view).values())

    def shown_views(self) -> list[View]:
        """What tables show of ``predict()``'s classifier: last expert and any mean of experts."""
        shown = (self.last, self.mean, self.view.expert)
        return [v for v in self.first.final if v.classifier == self.view.classifier and v.expert in shown]

    def values(self, name: str, view: View) -> dict[int, float]:
        """A metric such as ``acc`` by seed, as a fraction, without the runs that lack it."""
        found = {run.seed: run.metrics[name][view.classifier].get(view.expert) for run in self.runs}
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
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for folder in dict.fromkeys(run for above in folders for run in find_runs(above)):
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
    # If the data of a stream have changed, which only a forced report shows, runs on different data
    # are kept apart.
    several = len({run.row["data"] for run in runs} - {None}) > len({run.row["stream"] for run in runs})
    for run in runs:
        # All settings that make two runs different experiments, by dotted name; None or a number of
        # tasks may be the same.
        apart = telling_apart(run.config["method"]) - {"stream.tasks"}
        flat = {name: value for name, value in dotted(run.config).items() if name in apart}
        flat |= {name: run.row[name] for name in (*_RESOLVED, *(["data"] if several else []))}
        key = json.dumps(flat, sort_keys=True)
        settings[key] = flat
        first = members.setdefault(key, {}).setdefault(run.seed, run)
        if first is not run:
            skipped.append(Skipped(run.folder, f"has the same settings and seed as {first.folder}, which is shown"))
    labels = _labels({key: (settings[key], next(iter(same.values()))) for key, same in members.items()})
    groups = [
        Group(labels[key], settings[key]["memory"], [same[seed] for seed in sorted(same)])
        for key, same in members.items()
    ]
    return sorted(groups, key=lambda g: (g.label, g.memory)), skipped


def _read(folder: Path) -> Run:
    row, results = read_run(folder)
    try:
        return _extract(folder, row, results)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise RunDamaged(f"results.json is incomplete ({type(error).__name__}: {error})") from error


def _extract(folder: Path, row: dict[str, Any], results: dict[str, Any]) -> Run:
    tasks = len(results["tasks"])
    view = View(results["resolved"]["classifier"], results["resolved"]["expert"])
    final = {View(c, e): np.array(m[-1]) for c, experts in results["accuracy"].items() for e, m in experts.items()}
    anytime = None
    if curve := results["anytime"]:
        images = np.array(curve["images_seen"])
        accuracy = np.array(curve["accuracy"][view.classifier][view.expert], np.float64).reshape(images.shape)
        average = {View(c, e): value for c, experts in curve["average"].items() for e, value in experts.items()}
        anytime = Anytime(images, images[np.array(curve["ends_task"])], accuracy, average)
    return Run(
        folder=folder,
        row={name: value for name, value in row.items() if name not in ("metrics", "config")},
        config=json.loads(row["config"]),
        changes=results["changes_from_preset"],
        metrics={name: results[name] for name in _METRICS},
        view=view,
        final=final,
        matrix=np.array(results["accuracy"][view.classifier][view.expert], np.float64).reshape(-1, tasks),
        evaluated=np.array(results["evaluated_after"]),
        boundaries=results["evaluation_points"] is None,
        bof=np.array(results["bof"][view.classifier][view.expert], np.float64).reshape(tasks),
        anytime=anytime,
        untrained={v: results["untrained"]["acc"][v.classifier][v.expert] for v in final},
        confusion=np.array(results["confusion_by_task"], np.int64).reshape(tasks, tasks),
    )


def _labels(groups: Mapping[str, tuple[dict[str, Any], Run]]) -> dict[str, str]:
    """By key: method, its preset if it has several, and differing settings."""
    own: dict[str, dict[str, Any]] = {}
    presets = defaultdict(set)
    for key, (flat, run) in groups.items():
        presets[flat["method"]].add(flat["preset"])
        own[key] = {
            name: value for name, value in flat.items() if not name.startswith("options.") and name not in _SHOWN_APART
        } | {f"options.{name}": value for name, value in run.changes.items()}
    names = sorted({name for values in own.values() for name in values})
    varying = [name for name in names if len({json.dumps(values.get(name, "preset's")) for values in own.values()}) > 1]
    labels = {}
    for key, (flat, _) in groups.items():
        method = published.method_name(flat["method"])
        named = f"{method} {flat['preset']}" if len(presets[flat["method"]]) > 1 else method
        told = [f"{n.removeprefix('options.')}={_plain(own[key][n])}" for n in varying if n in own[key]]
        labels[key] = readable(", ".join([named, *told]))
    return labels


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    # Of a path, for example to the user's own data, only the last part is shown.
    return Path(value).name if isinstance(value, str) else str(value)
