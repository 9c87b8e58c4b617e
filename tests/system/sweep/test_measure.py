"""What the measured cost of a run is made of."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from mose_fast.experiments import step_cost as measure
from mose_fast.methods import METHODS
from mose_fast.settings.run import RunConfig


@pytest.fixture
def ended(monkeypatch):
    """The tasks that ER has ended; each end takes 100 seconds by the clock of what measures."""
    tasks = []
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 100 * len(tasks))
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(METHODS["er"], "on_task_end", lambda learner: tasks.append(learner.task))
    return tasks


def cost_of(budget, **stream):
    stream = {"name": "digits", "limit_per_task": 20, **stream}
    config = RunConfig.create(method="er", stream=stream, width=1, memory=20, device="cpu", options={"buffer_batch": 4})
    return measure.measure(config, budget)


@pytest.mark.parametrize("budget", [0.0, 10000.0])
def test_the_ends_of_all_tasks_count_and_one_is_timed(ended, budget):
    """A run that is trained to its end has all of them; else a late one stands for all."""
    cost = cost_of(budget)
    assert ended == ([3] if budget == 0 else [0, 1, 2, 3, 4])
    assert 500 <= cost.seconds < 600


@pytest.mark.parametrize("budget", [0.0, 10000.0])
def test_a_stream_without_task_boundaries_has_one_end(ended, budget):
    cost = cost_of(budget, kind="blurry")
    assert ended == [0] and 100 <= cost.seconds < 200
