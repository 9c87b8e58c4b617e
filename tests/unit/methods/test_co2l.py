"""Co2L: its two losses, and the classifier that an evaluation fits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mose_fast.methods.co2l import asymmetric_contrastive_loss, learning_rate
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import from_arrays
from mose_fast.train import Listener, resume, run
from tests.unit.methods.by_hand import flat


def projections(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_views_that_are_no_anchors_count_zero_in_the_mean():
    z, labels = projections(8), torch.tensor([0, 1, 2, 3] * 2)
    every = [labels == label for label in range(4)]
    parts = [asymmetric_contrastive_loss(z, labels, anchors, 0.5) for anchors in every]
    whole = asymmetric_contrastive_loss(z, labels, torch.ones(8, dtype=torch.bool), 0.5)
    assert whole.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
    nothing = asymmetric_contrastive_loss(z, labels, torch.zeros(8, dtype=torch.bool), 0.5)
    nothing.backward()
    assert nothing.item() == 0 and not z.grad.any()


def test_replayed_rows_are_no_anchors(make, batch, teach):
    learner = teach(make("co2l"), tasks=(0,))
    (step,) = learner.prepare(*batch([2, 3] * 5), 1).steps
    rows = step.inputs
    assert rows.sizes == (10, 12) and rows.extras["current"].nonzero().flatten().tolist() == [2, 3]
    assert len(rows.views) == 44 and rows.extras["distils"]


def test_rows_of_memory_alone_are_all_anchors(make, teach):
    learner = teach(make("co2l"))
    learner.end_task()
    assert learner.rehearse(torch.arange(12)).keys() == {"loss", "contrastive"}


def test_the_classifier_depends_on_what_was_learned_not_on_evaluations(make, batch, teach):
    often, once = (teach(make("co2l", seed=2), tasks=(0, 1)) for _ in range(2))
    x, _ = batch([0, 1, 2, 3] * 5, seed=9)
    for learner in (often, once):
        learner.end_task()
    for _ in range(3):
        often.predict(x)
    teach(often, tasks=(2,)), teach(once, tasks=(2,))
    assert often.steps == once.steps
    for learner in (often, once):
        learner.end_task()
    assert torch.equal(often.predict(x), once.predict(x)) and often.weights_hash() == once.weights_hash()


def test_the_classifier_knows_the_memory_and_no_class_beyond(make, batch, teach):
    learner = teach(make("co2l", width=4, options={"lr": 0.01}), steps=8)
    learner.end_task()
    learner.prepare_evaluation()
    stored = learner.memory.filled
    predicted = learner.predict(learner.memory.images[:stored])
    assert (predicted == learner.memory.labels[:stored]).float().mean() > 0.7
    assert set(learner.predict(batch(list(range(6)) * 4)[0]).tolist()) <= {0, 1, 2, 3}
    assert set(learner.predict(batch(list(range(6)) * 4)[0], "ncm").tolist()) <= {0, 1, 2, 3}


def test_evaluations_in_bf16_use_the_classifier_that_was_fitted(make, batch, teach):
    """The optimiser keeps bf16 copies of the weights, which forward passes use."""
    learner = teach(make("co2l", kernels="fused", precision="bf16"))
    learner.end_task()
    assert learner.shadowed
    learner.prepare_evaluation()
    head, (features, logits) = learner.network.classifier1, learner.outputs(batch([0, 1, 2, 3])[0])
    seen = sorted(learner.seen)  # the logits of other classes are hidden
    wanted = features[0] @ head.weight.T + head.bias
    assert torch.allclose(logits[0][:, seen], wanted[:, seen], rtol=0.05, atol=0.05)
    assert head.weight.abs().max() > 0.1


def test_training_never_moves_the_classifier(make, teach):
    learner = make("co2l")
    before = learner.network.classifier1.weight.detach().clone()
    teach(learner, tasks=(0, 1))
    assert torch.equal(learner.network.classifier1.weight, before)


def test_nothing_is_fitted_without_a_stored_row(make, batch):
    learner = make("co2l")
    learner.observe(*batch([0, 1] * 5), task=0)
    before = learner.weights_hash()
    assert learner.predict(batch([0, 1])[0]).shape == (2,) and learner.weights_hash() == before


# The learning rate of the repository

OFFICIAL = {"optimiser": "sgd", "lr": 0.5, "momentum": 0.9, "schedule": "cosine", "warm_up": 0.1}


def rates(steps: int, **options) -> list[float]:
    o = RunConfig.create(method="co2l", options=options).options
    return [learning_rate(step, steps, o) for step in range(1, steps + 1)]


def test_the_learning_rate_rises_to_the_cosine_and_falls_to_a_thousandth():
    found = rates(100, **OFFICIAL)
    cosine = [0.0005 + 0.4995 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(1, 101)]
    assert found[10:] == pytest.approx(cosine[10:]) and found[-1] == pytest.approx(0.0005)
    rise = (cosine[9] - 0.01) / 10  # towards what the cosine has after a tenth
    assert found[:10] == pytest.approx([0.01 + rise * step for step in range(10)])
    assert rates(4, lr=0.2) == [0.2] * 4
    assert rates(4, lr=0.2, warm_up=0.5) == pytest.approx([0.01, 0.105, 0.2, 0.2])
    assert rates(3, **OFFICIAL)[0] == pytest.approx(0.0005 + 0.4995 * 0.75)  # no step is within the tenth


def test_steps_are_those_of_sgd_with_momentum_at_their_rates(make, batch):
    """In two tasks, of six steps and of four; the momentum goes on."""
    decay = {"weight_decay": 0.01, "augment": "none"}
    learner = make("co2l", options={**OFFICIAL, **decay, "lr": 0.05, "warm_up": 0.4})
    met: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(*_):
        parameters = [p for p in learner.network.parameters() if p.grad is not None]
        met.append((flat(parameters), flat(p.grad for p in parameters)))

    learner.model.optimiser.register_step_pre_hook(noted)
    for task, steps in ((0, 6), (1, 4)):
        learner.begin_task(task)
        learner.data.task_batches = steps
        for step in range(steps):
            learner.observe(*batch([2 * task, 2 * task + 1] * 5, seed=step), task)
        learner.end_task()
    expected = rates(6, lr=0.05, schedule="cosine", warm_up=0.4) + rates(4, lr=0.05, schedule="cosine", warm_up=0.4)
    velocity = 0
    for (weights, gradient), (after, _), rate in zip(met, met[1:], expected, strict=False):
        velocity = 0.9 * velocity + gradient + 0.01 * weights
        assert (after - weights + rate * velocity).norm() < 1e-3 * (rate * velocity).norm()


def test_a_schedule_must_know_how_many_batches_the_task_has(make, batch):
    learner = make("co2l", options={"schedule": "cosine"})
    with pytest.raises(ConfigError, match=r"'cosine' and warm_up 0\.0, but the number of the task's batches is"):
        learner.observe(*batch([0, 1] * 5), 0)


class Watch(Listener):
    """The learning rate of every step; breaks off after one of them."""

    def __init__(self, breaks: int | None = None):
        self.breaks, self.rates = breaks, []

    def on_start(self, config, stream, learner, batch, batches):
        self.learner = learner

    def on_batch(self, batch, losses):
        if batch == self.breaks:
            raise RuntimeError("broken off")
        self.rates.append(float(self.learner.model.optimiser.param_groups[0]["lr"]))


@pytest.mark.filterwarnings("ignore:.*meant for another protocol")
def test_a_run_has_the_schedule_in_each_task_and_is_resumed_in_its_middle(tmp_path):
    random, y = np.random.default_rng(0), np.repeat(np.arange(4), 20)
    x = (random.integers(0, 90, (80, 8, 8, 3)) + 50 * y[:, None, None, None]).astype(np.uint8)
    stream = from_arrays(x, y, x[::4], y[::4], tasks=2)
    own = {**OFFICIAL, "lr": 0.05, "warm_up": 0.3, "buffer_batch": 8}
    settings = {"width": 1, "memory": 24, "device": "cpu", "epochs": 2, "checkpoint_every": 3}
    config = RunConfig.create(method="co2l", options=own, **settings)
    whole, watch = run(config, stream=stream, out=tmp_path / "whole", listeners=(seen := [Watch()])), seen[0]
    assert watch.rates == pytest.approx(2 * rates(8, **own))
    with pytest.raises(RuntimeError, match="broken off"):
        run(config, stream=stream, out=tmp_path / "part", listeners=[Watch(5)])
    assert resume(tmp_path / "part", stream=stream)["weights_sha256"] == whole["weights_sha256"]
