"""Logit-adjusted cross-entropy: steps by hand in float64, and what it leaves alone and hides."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mose_fast.losses import ExpertLosses, label_counts
from mose_fast.methods.gsa import class_weights, two_sets
from mose_fast.methods.mose import MoseOptions
from mose_fast.nn.experts import ExpertOutputs
from tests.unit.methods.by_hand import SGD, expect_terms, logits_of, nll, normalised, step_of

TAU = 0.7


def adjusted(logits: torch.Tensor, labels: torch.Tensor, *sets: tuple[torch.Tensor, float]) -> torch.Tensor:
    """-log of each row's p(label), with p_c proportional to (share of c)^TAU exp(logit_c); a set's
    rows share its weight.
    """
    shares = torch.zeros(logits.shape[1], dtype=torch.float64)
    for rows, weight in sets:
        for label in rows.tolist():
            shares[label] += weight / len(rows)
    odds = shares**TAU * logits.exp()
    return -(odds[torch.arange(len(labels)), labels] / odds.sum(1)).log()


def learner_of(make, teach, method: str, **options):
    """After two batches of each of two tasks."""
    learner = make(method, options={**SGD, "logit_adjustment": TAU, **options})
    return teach(learner, steps=2)


def test_counts():
    labels, counted = torch.tensor([2, 0, 2, 2]), torch.tensor([True, True, True, False])
    assert label_counts(labels, 4).tolist() == [1, 0, 3, 0]
    assert label_counts(labels, 4, counted).tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("replay_loss", ["two_means", "one_mean"])
def test_er(make, teach, batch, replay_loss):
    learner = learner_of(make, teach, "er", replay_loss=replay_loss)
    for seed in range(3):
        step = step_of(learner, *batch([2, 2, 2, 3, 2], seed=seed), 1)
        logits, labels = logits_of(step.before, normalised(step.rows.images)), step.rows.labels
        if replay_loss == "one_mean":
            expect_terms(step, {"cross_entropy": adjusted(logits, labels, (labels, 1.0)).mean()})
            continue
        sets = (labels[:5], 1.0), (labels[5:], 1.0)
        incoming, replayed = adjusted(logits, labels, *sets).split([5, 12])
        expect_terms(step, {"incoming": incoming.mean(), "replayed": replayed.mean()})


def test_er_ace(make, teach, batch):
    """Incoming rows, told apart from their own classes, are not adjusted."""
    learner = learner_of(make, teach, "er-ace", head="linear")
    step = step_of(learner, *batch([2, 2, 2, 3, 2]), 1)
    logits, labels = logits_of(step.before, normalised(step.rows.images)), step.rows.labels
    replayed = adjusted(logits[5:], labels[5:], (labels[5:], 1.0)).mean()
    expect_terms(step, {"incoming": nll(logits[:5, 2:4], labels[:5] - 2), "replayed": replayed})


def test_derpp(make, teach, batch):
    """Rows that are drawn to their stored logits are neither adjusted nor counted."""
    learner = learner_of(make, teach, "derpp", alpha=0.3, beta=0.5)
    stored = learner.memory.extras["logits"].clone()
    step = step_of(learner, *batch([2, 2, 2, 3, 2]), 1)
    logits = logits_of(step.before, normalised(step.rows.images))
    (y, _, y_replayed), (incoming, distilled, replayed) = (t.split([5, 12, 12]) for t in (step.rows.labels, logits))
    sets = (y, 1.0), (y_replayed, 0.5)
    squares = (distilled - stored[step.rows.slots[:12]].double()) ** 2
    terms = {
        "incoming": adjusted(incoming, y, *sets).mean(),
        "distillation": 0.3 * squares.mean(),
        "replayed": 0.5 * adjusted(replayed, y_replayed, *sets).mean(),
    }
    expect_terms(step, terms)


def test_gsa(make, teach, batch):
    """The weighted set is adjusted, and so are the sums that its gradients are read from."""
    learner = learner_of(make, teach, "gsa", new_extra=3, warm_up=0, mirror="off")
    sums = learner.network.sums.double()
    step = step_of(learner, *batch([2, 2, 2, 3, 2]), 1)
    new, replayed = two_sets(step.rows, step.rows.images)
    views = normalised(torch.cat([new, new, replayed, replayed]))
    logits = logits_of(step.before, views).split([2 * len(new), 2 * len(replayed)])
    y_new, y = (one.repeat(2) for one in two_sets(step.rows, step.rows.labels))
    each = adjusted(logits[1], y, (y, 1.0))
    counts = torch.tensor([(y == c).sum() for c in range(6)]).double()
    p = (counts**TAU * logits[1].exp()).detach()
    p /= p.sum(1, keepdim=True)
    own = y[:, None] == torch.arange(6)
    sums = sums + torch.stack([torch.where(own, 1 - p, 0).sum(0), torch.where(own, 0, p).sum(0)])
    terms = {"incoming": nll(logits[0][:, 2:4], y_new - 2), "replayed": 2 * (class_weights(sums)[y] * each).mean()}
    expect_terms(step, terms)
    assert torch.allclose(learner.network.sums.double(), sums, rtol=1e-4)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("padding", [0, 3])
def test_mose_adjusts_the_buffer_rows_of_every_expert(separate, padding):
    """Values and gradients; padding, whatever its labels, is not counted."""
    switches = {"separate_cross_entropy": separate, "contrastive": "off", "distillation": "off"}
    options = MoseOptions(logit_adjustment=TAU, experts=2, **switches)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9 + padding, 5, generator=generator, dtype=torch.float64).requires_grad_()
    nothing = torch.zeros(2, 9 + padding, 1, dtype=torch.float64)
    labels, mask = torch.tensor([3, 2, 3, 0, 0, 0, 1, 2, 0] + [4] * padding), torch.tensor([0, 0, 1, 1, 0]).bool()
    counts = [torch.tensor(n, dtype=torch.int32) if padding else n for n in (3, 9)]
    valid = counts[1] if padding else None
    outputs = ExpertOutputs(nothing, logits, nothing, nothing[0])
    found = ExpertLosses(options)(outputs, labels, counts[0], mask, valid)
    wanted = []
    for one in logits[:, :9]:
        if separate:
            buffer = adjusted(one[3:], labels[3:9], (labels[3:9], 1.0)).mean()
            wanted.append(nll(one[:3, 2:4], labels[:3] - 2) + 2 * buffer)
        else:
            wanted.append(adjusted(one, labels[:9], (labels[:9], 1.0)).mean())
    assert found[:, 1].tolist() == pytest.approx([w.item() for w in wanted], rel=1e-6)
    gradients = [torch.autograd.grad(total, logits)[0] for total in (found.sum(), sum(wanted))]
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("method", ["er", "er-ace", "derpp", "gsa", "mose"])
def test_it_hides_classes_to_come_trains_on_them_later_and_continues_exactly(method, make, teach, batch):
    """Also after a batch that trains nothing."""
    learner = make(method, options={"logit_adjustment": 1.0, "lr": 0.01})
    teach(learner, tasks=(0,))
    x, _ = batch([0, 1] * 5)
    scores = learner.scores(x, "linear")
    assert scores[:, :2].isfinite().all() and (scores[:, 2:] == -math.inf).all()
    learner.observe(*batch([0] * 10), task=0, train=False)
    twin = copy.deepcopy(learner)
    for one in (learner, twin):
        losses = [one.observe(*batch([2, 2, 3] * 3, seed=seed), task=1) for seed in range(4)]
    assert all(value.isfinite() for value in losses[-1].values())
    assert learner.weights_hash() == twin.weights_hash()
    assert all(p.isfinite().all() for p in learner.network.parameters())
    assert learner.scores(x, "linear")[:, :4].isfinite().all()
