"""What the measured cost of a run is made of."""

from __future__ import annotations

import time

import pytest

from mose_fast.config import RunConfig
from mose_fast.methods import METHODS
from mose_fast.sweep.measure import measure


@pytest.mark.parametrize("budget", [0.0, 1000.0])
def test_the_ends_of_all_tasks_count_and_one_is_timed(monkeypatch, budget):
    """A run that is trained to its end has all of them; else a late one stands for all."""
    ended = []

    def end(learner):
        ended.append(learner.task)
        time.sleep(0.8)

    monkeypatch.setattr(METHODS["er"], "on_task_end", end)
    stream = {"name": "digits", "limit_per_task": 20}
    config = RunConfig.create(method="er", stream=stream, width=1, memory=20, device="cpu", options={"buffer_batch": 4})
    cost = measure(config, budget)
    assert ended == ([3] if budget == 0 else [0, 1, 2, 3, 4])
    assert cost.seconds >= 4.0


@pytest.mark.parametrize("budget", [0.0, 1000.0])
def test_a_stream_without_borders_has_one_end(monkeypatch, budget):
    ended = []

    def end(learner):
        ended.append(learner.task)
        time.sleep(0.8)

    monkeypatch.setattr(METHODS["er"], "on_task_end", end)
    stream = {"name": "digits", "limit_per_task": 20, "kind": "blurry"}
    config = RunConfig.create(method="er", stream=stream, width=1, memory=20, device="cpu", options={"buffer_batch": 4})
    cost = measure(config, budget)
    assert ended == [0] and cost.seconds >= 0.8
