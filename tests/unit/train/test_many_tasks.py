"""A run of many tasks: what a task costs does not grow with the number of tasks before it."""

import gc
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from mose_fast.evaluate.one_pass import _by_task
from mose_fast.runs.results import AccuracyTable, accuracy_csv
from mose_fast.streams import from_arrays
from mose_fast.train import loop, run

TASKS = 30


def counted(function, counts, name):
    """A method of the loop that counts calls of Python and C functions, by its first argument."""

    def wrapped(self, task, stop):
        def count(frame, event, argument):
            if event in ("call", "c_call"):
                counts[name, task] += 1
            if event == "c_call" and argument.__name__ == "writerow":
                counts["rows of the table", task] += 1

        sys.setprofile(count)
        try:
            return function(self, task, stop)
        finally:
            sys.setprofile(None)

    return wrapped


def uncounted(function):
    def wrapped(*arguments, **settings):
        counting = sys.getprofile()
        sys.setprofile(None)
        try:
            return function(*arguments, **settings)
        finally:
            sys.setprofile(counting)

    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mose", "ssil"])
def test_a_late_task_takes_as_many_calls_as_an_early_one(tmp_path, monkeypatch, method):
    counts = Counter()
    for name in ("_train", "_finish_part"):
        monkeypatch.setattr(loop.Loop, name, counted(getattr(loop.Loop, name), counts, name))
    monkeypatch.setattr(loop, "evaluate_learner", uncounted(loop.evaluate_learner))
    labels = np.repeat(np.arange(2 * TASKS), 3)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 3), dtype=np.uint8)
    stream = from_arrays(images, labels, images[::3], labels[::3], tasks=TASKS, batch=3)
    settings = {"memory": 60, "width": 1, "device": "cpu", "buffer_batch": 4}
    settings |= {"options": {"experts": 2}} if method == "mose" else {}
    run(stream=stream, method=method, out=tmp_path / "run", **settings)

    def calls(name, tasks):
        return sum(counts[name, task] for task in tasks)

    early, late = range(9, 19), range(19, 29)
    assert 0 < calls("_train", late) < 1.02 * calls("_train", early)
    assert 0 < calls("_finish_part", late) < 1.7 * calls("_finish_part", early)
    # The numbers of this evaluation alone are formatted.
    assert [counts["rows of the table", task] / (task + 1) for task in late] == [counts["rows of the table", 0]] * 10


@pytest.mark.slow
def test_an_accuracy_takes_no_more_memory_than_its_place_in_a_list(tmp_path):
    tasks, images = 120, 20
    table, rows, memory = AccuracyTable(tmp_path / "accuracy.csv"), {"ncm": {"1": []}}, []
    of_task = torch.arange(tasks).repeat_interleave(images)
    right = torch.rand(len(of_task), generator=torch.Generator().manual_seed(0)) < 0.5
    tracemalloc.start()
    try:
        for task in range(tasks):
            seen = slice((task + 1) * images)
            predicted = {"ncm": {"1": torch.where(right[seen], of_task[seen], -1)}}
            rows["ncm"]["1"].append(_by_task(predicted, of_task[seen], of_task[seen], task)["ncm"]["1"])
            if task + 1 in (tasks // 2, tasks):
                table.write(rows, rows, list(range(task + 1)))
                gc.collect()
                memory.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    accuracies = sum(range(tasks // 2 + 1, tasks + 1))
    # 8 bytes each, and an eighth more in reserve; a number of its own would take 24 more.
    assert memory[1] - memory[0] < 9 * accuracies + 100 * (tasks // 2)
    assert (tmp_path / "accuracy.csv").read_text() == accuracy_csv(rows, rows, list(range(tasks)))


def test_a_table_that_somebody_changed_is_written_anew(tmp_path):
    path, after = tmp_path / "accuracy.csv", [0, 1, 2, 3]
    test = {c: {e: [[0.1 * t for t in range(k + 1)] for k in after] for e in ("1", "2")} for c in ("ncm", "linear")}
    table = AccuracyTable(path)

    def until(count):
        return {c: {e: rows[:count] for e, rows in experts.items()} for c, experts in test.items()}

    for count, damage in enumerate((None, path.unlink, lambda: path.write_text("mine"), lambda: None), 1):
        if damage is not None:
            damage()
        table.write(until(count), until(count), after[:count])
        assert path.read_text() == accuracy_csv(until(count), until(count), after[:count])
