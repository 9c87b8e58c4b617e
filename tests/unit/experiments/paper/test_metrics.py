"""Every metric on two runs of three tasks and two experts, worked out by hand."""

import pytest

from mose_fast.experiments.paper import measures as metrics


def read(metric, runs):
    return metric.combine([metric.of_run(run) for run in runs])


def results(ncm1, ncm2, mean, stored, seconds):
    """A run whose linear classifiers are its nearest class means with half the accuracy."""
    matrices = {"1": ncm1, "2": ncm2, "mean_distance": mean}
    accuracy = {
        "ncm": matrices,
        "linear": {
            {"mean_distance": "mean_logit"}.get(e, e): [[v / 2 for v in row] for row in m] for e, m in matrices.items()
        },
    }
    acc = {c: {e: sum(m[-1]) / 3 for e, m in experts.items()} for c, experts in accuracy.items()}
    return {
        "tasks": [[0, 1], [2, 3], [4, 5]],
        "evaluated_after": [0, 1, 2],
        "accuracy": accuracy,
        "buffer_accuracy": {"ncm": {e: stored for e in matrices}, "linear": {e: stored for e in accuracy["linear"]}},
        "acc": acc,
        "af_paper": {
            "ncm": {"1": 0.25, "2": 0.125, "mean_distance": None},
            "linear": {"1": 0.5, "2": 0.5, "mean_logit": 0.75},
        },
        "new_task_accuracy": {
            c: {e: [m[t][t] for t in range(3)] for e, m in experts.items()} for c, experts in accuracy.items()
        },
        "bof": {"ncm": {"1": [1.0, None, 0.5], "2": [None] * 3, "mean_distance": [0.1, 0.2, 0.6]}},
        "seconds": {"train": seconds / 2, "capture": seconds / 10, "total": seconds},
        "parameters": {"trained": 11_285_796},
        "macs": {"trained": 555_500_000},
    }


A = results(
    [[0.5, 0, 0], [0.25, 0.75, 0], [0.8, 0.2, 0.5]],
    [[0.6, 0, 0], [0.4, 0.8, 0], [0.2, 0.6, 0.7]],
    [[0.7, 0, 0], [0.5, 0.9, 0], [0.3, 0.5, 0.9]],
    [[1.0, None, None], [0.5, 1.0, None], [0.4, None, 1.0]],
    90,
)
B = results(
    [[0.5, 0, 0], [0.25, 0.75, 0], [0.4, 0.2, 0.5]],
    [[0.6, 0, 0], [0.2, 0.8, 0], [0.6, 0.4, 0.5]],
    [[0.7, 0, 0], [0.5, 0.9, 0], [0.3, 0.5, 0.4]],
    [[1.0, None, None], [0.5, 1.0, None], [0.8, 0.8, 1.0]],
    120,
)


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [
        (metrics.average_accuracy(), [50, 50]),
        (metrics.average_accuracy("ncm", "1"), [50, 110 / 3]),
        (metrics.average_accuracy("linear", "mean"), [170 / 6, 20]),
        (metrics.forgetting("ncm", "1"), [25, 25]),
        (metrics.forgetting("ncm", "mean"), [None, None]),
        (metrics.accuracy_after(None, 0), [20, 60]),
        (metrics.accuracy_after(None, 2, "linear", "1"), [25, 25]),
        (metrics.accuracy_after(None, 3), [None, None]),
        (metrics.accuracy_after(1, 0), [40, 20]),
        (metrics.accuracy_after(1, None), [60, 50]),
        (metrics.accuracy_after(1, None, "ncm", "mean"), [70, 70]),
        # Expert 1 has the higher mean on task 0 (60 against 40), though in B expert 2 is better;
        # expert 2 on the others.
        (metrics.best_final_accuracy(0), [80, 40]),
        (metrics.best_final_accuracy(1), [60, 40]),
        (metrics.best_final_accuracy(), [210 / 3, 130 / 3]),
        (metrics.best_final_accuracy(5), [None, None]),
        (metrics.new_task_accuracy(1), [80, 80]),
        (metrics.new_task_accuracy(None), [210 / 3, 190 / 3]),
        (metrics.overfitting_of_old_tasks(1), [(0.5 - 0.4) / 0.4, (0.5 - 0.2) / 0.2]),
        # In A nothing of task 1 is stored.
        (metrics.overfitting_of_old_tasks(2), [(0.4 - 0.2) / 0.2, ((0.8 - 0.6) / 0.6 + (0.8 - 0.4) / 0.4) / 2]),
        (metrics.overfitting_of_old_tasks(None), [(0.25 + 1) / 2, (1.5 + 2 / 3) / 2]),
        (metrics.overfitting("ncm", "1"), [0.75, 0.75]),
        (metrics.overfitting(), [None, None]),
        (metrics.overfitting("ncm", "mean"), [0.3, 0.3]),
        (metrics.MINUTES, [1.5, 2]),
        (metrics.PARAMETERS, [11.285796] * 2),
        (metrics.MACS, [555.5] * 2),
    ],
)
def test_by_hand(metric, wanted):
    assert read(metric, [A, B]) == [value if value is None else pytest.approx(value) for value in wanted]


def test_runs_that_were_evaluated_once():
    once = A | {"evaluated_after": [2], "new_task_accuracy": {"ncm": {"2": None}}}
    assert read(metrics.accuracy_after(1, 0), [once]) == [None]
    assert read(metrics.accuracy_after(None, 0), [once]) == [pytest.approx(20)]
    assert read(metrics.new_task_accuracy(0), [once]) == [None]
    assert read(metrics.overfitting_of_old_tasks(1), [once]) == [None]


def test_an_expert_that_a_smaller_network_lacks_has_no_number():
    for metric in (
        metrics.average_accuracy("ncm", "3"),
        metrics.forgetting("linear", "3"),
        metrics.accuracy_after(None, 0, "ncm", "3"),
        metrics.new_task_accuracy(None, "ncm", "3"),
        metrics.overfitting_of_old_tasks(None, "ncm", "3"),
        metrics.overfitting("ncm", "3"),
    ):
        assert read(metric, [A]) == [None], metric.name


def test_training_minutes_are_of_steps_and_their_capture():
    (minutes,) = read(metrics.MINUTES, [A])
    assert read(metrics.TRAINING_MINUTES, [A]) == [pytest.approx(0.6 * minutes)]
