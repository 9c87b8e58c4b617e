"""The moving average of the weights: what it teaches and predicts, and when it must not move."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from mose_fast.learner.momentum_teacher import MomentumTeacher
from mose_fast.losses import distillation
from mose_fast.methods import METHODS, create_learner
from mose_fast.settings.run import ConfigError
from tests.mkd_twin import apart, default_dtype, ten_steps

TAUGHT = {"teacher": "momentum", "teacher_rate": 0.25}
RUNNING = {**TAUGHT, "teacher_statistics": "running", "predict_with": "teacher", "pull_back": 0.5}
RAW = {**TAUGHT, "teacher_raw": True, "teacher_rows": "buffer", "predict_with": "mean"}


def averages(learner) -> list[torch.Tensor]:
    return [average.clone() for average in learner.model.teacher.averages]


def weights(learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.network.parameters()]


def networks(learner) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Copies of the network in training mode, the second with the averages as its weights."""
    student = copy.deepcopy(learner.network).train()
    teacher = copy.deepcopy(student)
    for parameter, average in zip(teacher.parameters(), averages(learner), strict=True):
        parameter.data.copy_(average)
    return student, teacher


def all_equal(found, wanted) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# What it computes


@pytest.mark.slow
@pytest.mark.parametrize("from_equal_states", [False, True])
@pytest.mark.parametrize(
    ("kernels", "dtype", "eps", "of_losses"),
    [("torch", torch.float64, 1e-8, 1e-6), ("fused", torch.float32, 1e-2, 1e-5)],
)
def test_ten_steps_of_mkd_are_those_of_a_twin(kernels, dtype, eps, of_losses, from_equal_states):
    """Weights and teacher to a millionth. Of losses float32 keeps fewer digits (4e-6 off), with
    PyTorch's own kernels too.
    """
    with default_dtype(dtype):
        how = {"width": 8, "memory": 16, "buffer_batch": 8, "eps": eps, "device": "cpu", "kernels": kernels}
        learner = create_learner(method="er", preset="mkd", classes=4, image_size=(8, 8), **how)
    for found, wanted in ten_steps(learner, 8, from_equal_states=from_equal_states):
        assert found.loss == pytest.approx(wanted.loss, rel=of_losses)
        assert apart(found.weights, wanted.weights) < 1e-6 and apart(found.teacher, wanted.teacher) < 1e-6


def test_the_divergence_by_hand():
    """Softmaxes (1/4, 3/4) and (1/2, 1/2) at T = 2: KL = log(2) - H(1/4)."""
    teacher = torch.tensor([[[0.0, 2 * math.log(3)]], [[0.0, 0.0]]])
    student = torch.zeros(2, 1, 2, requires_grad=True)
    wanted = 4 * (math.log(2) + 0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    loss = distillation(student, teacher, 2.0)
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    loss.backward()
    # T^2 (p_s - p_t) / T of the one view.
    assert student.grad[0].tolist() == [pytest.approx([2 * 0.25, -2 * 0.25])]


def test_classes_and_views_that_do_not_count_have_neither_part_nor_gradient():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 5, 4, generator=generator) for _ in range(2))
    student.requires_grad_()
    classes, views = torch.tensor([True, False, True, True]), torch.tensor([False, True, True, False, True])
    loss = distillation(student, teacher, 3.0, classes=classes, views=views)
    assert torch.allclose(loss, distillation(student[:, views][..., classes], teacher[:, views][..., classes], 3.0))
    (gradient,) = torch.autograd.grad(loss, student)
    assert not gradient[:, ~views].any() and not gradient[..., ~classes].any() and gradient[:, views].any()
    assert distillation(student, teacher, 3.0, views=torch.zeros(5, dtype=torch.bool)).item() == 0


@pytest.mark.parametrize(
    ("raw", "rows", "outputs"), [(False, "all", "last"), (False, "buffer", "each"), (True, "all", "each")]
)
def test_the_loss_of_mose_view_by_view(raw, rows, outputs, make, teach, batch):
    """Of new rows and of buffer rows, each in two fixed copies and then these augmented."""
    options = TAUGHT | {"teacher_raw": raw, "teacher_rows": rows, "teacher_outputs": outputs, "experts": 2}
    learner = teach(make("mose", options=options))
    plans = []
    learner.plan = lambda x, y: plans.append(type(learner).plan(learner, x, y)) or plans[-1]
    student, teacher = networks(learner)
    found = float(learner.observe(*batch([2, 3] * 5, seed=9), 1)["teacher"])

    (plan,) = plans
    views = learner.make_views(plan)
    with torch.no_grad():
        p, q = (network(views).logits / 4 for network in (teacher, student))
    new, buffer = (4 * size for size in plan.sizes)
    each = []
    for first, count in ((0, new), (new, buffer)) if rows == "all" else ((new, buffer),):
        for view in range(first, first + count):
            fixed = view < first + count // 2
            of = view + count // 2 if raw and fixed else view
            each.append([F.kl_div(q[e, view].log_softmax(0), p[e, of].softmax(0), reduction="sum") for e in range(2)])
    taught = torch.tensor(each).mean(0)[-1 if outputs == "last" else slice(None)].sum()
    assert found == pytest.approx(5.5 * 16 * float(taught), rel=1e-3)


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_the_loss_of_gsa_has_its_rows_raw_and_its_seen_classes_alone(passes, make, teach, batch):
    learner = teach(make("gsa", options=RAW | {"passes": passes}))
    given = []
    learner.inputs = lambda *how: given.append(type(learner).inputs(learner, *how)) or given[-1]
    student, teacher = networks(learner)
    found = float(learner.observe(*batch([2, 3] * 5, seed=9), 1)["teacher"])

    (rows,) = given
    new, replayed = learner.view_sizes(rows)
    augmented, raw = rows.views.split(new + replayed)

    def logits(network, views):
        parts = views.split((new, replayed)) if passes == "separate" else [views]
        with torch.no_grad():
            return torch.cat([network(part).logits[0] for part in parts])[new:, :4] / 4

    p = logits(teacher, augmented).softmax(1)
    both = [F.kl_div(logits(student, views).log_softmax(1), p, reduction="batchmean") for views in (augmented, raw)]
    assert found == pytest.approx(5.5 * 16 * float(sum(both)) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("er", TAUGHT), ("er-ace", RAW), ("derpp", RUNNING), ("gsa", RAW), ("ssil", TAUGHT)),
        *(("mose", TAUGHT), ("mose", RAW), ("mose", RUNNING)),
    ],
)
def test_it_follows_the_weights(name, options, make, teach, batch):
    learner = teach(make(name, options=options), tasks=(0,))
    learner.end_task()
    before, statistics = averages(learner), dict(learner.model.teacher.tensors())
    statistics = {name: tensor.clone() for name, tensor in statistics.items()}
    learner.observe(*batch([2, 3] * 5, seed=7), 1)
    for old, new, weight in zip(before, averages(learner), weights(learner), strict=True):
        assert torch.allclose(new, old + 0.25 * (weight - old), atol=1e-7)
    found, own = learner.model.teacher.tensors(), learner.network.state_dict()
    buffers = [n for n in found if "running" in n]
    assert bool(buffers) == (options is RUNNING)
    for name in buffers:
        assert torch.allclose(found[name], statistics[name].lerp(own[name], 0.25)) and not torch.equal(
            found[name], statistics[name]
        )


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_an_average_that_only_predicts_changes_no_step(kernels, make, teach):
    plain, averaged = (
        teach(make("mose", kernels=kernels, options={"predict_with": which}), steps=2) for which in ("student", "mean")
    )
    assert all_equal(weights(plain), weights(averaged))
    assert plain.weights_hash() != averaged.weights_hash() and plain.kept()["bytes_beside"] == 0
    assert averaged.kept()["bytes_beside"] == 4 * sum(p.numel() for p in averaged.network.parameters())


# Prediction and pull-back


@pytest.mark.parametrize(
    ("which", "statistics", "kernels"),
    [("teacher", "batch", "torch"), ("teacher", "running", "fused"), ("mean", "running", "torch")],
)
def test_it_predicts_with_the_weights_that_are_asked_for(which, statistics, kernels, make, teach, batch):
    options = {"predict_with": which, "teacher_statistics": statistics, "teacher_rate": 0.25}
    learner = teach(make("mose", kernels=kernels, options=options))
    network = copy.deepcopy(learner.network).eval()
    for parameter, average in zip(network.parameters(), averages(learner), strict=True):
        parameter.data = average if which == "teacher" else (parameter.data + average) / 2
    if which == "teacher" and statistics == "running":
        for name, statistic in learner.model.teacher.statistics.items():
            network.get_buffer(name).copy_(statistic)
    x = batch([0, 1, 2, 3])[0]
    with torch.no_grad():
        wanted, of_student = network(learner.views.normalise(x)), learner.network.eval()(learner.views.normalise(x))
        stored = network.features(learner.views.normalise(learner.memory.images[: learner.memory.filled]))
    features, logits = learner.outputs(x)
    assert torch.allclose(features, wanted.features, atol=1e-5) and torch.allclose(logits, wanted.logits, atol=1e-5)
    assert not torch.allclose(logits, of_student.logits, atol=1e-4)
    assert torch.allclose(learner.outputs(x, student=True)[1], of_student.logits, atol=1e-5)
    labels = learner.memory.labels[: learner.memory.filled]
    mean = F.normalize(F.normalize(stored[-1][labels == 2], dim=1).mean(0), dim=0)
    assert torch.allclose(learner.class_means().means[-1][2].float(), mean, atol=1e-5)


def test_a_task_ends_with_the_weights_pulled_to_their_average(make, teach, batch):
    learner = teach(make("er", kernels="fused", options={"pull_back": 0.75, "teacher_rate": 0.01}), tasks=(0,))
    before, average = weights(learner), averages(learner)
    learner.end_task()
    for old, other, new in zip(before, average, weights(learner), strict=True):
        assert torch.allclose(new, 0.25 * old + 0.75 * other, atol=1e-7)
    assert not all_equal(weights(learner), before) and all_equal(averages(learner), average)


# A state, a loss that is not finite, refusals


@pytest.mark.parametrize(
    ("name", "options", "kernels"),
    [("er", RAW | {"teacher_start": "scaled"}, "fused"), ("gsa", TAUGHT, "torch"), ("mose", RUNNING, "fused")],
)
def test_a_learner_continues_from_a_state_within_a_task(name, options, kernels, make, teach, batch):
    learner, other = (make(name, kernels=kernels, options=options) for _ in range(2))
    teach(learner, steps=2)
    other.load_state(*learner.state())
    for one in (learner, other):
        teach(one, tasks=(1, 2), steps=1, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(learner.state()[0].values(), other.state()[0].values(), strict=True))
    assert learner.weights_hash() == other.weights_hash()
    assert torch.equal(*(one.scores(batch([0, 2])[0]) for one in (learner, other)))


def test_a_state_without_averages_is_refused(make, teach):
    plain, averaged = make("er"), make("er", options={"predict_with": "mean"})
    for giver, taker in ((plain, averaged), (averaged, plain)):
        with pytest.raises(ValueError, match="belongs to another network"):
            taker.load_state(*giver.state())


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_after_a_loss_that_is_not_finite_it_rests(kernels, make, teach, batch):
    learner = teach(make("er", kernels=kernels, options=RUNNING))
    before = {name: tensor.clone() for name, tensor in learner.model.teacher.tensors().items()}
    learner.losses = lambda outputs, rows: {"loss": outputs.logits.sum() * math.nan}
    losses = learner.observe(*batch([2, 3] * 5), 1)
    learner.end_task()
    assert losses["loss"].isnan() and learner.diverged
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.model.teacher.tensors().items())
    assert not all_equal(weights(learner), averages(learner))


def test_a_closed_latch_keeps_it_from_statistics_that_are_not_finite(make, teach):
    """As on a GPU, whose host does not know that the latch is closed."""
    learner = teach(make("er", options=RUNNING))
    teacher = MomentumTeacher(learner.network, learner.model.optimiser, learner.config.options)
    before = {name: tensor.clone() for name, tensor in teacher.tensors().items()}
    with torch.no_grad():
        learner.network.stem.norm.running_mean.fill_(math.nan)
        learner.network.stem.norm.weight.add_(1)
    teacher.follow(torch.tensor(True))
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.tensors().items())
    teacher.follow(torch.tensor(False))
    assert teacher.tensors()["stem.norm.running_mean"].isnan().all()
    assert torch.allclose(teacher.tensors()["stem.norm.weight"], before["stem.norm.weight"] + 0.25)


@pytest.mark.parametrize(("name", "options"), [
    ("agem", TAUGHT), ("scr", TAUGHT), ("ocm", TAUGHT), ("onpro", TAUGHT), ("il2a", TAUGHT),
    ("lucir", {"predict_with": "mean"}), ("co2l", {"pull_back": 0.5}),
])  # fmt: skip
def test_a_method_that_it_does_not_fit_refuses_it(name, options, make):
    assert METHODS[name].not_taught or METHODS[name].not_averaged
    with pytest.raises(ConfigError, match=rf"method '{name}' .*; wanted another method, or 'none', 'student' and 0"):
        make(name, options=options)


@pytest.mark.parametrize("name", ["teacher_rate", "pull_back"])
def test_a_share_above_1_is_refused(name, make):
    with pytest.raises(ConfigError, match=f"options.{name} is 1.5; wanted a share, at most 1"):
        make("er", options={name: 1.5})
