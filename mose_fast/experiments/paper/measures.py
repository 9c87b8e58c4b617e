"""The metrics of the paper's tables, read from the ``results.json`` of a setting's runs.

Accuracies and forgetting are in percent. Tasks are counted from 0. Experts are named ``1`` ...,
``last`` and ``mean``; the mean of nearest-class-mean classifiers averages squared distances, that
of linear classifiers logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mose_fast.evaluate import buffer_overfitting

__all__ = [
    "KINDS",
    "Metric",
    "Results",
    "accuracy_after",
    "average_accuracy",
    "best_final_accuracy",
    "final_accuracy",
    "forgetting",
    "macs",
    "minutes",
    "new_task_accuracy",
    "overfitting",
    "overfitting_of_old_tasks",
    "parameters",
    "training_minutes",
]

#: Contents of a ``results.json``.
Results = Mapping[str, Any]

#: How a metric is judged: larger is better, smaller is better, smaller is better and equal for all
#: seeds, or not at all.
KINDS = ("accuracy", "forgetting", "size", "free")


@dataclass(frozen=True)
class Metric:
    """A number of each run of a setting.

    Attributes:
        kind: One of :data:`KINDS`.
        of_run: What is read from the results of a run.
        combine: A function from that of all seeds to a value for each; None for a run that does
            not have it. As a rule it is what was read.
    """

    name: str
    kind: str
    of_run: Callable[[Results], Any]
    combine: Callable[[Sequence[Any]], Sequence[float | None]] = list

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; wanted one of {', '.join(KINDS)}")


def average_accuracy(classifier: str = "ncm", expert: str = "last") -> Metric:
    """ACC, the mean accuracy over all tasks after the last one."""
    return _of_view("ACC", "accuracy", classifier, expert, lambda run, name: 100 * run["acc"][classifier][name])


def forgetting(classifier: str = "ncm", expert: str = "last") -> Metric:
    """AF as the paper defines it."""

    def read(run: Results, name: str) -> float | None:
        value = run["af_paper"][classifier][name]
        return None if value is None else 100 * value

    return _of_view("AF", "forgetting", classifier, expert, read)


def final_accuracy(task: int, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Accuracy on a task after the last one."""
    return accuracy_after(-1, task, classifier, expert)


def best_final_accuracy(task: int | None = None, classifier: str = "ncm") -> Metric:
    """The paper's MAX: accuracy on a task after the last one, of the single expert with the highest
    mean over the seeds there.

    Args:
        task: The task tested; None: the mean over all tasks, each with its best expert.
    """

    def final(run: Results) -> NDArray[np.float64] | None:
        if not _has_task(run, task):
            return None
        mean = _mean_of_experts(classifier)
        return np.array([_matrix(run, classifier, e)[-1] for e in run["accuracy"][classifier] if e != mean])

    def best(runs: Sequence[NDArray[np.float64] | None]) -> list[float | None]:
        if any(run is None for run in runs):
            return [None] * len(runs)
        accuracy = np.array(runs)  # [seeds, experts, tasks]
        expert = accuracy.mean(0).argmax(0)
        chosen = 100 * np.take_along_axis(accuracy, expert[None, None, :], 1)[:, 0]
        return list(map(float, chosen.mean(1) if task is None else chosen[:, task]))

    return Metric("accuracy at the end", "accuracy", final, best)


def accuracy_after(after: int, task: int | None, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Accuracy on a task after an earlier one.

    Args:
        after: The task that was learned last; -1: the last of all.
        task: The task tested; None: the mean over the tasks up to ``after``.
    """

    def read(run: Results, name: str) -> float | None:
        last = len(run["tasks"]) - 1 if after == -1 else after
        if last not in run["evaluated_after"] or not _has_task(run, task):
            return None
        row = _matrix(run, classifier, name)[last, : last + 1]
        return 100 * float(row.mean() if task is None else row[task])

    what = "accuracy at the end" if after == -1 else f"accuracy after task {after + 1}"
    return _of_view(what, "accuracy", classifier, expert, read)


def new_task_accuracy(task: int | None, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Accuracy on a task just after it was learned; None: the mean over all tasks."""

    def read(run: Results, name: str) -> float | None:
        values = run["new_task_accuracy"][classifier][name]
        if values is None or not _has_task(run, task):
            return None
        return 100 * float(np.mean(values) if task is None else values[task])

    return _of_view("accuracy on the new task", "accuracy", classifier, expert, read)


def overfitting_of_old_tasks(after: int | None, classifier: str = "ncm", expert: str = "last") -> Metric:
    """Mean BOF of the tasks before ``after`` when that task has been learned; None: the mean over
    all tasks but the first.

    A task without samples in the memory, or with a test accuracy of 0, has no BOF and is left out.
    """

    def read(run: Results, name: str) -> float | None:
        tasks = len(run["tasks"])
        if run["evaluated_after"] != list(range(tasks)) or not _has_task(run, after):
            return None
        stored = np.array(run["buffer_accuracy"][classifier][name], np.float64)
        test = _matrix(run, classifier, name)
        times = range(1, tasks) if after is None else [after]
        found = [_mean(buffer_overfitting(stored[t, :t], test[t, :t])) for t in times]
        return _mean(np.array([np.nan if value is None else value for value in found]))

    return _of_view("BOF of old tasks", "free", classifier, expert, read)


def overfitting(classifier: str = "ncm", expert: str = "last") -> Metric:
    """Mean BOF of all tasks after training; tasks without one are left out."""

    def read(run: Results, name: str) -> float | None:
        return _mean(np.array(run["bof"][classifier][name], np.float64))

    return _of_view("BOF", "free", classifier, expert, read)


def minutes() -> Metric:
    """Minutes from start to end, evaluations included."""
    return Metric("minutes", "free", lambda run: run["seconds"]["total"] / 60)


def training_minutes() -> Metric:
    """Minutes of training steps and of capturing them."""
    return Metric("minutes", "free", lambda run: (run["seconds"]["train"] + run["seconds"].get("capture", 0.0)) / 60)


def parameters() -> Metric:
    """Millions of parameters in training."""
    return Metric("million parameters", "size", lambda run: run["parameters"]["trained"] / 1e6)


def macs() -> Metric:
    """Millions of multiply-accumulates an image in training."""
    return Metric("million multiply-accumulates", "size", lambda run: run["macs"]["trained"] / 1e6)


def _of_view(
    name: str, kind: str, classifier: str, expert: str, read: Callable[[Results, str], float | None]
) -> Metric:
    """A metric of one expert's classifier, which a network with fewer experts does not have."""

    def of_run(run: Results) -> float | None:
        found = _name(run, classifier, expert)
        return read(run, found) if found in run["acc"][classifier] else None

    return Metric(name, kind, of_run)


def _mean_of_experts(classifier: str) -> str:
    # Not at the top: a list of the paper's tables need not wait for torch.
    from mose_fast.nn import MEAN_OF_EXPERTS

    return MEAN_OF_EXPERTS[classifier]


def _name(run: Results, classifier: str, expert: str) -> str:
    """The expert's name in the results."""
    if expert == "mean":
        return _mean_of_experts(classifier)
    return str(len(run["acc"][classifier]) - 1) if expert == "last" else expert


def _matrix(run: Results, classifier: str, name: str) -> NDArray[np.float64]:
    return np.array(run["accuracy"][classifier][name], np.float64)


def _has_task(run: Results, task: int | None) -> bool:
    return task is None or task < len(run["tasks"])


def _mean(values: NDArray[np.float64]) -> float | None:
    """The mean of the values that are not NaN; None where all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
