"""Where tasks begin and end: without the loop, after a state was loaded, and in a resumed run."""

from __future__ import annotations

import math
from functools import partialmethod

import pytest
import torch

from mose_fast.methods import METHODS, Er, Learner
from mose_fast.settings.run import RunConfig
from mose_fast.train import Interrupted, Listener, TrainingDiverged, resume, run


def bits(learner) -> dict[str, bytes]:
    return {name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in learner.state()[0].items()}


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    """The tasks whose end a method was told, in order."""
    tasks = []
    monkeypatch.setattr(Er, "on_task_end", lambda learner: tasks.append(learner.task))
    return tasks


def test_observing_a_new_task_ends_the_one_before(make, teach):
    """The review of SCR, which only the loop asked for."""
    alone, driven = (make("scr", options={"review": True}) for _ in range(2))
    teach(alone)
    teach(driven, tasks=(0,))
    driven.end_task()
    teach(driven, tasks=(1,))
    assert bits(alone) == bits(driven) and alone.steps == driven.steps
    assert alone.steps > teach(make("scr")).steps


def test_a_task_ends_once_whoever_ends_it(ended, make, teach):
    learner = teach(make("er"), tasks=(0, 1), steps=1)
    assert ended == [0]
    learner.end_task()
    successor = make("er")
    successor.load_state(*learner.state())
    for one in (learner, successor):
        one.begin_task(2)
        teach(one, tasks=(2, 0), steps=1)
    assert ended == [0, 1, 2, 2]


def test_a_batch_that_is_undone_has_ended_no_task(ended, make, batch):
    learner = make("er")
    learner.planning = METHODS["mose"].planning
    learner.prepare(*batch([0, 1]), 0).take()
    for _ in range(2):
        learner.prepare(*batch([2, 3]), 1).undo()
        assert learner.task == 0
    assert ended == [0, 0]


@pytest.mark.parametrize("how", ["stopped in the middle", "diverged at the first batch"])
def test_a_run_that_is_resumed_in_a_task_does_not_begin_it_again(monkeypatch, tmp_path, how):
    """What a method builds there is state: here the number of steps before the task, which decides
    how many rows are replayed.
    """
    begun = []
    begin_task, retrieve, losses = Learner.begin_task, Er.retrieve, Er.losses
    broken = set()

    def noting(learner, task, classes=None):
        begin_task(learner, task, classes)
        begun.append(task)
        learner.data.own["before"] = learner.steps

    def fewer(learner, x, y):
        return retrieve(learner, x, y)[: learner.data.own["before"]]

    def breaking(learner, outputs, rows):
        terms = losses(learner, outputs, rows)
        return {name: term * (math.nan if learner.task in broken else 1) for name, term in terms.items()}

    # Not the functions themselves: a learner with a function of another file is other code, which
    # cannot resume.
    monkeypatch.setattr(Er, "begin_task", partialmethod(noting))
    monkeypatch.setattr(Er, "retrieve", partialmethod(fewer))
    monkeypatch.setattr(Er, "losses", partialmethod(breaking))
    settings = {"width": 1, "memory": 30, "device": "cpu", "options": {"buffer_batch": 12}}
    config = RunConfig.create(method="er", stream={"name": "digits", "tasks": 2, "limit_per_task": 60}, **settings)

    class Stop(Listener):
        def on_batch(self, batch, losses):
            if batch == 9 and not broken:
                raise Interrupted

    whole = run(config)
    begun.clear()
    broken |= {1} if how.startswith("diverged") else set()
    with pytest.raises((Interrupted, TrainingDiverged)):
        run(config, out=tmp_path / "run", listeners=[Stop()])
    broken.clear()
    resumed = resume(tmp_path / "run")
    # Another learner evaluates the untrained network; it begins no task.
    assert begun == [0, 1]
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_classes_that_have_not_come_are_hidden_if_the_method_says_so(make, teach, batch, monkeypatch):
    learner = teach(make("er"), tasks=(0,))
    learner.network.classifier1.bias.data[5] = 100
    x, _ = batch([0, 1, 2])
    assert learner.predict(x).tolist() == [5] * 3
    monkeypatch.setattr(type(learner), "hides_unseen", True)
    assert set(learner.predict(x).tolist()) <= {0, 1}
    assert learner.outputs(x)[1].isfinite().tolist() == [[[True, True] + [False] * 4] * 3]
