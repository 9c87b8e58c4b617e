"""Accuracy at any time: what it is measured on, and that it changes nothing."""

import json
import warnings
from functools import cache

import numpy as np
import pytest
import torch

from mose_fast.evaluate import AnytimeSample
from mose_fast.methods import METHODS
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.train import Interrupted, Listener, resume, run
from tests.unit.train.small import small_stream

# Two tasks of four batches; with `evaluate_every` 3, points after batches 3, 4, 6 and 8.
SETTINGS = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 40},
    "buffer_batch": 12,
    "width": 1,
    "memory": 30,
    "device": "cpu",
}
OPTIONS = {
    "mose": {"experts": 2, "new_extra": 4},
    "gdumb": {"passes": 1, "passes_before": 1},
    # A digit that is rotated is another.
    "ocm": {"rotations": 1},
    "onpro": {"rotations": 1},
}


def config(method="er", **changes):
    return RunConfig.create(**{"method": method, **SETTINGS, **OPTIONS.get(method, {}), **changes})


class Keep(Listener):
    """Keeps the learner, and the points that it is told."""

    def __init__(self):
        self.points = []

    def on_start(self, config, stream, learner, batch, batches):
        self.stream, self.learner = stream, learner

    def on_evaluation(self, batch, images, accuracy):
        self.points.append((batch, images, accuracy))


class StopAt(Listener):
    """Interrupts a run after a batch, or in an evaluation that follows it."""

    def __init__(self, batch, inside):
        self.batch, self.inside, self.done = batch, inside, 0

    def on_batch(self, batch, losses):
        self.done = batch
        if batch == self.batch and not self.inside:
            raise Interrupted

    def on_step(self):
        if self.done == self.batch and self.inside:
            raise Interrupted


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_training_does_not_change(method):
    """Weights and memory are bit-equal, and so are the accuracies at task ends."""
    found = []
    for every in (None, 3):
        kept = Keep()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = run(config(method, evaluate_every=every), stream=small_stream(), listeners=[kept])
        found.append((results, kept))
    (plain, a), (measured, b) = found
    assert plain["weights_sha256"] == measured["weights_sha256"]
    tensors = [kept.learner.memory.tensors() for kept in (a, b)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert plain["accuracy"] == measured["accuracy"] and plain["buffer_accuracy"] == measured["buffer_accuracy"]
    assert plain["anytime"] is None and a.points == []
    curve = measured["anytime"]
    ends = [True] if b.learner.joint_stream else [False, True, False, True]
    assert curve["ends_task"][-1:] == ends[-1:] and len(curve["batch"]) == len(b.points)
    assert [point[0] for point in b.points] == curve["batch"]


def test_points_and_their_average():
    kept = Keep()
    curve = run(config(evaluate_every=3), listeners=[kept])["anytime"]
    assert curve["batch"] == [3, 4, 6, 8] and curve["ends_task"] == [False, True, False, True]
    assert curve["images_seen"] == [30, 40, 60, 80] and curve["task"] == [0, 0, 1, 1]
    assert curve["classes_seen"] == [5, 5, 10, 10]
    assert [(batch, images) for batch, images, _ in kept.points] == [(3, 30), (4, 40), (6, 60), (8, 80)]
    for classifier, experts in curve["average"].items():
        for expert, average in experts.items():
            values = [point[2][classifier][expert] for point in kept.points]
            assert curve["accuracy"][classifier][expert] == values and average == pytest.approx(np.mean(values))


def test_every_pass_counts_and_the_end_of_a_pass_is_a_point():
    curve = run(config(evaluate_every=4, epochs=2))["anytime"]
    assert curve["batch"] == [4, 8, 12, 16] and curve["ends_task"] == [False, True, False, True]
    assert curve["images_seen"] == [40, 80, 120, 160]


def test_a_task_end_gives_the_accuracy_that_it_has_on_the_same_images():
    kept = Keep()
    curve = run(config("mose", evaluate_every=5, anytime_images=40), listeners=[kept])["anytime"]
    rows = AnytimeSample(config("mose", anytime_images=40), kept.stream).rows(kept.learner.seen)
    assert len(rows) == 40 == len(set(rows.tolist()))
    for classifier, experts in curve["accuracy"].items():
        for expert, values in experts.items():
            predicted = kept.learner.predict(kept.stream.x_test[rows], classifier, expert)
            assert values[-1] == (predicted == kept.stream.y_test[rows]).double().mean()


def test_with_all_stored_images_it_is_what_predict_says_then():
    """Also in the middle of a task, by the means of the memory of then."""
    predicted = []

    class Ask(Keep):
        def on_evaluation(self, batch, images, accuracy):
            sample = AnytimeSample(config(anytime_stored=None), self.stream).rows(self.learner.seen)
            right = self.learner.predict(self.stream.x_test[sample], "ncm") == self.stream.y_test[sample]
            predicted.append((right.double().mean().item(), accuracy["ncm"]["1"]))

    run(config(evaluate_every=3, anytime_stored=None), listeners=[Ask()])
    assert len(predicted) == 4 and all(a == b for a, b in predicted)


def test_the_images_are_fixed_by_the_seed_and_of_classes_seen():
    samples = [AnytimeSample(config(seed=seed, anytime_images=25), small_stream()) for seed in (0, 0, 1)]
    first, same, other = (sample.rows({0, 2}).tolist() for sample in samples)
    assert first == same != other and len(first) == 25
    assert set(small_stream().y_test[first].tolist()) == {0, 2}
    everything = samples[0].rows({0, 1, 2, 3}).tolist()
    kept = [row for row in everything if row in first]
    assert kept == first[: len(kept)]  # one order for all


def test_a_few_stored_images_of_each_class_are_drawn_by_the_seed():
    labels = torch.tensor([0] * 50 + [3] + [1] * 20 + [0] * 10)
    sample = AnytimeSample(config(anytime_stored=5), small_stream())
    slots = sample._slots(labels)
    assert torch.bincount(labels[slots]).tolist() == [5, 5, 0, 1] and len(set(slots.tolist())) == 11
    assert torch.equal(slots, sample._slots(labels)) and slots.max() > 5
    other = AnytimeSample(config(anytime_stored=5, seed=1), small_stream())
    assert not torch.equal(slots, other._slots(labels))


@cache
def unbroken(method):
    return run(config(method, evaluate_every=3, checkpoint_every=3), stream=small_stream())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["er", "mose", "gdumb"])
@pytest.mark.parametrize(("batch", "inside"), [(2, False), (3, True), (4, True)])
def test_a_run_that_is_resumed_has_the_same_curve(tmp_path, method, batch, inside):
    settings, whole = config(method, evaluate_every=3, checkpoint_every=3), unbroken(method)
    with pytest.raises(Interrupted):
        run(settings, out=tmp_path / "run", stream=small_stream(), listeners=[StopAt(batch, inside)])
    resumed = resume(tmp_path / "run", stream=small_stream())
    assert resumed["anytime"] == whole["anytime"] and resumed["weights_sha256"] == whole["weights_sha256"]
    assert json.loads((tmp_path / "run" / "results.json").read_text())["anytime"] == whole["anytime"]


def test_tensorboard_has_the_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = run(config(evaluate_every=3), out=tmp_path / "run")["anytime"]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in events.Scalars("anytime_accuracy_ncm/1")]
    assert points == [(b, pytest.approx(v)) for b, v in zip(curve["batch"], curve["accuracy"]["ncm"]["1"], strict=True)]


def test_there_is_no_curve_of_rehearsals():
    with pytest.raises(ConfigError, match="evaluate_every is 5 with train_on 'final_memory'"):
        config(evaluate_every=5, train_on="final_memory")
