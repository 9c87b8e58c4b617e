"""Learners with fused ops and the flat optimiser against learners with PyTorch's own."""

from __future__ import annotations

import dataclasses
from itertools import cycle

import pytest
import torch

from mose_fast.methods import METHODS, create_learner
from mose_fast.optim import FlatAdam
from mose_fast.settings.run import StreamConfig
from mose_fast.streams import create as create_stream


def losses_of(learner, batch, steps: int = 5) -> list[float]:
    found = []
    for step in range(steps):
        losses = learner.observe(*batch([0, 1] * 5, seed=step), task=0)
        if losses is not None:
            found.append(float(losses["loss"]))
    return found


# Short training of the method that trains when it is asked; cosines times their default scale of 10
# make rounding ten times as large, which moves what herding chooses. The memory overflows within
# four batches.
OPTIONS = {"gdumb": {"passes": 2, "passes_before": 2}, "ccil": {"scale": 1.0}, "lucir": {"scale": 1.0}}


def course(learner, batch) -> list[float]:
    """The losses of four batches from each of two tasks; the memory has turned samples away and the
    evaluation is prepared afterwards.
    """
    found = []
    for task in range(2):
        for step in range(4):
            losses = learner.observe(*batch([2 * task, 2 * task + 1] * 5, seed=10 * task + step), task=task)
            found += [] if losses is None else [float(loss) for loss in losses.values()]
        learner.end_task()
    learner.prepare_evaluation()
    return found


def apart(found, wanted) -> float:
    """The distance between two lists of tensors as parts of the second one's length; the logits of
    classes that a method hides are left out.
    """
    found, wanted = (torch.cat([t[t != -torch.inf].double() for t in tensors]) for tensors in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_course_is_the_same(method, make, batch):
    """Losses, what the memory holds, running statistics and outputs, through every decision that a
    method takes by its network.

    The first loss is the same to rounding. Later ones are not always: one activation on the other
    side of 0 is a share of a percent.
    """
    plain, fused = (
        make(method, kernels=kernels, width=8, options=OPTIONS.get(method, {})) for kernels in ("torch", "fused")
    )
    wanted, found = course(plain, batch), course(fused, batch)
    assert len(wanted) >= (0 if method == "gdumb" else 7)
    assert found == pytest.approx(wanted, rel=1e-2) and found[:1] == pytest.approx(wanted[:1], rel=1e-5)
    assert fused.network.kernels == "fused" and plain.memory.seen == 80 > plain.memory.capacity
    for name in ("images", "labels"):
        assert torch.equal(fused.memory.tensors()[name], plain.memory.tensors()[name])
    assert apart(fused.network.buffers(), plain.network.buffers()) < 2e-2
    x, _ = batch([0, 1, 2, 3] * 3, seed=99)
    assert apart(fused.outputs(x), plain.outputs(x)) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kernels"), zip(METHODS, cycle(["torch", "fused"]), strict=False))
def test_only_a_step_changes_the_network(method, kernels, make, batch):
    """Choosing rows, scoring candidates and samples, storing and predicting leave weights, moments
    and running statistics alone.
    """
    learner = make(method, kernels=kernels, width=8, options=OPTIONS.get(method, {}))
    course(learner, batch)
    x, y = batch([2, 3] * 5, seed=50)
    before = {name: tensor.clone() for name, tensor in learner.model.state().items()}
    steps, seen = learner.steps, learner.memory.seen
    learner.plan(x, y)
    learner.store(x, y, torch.arange(10))
    learner.outputs(x)
    learner.class_means()
    assert learner.steps == steps and learner.memory.seen == seen + 10
    after = learner.model.state()
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []
    assert all(norm.track_running_stats for norm in learner.network.modules() if isinstance(norm, torch.nn.BatchNorm2d))


def test_gss_scores_under_a_transform(make, teach, batch):
    """vmap cannot look into native code, so that ops give way to PyTorch's operations."""
    learner = teach(make("gss", kernels="fused", width=8), steps=2)
    x, y = batch([4, 5] * 3)
    plain = make("gss", kernels="torch", width=8)
    plain.load_state(*learner.state())
    found, wanted = (one.gradients(x[:, None], y[:, None]) for one in (learner, plain))
    assert apart(found.values(), wanted.values()) < 1e-5


def test_auto_is_torch_on_the_cpu(make):
    learner = make("mose")
    assert learner.kernels == "torch" and learner.network.kernels == "torch"
    assert not isinstance(learner.model.optimiser, FlatAdam)


def test_bf16_trains_on_shadows_of_the_weights(make, batch):
    learner = make("mose", kernels="fused", width=8, precision="bf16")
    before = {name: p.detach().clone() for name, p in learner.network.named_parameters()}
    plain = make("mose", kernels="torch", width=8, precision="bf16")
    assert losses_of(learner, batch) == pytest.approx(losses_of(plain, batch), rel=0.05)
    for parameter, leaf in zip(learner.network.parameters(), learner.model.optimiser.leaves, strict=True):
        assert parameter.dtype == torch.float32
        assert torch.equal(leaf.detach(), parameter.detach().to(leaf.dtype))
    moved = [name for name, p in learner.network.named_parameters() if not torch.equal(p, before[name])]
    assert "stem.conv.weight" in moved and "projection1.bias" in moved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "precision"),
    [("torch", "fused", "fp32"), ("fused", "torch", "bf16"), ("fused", "fused", "bf16"), ("fused", "torch", "fp32")],
)
def test_a_state_continues_with_other_kernels(first, second, precision, make, batch):
    """Weights, running statistics and moments are the same tensors in both."""
    settings = {"width": 8, "precision": precision}
    learner = make("mose", kernels=first, **settings)
    losses_of(learner, batch, 3)
    tensors, values = learner.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    successor = make("mose", kernels=second, **settings)
    losses_of(successor, batch, 2)
    successor.load_state(tensors, values)
    reference = make("mose", kernels=first, **settings)
    losses_of(reference, batch, 3)
    # The second loss comes after a step of Adam, which makes much of small differences between
    # gradients.
    for step, near in ((7, 1e-4), (8, 1e-2)):
        wanted = float(reference.observe(*batch([0, 1] * 5, seed=step), task=0)["loss"])
        found = float(successor.observe(*batch([0, 1] * 5, seed=step), task=0)["loss"])
        assert found == pytest.approx(wanted, rel=near if precision == "fp32" else 0.05)
        if first == second:
            assert found == wanted
    x, _ = batch([0, 1, 2, 3])
    if precision == "fp32":
        for a, b in zip(reference.outputs(x), successor.outputs(x), strict=True):
            torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-2)


def test_a_trained_network_evaluates_the_same(make, batch):
    learner = make("mose", kernels="torch", width=8)
    losses_of(learner, batch)
    x, _ = batch([0, 1, 2, 3] * 3)
    wanted = learner.outputs(x)
    learner.network.use_kernels("fused")
    for a, b in zip(wanted, learner.outputs(x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_costs_do_not_depend_on_the_kernels(make):
    plain, fused = make("mose", kernels="torch"), make("mose", kernels="fused")
    assert fused.costs() == plain.costs()
    assert fused.network.kernels == "fused"


@pytest.mark.slow
def test_fused_training_converges_like_pytorchs_own():
    """80 steps on small digits: where the losses end is as good as the same, beside the spread of
    two seeds.
    """
    digits = create_stream(StreamConfig(name="digits", batch=5))
    small = dataclasses.replace(digits, x_train=digits.x_train[:, ::4, ::4], x_test=digits.x_test[:, ::4, ::4])
    options = {"buffer_batch": 8, "new_extra": 3}

    def last_losses(kernels: str, seed: int) -> float:
        learner = create_learner(
            options=options,
            memory=100,
            width=8,
            seed=seed,
            kernels=kernels,
            device="cpu",
            classes=small.classes,
            image_size=(8, 8),
        )
        found = []
        for task in range(len(small.tasks)):
            for rows in small.batches(task, seed=seed)[:17]:
                losses = learner.observe(small.x_train[rows], small.y_train[rows], task)
                if losses is not None:
                    found.append(float(losses["loss"]))
        assert len(found) >= 80
        return sum(found[40:80]) / 40

    plain, fused = ([last_losses(kernels, seed) for seed in range(2)] for kernels in ("torch", "fused"))
    spread = max(plain) - min(plain)
    assert spread > 0
    assert fused == pytest.approx(plain, abs=spread / 4)
