"""ER and its bounds: which rows are replayed, what is minimised, and what the loop presents."""

from __future__ import annotations

import numpy as np
import pytest

from mose_fast.learner.replay_learner import Rows
from mose_fast.streams import from_arrays
from mose_fast.train import Listener, run


def trained_rows(learner, x, y, task) -> Rows:
    """What ``observe`` would train on."""
    caught = []
    learner.inputs = lambda plan, stored: caught.append(plan)
    learner.step = lambda *how: None
    learner.observe(x, y, task)
    del learner.inputs, learner.step
    return caught[0]


def test_the_official_preset_replays_finished_tasks_alone(make, teach, batch):
    learner = make("er", preset="official")
    first = trained_rows(teach(learner, tasks=(0,)), *batch([0, 1] * 5), 0)
    assert first.sizes == (10, 0)
    later = trained_rows(teach(learner, tasks=(1,)), *batch([2, 3] * 5), 1)
    assert later.sizes == (10, 10 + 2) and set(later.labels[10:].tolist()) <= {0, 1}


def test_fine_tuning_ignores_its_memory(make, teach):
    one, other = (make("finetune", memory=memory, options={"buffer_batch": 4}) for memory in (4, 40))
    teach(one), teach(other)
    assert one.weights_hash() == other.weights_hash() and one.memory.filled == 4 and other.memory.filled == 40
    assert teach(make("er", options={"buffer_batch": 4})).weights_hash() != one.weights_hash()


class Recorder(Listener):
    """The batches of a run: tasks started, and labels observed."""

    def on_start(self, config, stream, learner, batch, batches):
        self.tasks, self.labels, self.batches = [], [], batches
        prepare = learner.prepare

        def record(x, y, task, **how):
            self.labels.append(y.tolist())
            return prepare(x, y, task, **how)

        learner.prepare = record

    def on_task_start(self, task):
        self.tasks.append(task)


@pytest.fixture(scope="module")
def stream():
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(6), 20)
    x = random.integers(0, 256, (120, 8, 8, 3)).astype(np.uint8)
    return from_arrays(x, y, x[::4], y[::4], tasks=3)


@pytest.mark.parametrize("train_on", ["stream", "final_memory"])
def test_the_joint_bound_meets_all_tasks_at_once(stream, train_on):
    recorder = Recorder()
    options = {"buffer_batch": 12}
    results = run(
        stream=stream,
        method="joint",
        width=1,
        memory=24,
        device="cpu",
        options=options,
        train_on=train_on,
        listeners=[recorder],
    )
    extra = 0 if train_on == "stream" else 2
    assert recorder.tasks == list(range(1 if train_on == "stream" else 2))
    assert len(recorder.labels) == 12 and recorder.batches == 12 + extra
    assert sorted(label for labels in recorder.labels for label in labels) == sorted(
        stream.y_train.tolist()
    )  # one pass
    assert len(set(recorder.labels[0])) > 2  # more classes in the first batch than any task has
    assert results["evaluated_after"] == [2]
    rows = results["accuracy"]["linear"]["1"]
    assert rows[:2] == [[0, 0, 0]] * 2 and len(rows[2]) == 3
    assert all(value is not None for value in results["buffer_accuracy"]["ncm"]["1"][2])
    assert results["af_paper"]["linear"]["1"] is None and results["steps"] == (12 if train_on == "stream" else 2)
