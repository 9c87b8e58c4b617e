"""A run of many tasks: what a task costs does not grow with the number of tasks before it."""

import sys
from collections import Counter

import numpy as np
import pytest

from mose_fast.streams import from_arrays
from mose_fast.train import Listener, loop, run

TASKS = 30


class Calls(Listener):
    """Counts the calls of Python and C functions in each task, without those of its evaluation."""

    def __init__(self):
        self.counts = Counter()
        self.task = None

    def count(self, frame, event, argument):
        if event in ("call", "c_call"):
            self.counts[self.task] += 1

    def on_task_start(self, task):
        self.task = task
        sys.setprofile(self.count)

    def on_end(self, results):
        sys.setprofile(None)

    def close(self):
        sys.setprofile(None)


def without_counting(function):
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
    monkeypatch.setattr(loop, "evaluate_learner", without_counting(loop.evaluate_learner))
    monkeypatch.setattr(loop.AnytimeSample, "evaluate", without_counting(loop.AnytimeSample.evaluate))
    labels = np.repeat(np.arange(2 * TASKS), 3)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8, 3), dtype=np.uint8)
    stream = from_arrays(images, labels, images[::3], labels[::3], tasks=TASKS, batch=3)
    calls = Calls()
    settings = {"memory": 60, "width": 1, "device": "cpu", "evaluate_every": 2, "anytime_images": 8, "buffer_batch": 4}
    run(stream=stream, method=method, out=tmp_path / "run", listeners=[calls], **settings)
    # The last task includes the end of the run.
    early, late = (sum(calls.counts[task] for task in tasks) for tasks in (range(9, 19), range(19, 29)))
    assert early > 0 and late < 1.05 * early
