"""GDumb: the balanced memory, and training from scratch at each evaluation."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.methods.gdumb import learning_rate
from mose_fast.streams import from_arrays
from mose_fast.train import run

SHORT = {"passes": 4, "passes_before": 2}


def test_the_schedule():
    """0.1, 1, then cosine cycles of 2, 4, 8 passes that begin at the highest rate."""
    low, high = 0.02, 1.0
    rates = [learning_rate(number, low, high) for number in range(16)]
    assert rates[:4] == pytest.approx([0.1, 1.0, 1.0, 0.51])
    assert [rates[number] for number in (4, 8)] == [1.0, 1.0]
    for first in (2, 4, 8):
        expected = [low + (high - low) * (1 + math.cos(math.pi * step / first)) / 2 for step in range(first)]
        assert rates[first : 2 * first] == pytest.approx(expected)


def test_the_stream_trains_nothing(make, batch):
    learner = make("gdumb", options=SHORT)
    before = learner.weights_hash()
    for step in range(5):
        assert learner.observe(*batch([0, 1] * 5, seed=step), task=0) is None
    assert learner.weights_hash() == before and learner.steps == 0


def test_evaluation_trains_once_between_two_batches(make, teach, batch):
    learner = teach(make("gdumb", options=SHORT), tasks=(0,))
    x, _ = batch([0, 1] * 5, seed=77)
    first = learner.predict(x)
    steps, weights = learner.steps, learner.weights_hash()
    assert steps == 2 * -(-30 // 12)  # passes over the memory, in batches of twelve
    assert torch.equal(learner.predict(x), first) and (learner.steps, learner.weights_hash()) == (steps, weights)
    teach(learner, tasks=(0,), steps=1)
    learner.prepare_evaluation()
    assert learner.steps == 2 * steps and learner.weights_hash() != weights


def test_the_network_does_not_depend_on_earlier_evaluations(make, teach):
    asked, unasked = (make("gdumb", options=SHORT) for _ in range(2))
    for task in (0, 1):
        for learner in (asked, unasked):
            teach(learner, tasks=(task,))
        asked.prepare_evaluation()
    unasked.prepare_evaluation()
    assert asked.weights_hash() == unasked.weights_hash()


def test_a_longer_schedule_once_all_classes_were_seen(make, teach):
    learner = teach(make("gdumb", classes=4, options={**SHORT, "buffer_batch": 30}), tasks=(0, 1))
    learner.prepare_evaluation()
    assert learner.steps == 4


def test_resuming_after_an_evaluation_trains_nothing_again(make, teach):
    learner, copy = teach(make("gdumb", options=SHORT)), make("gdumb", options=SHORT)
    learner.prepare_evaluation()
    copy.load_state(*learner.state())
    steps = copy.steps
    copy.prepare_evaluation()
    assert copy.steps == steps > 0 and copy.weights_hash() == learner.weights_hash()


def test_momentum_is_part_of_the_state(make, teach):
    """Training on the final memory goes on bit for bit."""
    learner, copy = teach(make("gdumb", options=SHORT)), make("gdumb", options=SHORT)
    learner.rehearse(torch.arange(12))
    copy.load_state(*learner.state())
    for one in (learner, copy):
        one.rehearse(torch.arange(12, 24))
    assert copy.weights_hash() == learner.weights_hash()


def test_an_empty_memory_is_no_reason_to_train(make):
    learner = make("gdumb", options=SHORT)
    learner.prepare_evaluation()
    assert learner.steps == 0


def test_the_loop_trains_before_evaluations_and_leaves_the_untrained_network_alone(batch):
    x, y = batch([0, 1, 2, 3] * 6)
    stream = from_arrays(x.numpy(), y.numpy(), x.numpy(), y.numpy(), tasks=2)
    settings = {"width": 1, "memory": 16, "device": "cpu", "options": {**SHORT, "buffer_batch": 8}}
    results = run(stream=stream, method="gdumb", **settings)
    # 12 images of two classes fill 12 slots (two steps a pass), then 16 slots hold four of each
    # class.
    assert results["steps"] == 2 * 2 + 4 * 2
    # An untrained network has the same outcome with any method that keeps the same weights: the
    # seed's.
    plain = run(stream=stream, method="finetune", **{**settings, "options": {"buffer_batch": 8}})
    assert results["untrained"]["accuracy"]["linear"] == plain["untrained"]["accuracy"]["linear"]
