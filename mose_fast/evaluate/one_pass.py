"""Evaluates every classifier of every expert in one pass over the memory and the images that a
stream is evaluated on: its test images, or those held out for validation."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.methods import Learner
from mose_fast.nn import classify
from mose_fast.streams import Stream

# int64 [n], by classifier and expert.
Predictions = dict[str, dict[str, Tensor]]


class TaskAccuracy(NamedTuple):
    """Accuracies in [0, 1] by classifier and expert, a list over the tasks seen so far, and
    confusion counts. A stream without task boundaries is one task, of which the classes seen count.

    Attributes:
        test: Accuracy on each task's images that the stream is evaluated on.
        buffer: Accuracy on each task's memory samples; None for a task that has none.
        confusion: For the classifier and expert of ``predict()``, a row for each task seen so far:
            how many of these images were predicted as a class of task 0, 1, ... of the stream.
        confusion_by_class: The same by class: for each head index, how many of its images were
            predicted as which head index. Keys are text, as JSON requires; zeros are left out.
        sample: Accuracy on the ``sample`` of :func:`evaluate_learner`; None if there was none.
    """

    test: dict[str, dict[str, list[float]]]
    buffer: dict[str, dict[str, list[float | None]]]
    confusion: list[list[int]]
    confusion_by_class: list[dict[str, int]]
    sample: dict[str, dict[str, float]] | None = None


def evaluate_learner(
    learner: Learner, stream: Stream, part: int, *, prepare: bool = True, sample: Tensor | None = None
) -> TaskAccuracy:
    """Evaluates after a part of a stream: on the tasks 0 ... ``part``, or, in a stream without task
    boundaries, on the classes seen so far, as one task. The memory, of at least one sample, serves
    both the classifiers and the buffer accuracy.

    ``prepare`` False evaluates the network as it stands, even where the method trains it only for
    evaluations. ``sample`` are some of the images evaluated on, as int64 rows of ``stream.x_test``,
    whose accuracy is given by itself, too.
    """
    if prepare:
        learner.prepare_evaluation()
    task = stream.task_of(part)
    memory = learner.memory
    filled = memory.filled
    features, logits = learner.test_outputs(memory.images[:filled])
    fitted, names = learner.classifiers((features, logits)), learner.evaluated()
    # By class, not by the task in which a sample arrived: `joint` has all classes in one task.
    task_of_class = torch.empty(stream.classes, dtype=torch.int64)
    for t, classes in enumerate(stream.tasks):
        task_of_class[list(classes)] = t
    # Predictions go to the host once for the memory and once for the test images, and are counted
    # there. Samples that are held out, which are the last ones, were never trained on.
    trained = memory.drawable
    stored = memory.labels[:trained].cpu()
    predicted = classify(features[:, :trained], logits[:, :trained], fitted, names)
    buffer = _by_task(on_host([predicted]), stored, task_of_class[stored], task)

    of_tasks = [stream.test_rows(t) for t in range(task + 1)]
    if not stream.has_boundaries:
        of_tasks = [rows[torch.isin(stream.y_test[rows], torch.tensor(learner.seen))] for rows in of_tasks]
    images = stream.test_images(torch.cat(of_tasks), learner.evaluation_batch)
    parts = [classify(*learner.test_outputs(part), fitted, names) for part in images]
    rows = torch.cat([stream.tested(rows) for rows in of_tasks])
    tasks = task_of_class[stream.y_test[rows]]
    predictions = on_host(parts)
    test = _by_task(predictions, stream.y_test[rows], tasks, task)
    classifier, expert = learner.resolve_expert()
    predicted = predictions[classifier][expert]
    taken_for = task_of_class[predicted]
    columns = len(stream.tasks)
    confusion = torch.bincount(tasks * columns + taken_for, minlength=(task + 1) * columns).view(task + 1, columns)
    of_sample = None
    if sample is not None:
        sample = stream.tested(sample)
        place = torch.empty(len(stream.y_test), dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        chosen = {c: {e: p[place[sample]] for e, p in experts.items()} for c, experts in predictions.items()}
        of_sample = accuracy_of(chosen, stream.y_test[sample])
    by_class = _by_class(stream.y_test[rows], predicted, stream.classes)
    return TaskAccuracy(test, buffer, confusion.tolist(), by_class, of_sample)


def accuracy_of(predictions: Predictions, labels: Tensor) -> dict[str, dict[str, float]]:
    """Share of the predictions that are right, by classifier and expert; labels are int64 [n]."""
    return {
        c: {e: float((predicted == labels).double().mean()) for e, predicted in experts.items()}
        for c, experts in predictions.items()
    }


def _by_class(labels: Tensor, predicted: Tensor, classes: int) -> list[dict[str, int]]:
    counts = torch.bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)
    table: list[dict[str, int]] = [{} for _ in range(classes)]
    for (label, taken_for), count in zip(counts.nonzero().tolist(), counts[counts > 0].tolist(), strict=True):
        table[label][str(taken_for)] = count
    return table


def on_host(parts: list[Predictions]) -> Predictions:
    """Joins the predictions of consecutive images on the host, in a single transfer."""
    names = [(c, e) for c, experts in parts[0].items() for e in experts]
    labels = torch.cat([torch.stack([part[c][e] for c, e in names]) for part in parts], dim=1).cpu()
    predictions: Predictions = {}
    for (c, e), row in zip(names, labels, strict=True):
        predictions.setdefault(c, {})[e] = row
    return predictions


# A run of hundreds of tasks keeps a million shares, of which few differ, and a reference takes a
# quarter of a number's memory.
_share = functools.lru_cache(2**12)(operator.truediv)


def _by_task(predictions: Predictions, labels: Tensor, tasks: Tensor, task: int) -> dict[str, dict[str, list]]:
    # The memory may hold samples of later tasks.
    counts = torch.bincount(tasks, minlength=task + 1)[: task + 1]

    def accuracies(predicted: Tensor) -> list[float | None]:
        correct = torch.bincount(tasks[predicted == labels], minlength=task + 1)[: task + 1]
        return [_share(c, n) if n else None for c, n in zip(correct.tolist(), counts.tolist(), strict=True)]

    return {c: {e: accuracies(predicted) for e, predicted in experts.items()} for c, experts in predictions.items()}
