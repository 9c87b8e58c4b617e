"""A run of many tasks: what a task costs does not grow with the number of tasks before it."""

import sys
from collections import Counter

import numpy as np
import pytest

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


@pytest.mark.parametrize("method", ["er", "mose", "ssil"])
def test_a_late_task_takes_as_many_calls_as_an_early_one(tmp_path, monkeypatch, method):
    counts = Counter()
    for name in ("_train", "_finish_part"):
        monkeypatch.setattr(loop.Loop, name, counted(getattr(loop.Loop, name), counts, name))
    monkeypatch.setattr(loop, "evaluate_learner", uncounted(loop.evaluate_learner))
    labels = np.repeat(np.arange(2 * TASKS), 3)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 3), dtype=np.uint8)
    stream = from_arrays(images, labels, images[::3], labels[::3], tasks=TASKS, batch=3)
    settings = {"memory": 60, "width": 1, "device": "cpu", "buffer_batch": 4}
    run(stream=stream, method=method, out=tmp_path / "run", **settings)

    def calls(name, tasks):
        return sum(counts[name, task] for task in tasks)

    early, late = range(9, 19), range(19, 29)
    assert 0 < calls("_train", late) < 1.02 * calls("_train", early)
    assert 0 < calls("_finish_part", late) < 1.7 * calls("_finish_part", early)
    # The numbers of this evaluation alone are formatted.
    assert [counts["rows of the table", task] / (task + 1) for task in late] == [counts["rows of the table", 0]] * 10
