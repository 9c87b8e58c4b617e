"""The metrics of the paper's tables, read from the ``results.json`` of a setting's runs.

Accuracies and forgetting are in percent. Tasks are counted from 0. Experts are named ``1`` ...,
``last`` and ``mean``; the mean of nearest-class-mean classifiers averages squared distances, that
of linear classifiers logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mose_fast.evaluate import buffer_overfitting

#: Contents of a ``results.json``.
Results = Mapping[str, Any]

# What a run has under a key of its results, of one expert's classifier.
_Of = Callable[[str], Any]


@dataclass(frozen=True)
class Metric:
    """A number of each run of a setting.

    Attributes:
        kind: How it is judged: larger is better, smaller is better, smaller is better and equal for
            all seeds, or not at all.
        of_run: What is read from the results of a run.
        combine: A function from that of all seeds to a value for each; None for a run that does
            not have it. As a rule it is what was read.
    """

    name: str
    kind: Literal["accuracy", "forgetting", "size", "free"]
    of_run: Callable[[Results], Any]
    combine: Callable[[Sequence[Any]], Sequence[float | None]] = list


#: Minutes from start to end, evaluations included.
MINUTES = Metric("minutes", "free", lambda run: run["seconds"]["total"] / 60)

#: Minutes of training steps and of capturing them.
TRAINING_MINUTES = Metric(
    "minutes", "free", lambda run: (run["seconds"]["train"] + run["seconds"].get("capture", 0.0)) / 60
)

#: Millions of parameters in training, and of multiply-accumulates an image there.
PARAMETERS = Metric("million parameters", "size", lambda run: run["parameters"]["trained"] / 1e6)
MACS = Metric("million multiply-accumulates", "size", lambda run: run["macs"]["trained"] / 1e6)


def average_accuracy(classifier: str = "ncm", expert: str = "last") -> Metric:
    """ACC, the mean accuracy over all tasks after the last one."""
    return _of_expert("ACC", "accuracy", classifier, expert, lambda run, of: 100 * of("acc"))


def own_accuracy() -> Metric:
    """ACC of the classifier that ``predict()`` has; it is shown, not judged."""

    def read(run: Results) -> float:
        own = run["resolved"]
        return 100 * run["acc"][own["classifier"]][own["expert"]]

    return Metric("ACC", "free", read)


def forgetting(classifier: str = "ncm", expert: str = "last") -> Metric:
    """AF as the paper defines it."""

    def read(run: Results, of: _Of) -> float | None:
        return None if of("af_paper") is None else 100 * of("af_paper")

    return _of_expert("AF", "forgetting", classifier, expert, read)


def accuracy_after(after: int | None, task: int | None, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Accuracy on a task after another one.

    Args:
        after: The task that was learned last; None: the last of all.
        task: The task tested; None: the mean over the tasks up to ``after``.
    """

    def read(run: Results, of: _Of) -> float | None:
        last = len(run["tasks"]) - 1 if after is None else after
        if last not in run["evaluated_after"] or not _has_task(run, task):
            return None
        row = of("accuracy")[last][: last + 1]
        return 100 * float(np.mean(row) if task is None else row[task])

    what = "accuracy at the end" if after is None else f"accuracy after task {after + 1}"
    return _of_expert(what, "accuracy", classifier, expert, read)


def best_final_accuracy(task: int | None = None) -> Metric:
    """The paper's MAX: accuracy on a task after the last one, of the single expert whose nearest
    class means have the highest mean over the seeds there.

    Args:
        task: The task tested; None: the mean over all tasks, each with its best expert.
    """

    def final(run: Results) -> list[list[float]] | None:
        experts = run["accuracy"]["ncm"].items()
        return [m[-1] for name, m in experts if not name.startswith("mean")] if _has_task(run, task) else None

    def best(runs: Sequence[list[list[float]] | None]) -> list[float | None]:
        if any(run is None for run in runs):
            return [None] * len(runs)
        accuracy = np.array(runs)  # [seeds, experts, tasks]
        expert = accuracy.mean(0).argmax(0)
        chosen = 100 * np.take_along_axis(accuracy, expert[None, None, :], 1)[:, 0]
        return list(map(float, chosen.mean(1) if task is None else chosen[:, task]))

    return Metric("accuracy at the end", "accuracy", final, best)


def new_task_accuracy(task: int | None, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Accuracy on a task just after it was learned; None: the mean over all tasks."""

    def read(run: Results, of: _Of) -> float | None:
        values = of("new_task_accuracy")
        if values is None or not _has_task(run, task):
            return None
        return 100 * float(np.mean(values) if task is None else values[task])

    return _of_expert("accuracy on the new task", "accuracy", classifier, expert, read)


def overfitting_of_old_tasks(after: int | None, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Mean BOF of the tasks before ``after`` when that task has been learned; None: the mean over
    all tasks but the first.

    A task without samples in the memory, or with a test accuracy of 0, has no BOF and is left out.
    """

    def read(run: Results, of: _Of) -> float | None:
        tasks = len(run["tasks"])
        if run["evaluated_after"] != list(range(tasks)) or not _has_task(run, after):
            return None
        stored, test = (np.array(of(key), np.float64) for key in ("buffer_accuracy", "accuracy"))
        times = range(1, tasks) if after is None else [after]
        return _mean([_mean(buffer_overfitting(stored[t, :t], test[t, :t])) for t in times])

    return _of_expert("BOF of old tasks", "free", classifier, expert, read)


def overfitting(classifier: str = "ncm", expert: str = "last") -> Metric:
    """Mean BOF of all tasks after training; tasks without one are left out."""
    return _of_expert("BOF", "free", classifier, expert, lambda run, of: _mean(of("bof")))


def _of_expert(
    name: str, kind: str, classifier: str, expert: str, read: Callable[[Results, _Of], float | None]
) -> Metric:
    """A metric of one expert's classifier, which a network with fewer experts does not have."""

    def of_run(run: Results) -> float | None:
        names = list(run["acc"][classifier])
        found = {"last": str(len(names) - 1), "mean": next(n for n in names if n.startswith("mean"))}.get(
            expert, expert
        )
        return read(run, lambda key: run[key][classifier][found]) if found in names else None

    return Metric(name, kind, of_run)


def _has_task(run: Results, task: int | None) -> bool:
    return task is None or task < len(run["tasks"])


def _mean(values: Sequence[float | None] | NDArray[np.float64]) -> float | None:
    """The mean of the values that are neither None nor NaN; None where all are."""
    values = np.array(values, np.float64)
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
