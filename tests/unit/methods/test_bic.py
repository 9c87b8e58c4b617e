"""BiC: held-out images, when the correction holds, and what it is fitted to."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.evaluate import evaluate_learner
from mose_fast.nn.corrected import fit_correction
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import from_arrays


def test_the_first_images_of_each_class_are_never_trained_on(make, batch, monkeypatch):
    """Neither as incoming rows nor as replayed ones; those of a class that returns, neither."""
    learner, trained = make("bic", memory=60), []
    rows = learner.rows

    def noted(x, y, *sets):
        trained.extend(x[:, 0, 0].tolist())
        trained.extend(learner.memory.images[torch.cat(sets)][:, 0, 0].tolist())
        return rows(x, y, *sets)

    monkeypatch.setattr(learner, "rows", noted)
    held, seed = [], 0
    for task, classes in enumerate([[0, 1], [2, 3], [0, 4]]):
        learner.begin_task(task, classes)
        for _ in range(3):
            x, y = batch(classes * 5, seed=(seed := seed + 1))
            x[:, 0, 0] = torch.arange(30).reshape(10, 3) + 30 * seed  # marks each image
            learner.observe(x, y, task)
        buffer = learner.memory.buffer
        held += buffer.images[buffer.held_out][:, 0, 0].tolist()
    # Class 0 keeps the one that it has; the first that comes again is held out all the same.
    assert len(held) == 3 + 3 + 1 + 1 + 1 and len(trained) > 100
    assert not any(mark in trained for mark in held)


def test_a_batch_that_is_held_out_as_a_whole_trains_nothing(make, batch):
    learner = make("bic", memory=200)  # the first class alone has 200 slots, 20 of them held out
    before = learner.weights_hash()
    assert learner.observe(*batch([0] * 10), 0) is None and learner.observe(*batch([0] * 10), 0) is None
    assert learner.weights_hash() == before and learner.steps == 0 and learner.memory.seen == 20
    assert learner.observe(*batch([0] * 10), 0)["loss"].isfinite()


def test_the_correction_ends_with_the_next_step_and_returns_when_that_is_undone(make, teach, batch):
    learner = teach(make("bic", memory=60), steps=8)
    head = learner.network.classifier1
    assert head.scale.eq(1).all()  # in the middle of a task
    learner.end_task()
    scale, shift = head.scale.clone(), head.shift.clone()
    assert (scale != 1).tolist() == (shift != 0).tolist() == [False, False, True, True, False, False]
    x, _ = batch([0, 1, 2, 3] * 3)
    corrected = learner.outputs(x)[1]
    assert torch.equal(learner.teacher.network.classifier1.scale, scale)
    # A batch that is planned, and a step that is refused, leave it.
    learner.prepare(*batch([4, 5] * 5), 2).undo()
    assert torch.equal(head.scale, scale)
    bias = head.bias.detach().clone()
    with torch.no_grad():
        head.bias[0] = math.nan
    assert learner.observe(*batch([4, 5] * 5), 2)["loss"].isnan()
    with torch.no_grad():
        head.bias.copy_(bias)
    assert torch.equal(head.scale, scale) and torch.equal(learner.outputs(x)[1], corrected)
    learner.model.latch.open()
    learner.observe(*batch([4, 5] * 5), 2)
    assert head.scale.eq(1).all() and head.shift.eq(0).all()


def test_training_on_the_final_memory_has_no_correction_and_holds_nothing_out(make, batch):
    learner = make("bic", train_on="final_memory")
    for task in range(2):
        for step in range(3):
            learner.observe(*batch([2 * task, 2 * task + 1] * 5, seed=step), task, train=False)
    learner.end_task()
    assert learner.memory.held == 0 and learner.network.classifier1.scale.eq(1).all()


def test_the_review_leaves_held_out_images_alone(make, teach, monkeypatch):
    learner, reviewed = make("bic", memory=60, options={"review": True, "buffer_batch": 2}), []
    monkeypatch.setattr(learner, "rehearse", lambda slots: reviewed.extend(slots.tolist()))
    for task, (drawable, held) in enumerate([(54, 6), (56, 4)]):
        teach(learner, steps=8, tasks=[task]).end_task()
        assert (learner.memory.drawable, learner.memory.held) == (drawable, held)
        assert sorted(reviewed) == list(range(drawable))
        reviewed.clear()


def test_the_accuracy_on_the_memory_is_that_of_images_trained_on(make, batch):
    x, y = batch([0, 1, 2, 3] * 20)
    stream = from_arrays(x.numpy(), y.numpy(), x.numpy(), y.numpy(), tasks=2)
    learner = make("bic", classes=4, memory=60)
    for task in range(2):
        for rows in (y // 2 == task).nonzero().flatten().split(10):
            learner.observe(x[rows], y[rows], task)
        learner.end_task()
    accuracy = evaluate_learner(learner, stream, 1).buffer["linear"]
    held = learner.memory.labels[learner.memory.held_slots]
    held.copy_((held + 1) % 4)
    assert len(held) == 4 and evaluate_learner(learner, stream, 1).buffer["linear"] == accuracy


def test_the_correction_is_the_best_of_two_numbers():
    """Against a search of a grid, and where the loss falls for ever."""
    random = torch.Generator().manual_seed(0)
    labels, newest = torch.arange(60) % 6, torch.arange(6) >= 4
    logits = torch.randn(60, 6, generator=random).double()
    logits[torch.arange(60), labels] += 1.5
    logits[:, 4:] = 0.4 * logits[:, 4:] + 1

    def loss(scale, shift, penalty):
        corrected = torch.where(newest, scale * logits + shift, logits)
        return torch.nn.functional.cross_entropy(corrected, labels) + penalty * shift**2 / 2

    for penalty in (0.0, 0.1):
        scale, shift = fit_correction(logits.float(), labels, newest, penalty)
        around = [loss(scale + a, shift + b, penalty) for a in (-0.01, 0, 0.01) for b in (-0.01, 0, 0.01)]
        assert min(around) == around[4] and scale > 1.2 and shift < -0.3
    apart = 9.0 * torch.nn.functional.one_hot(labels, 6)
    assert all(map(math.isfinite, fit_correction(apart, labels, newest, 0.0)))


def test_several_epochs_are_refused(make):
    with pytest.raises(ConfigError, match="epochs is 2, but method 'bic' knows which images it holds out only"):
        make("bic", epochs=2)
    assert RunConfig.create(method="bic", epochs=2).epochs == 2
