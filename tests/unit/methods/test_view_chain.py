"""The chain of views: its steps by hand in float64, and which views it links."""

from __future__ import annotations

import copy

import pytest
import torch

from mose_fast.losses import distillation
from mose_fast.methods.gsa import class_weights, two_sets
from mose_fast.methods.mose import Targets
from mose_fast.settings.run import ConfigError
from tests.unit.methods.by_hand import SGD, close, each_nll, expect_terms, logits_of, nll, normalised, step_of

CHAIN = {"view_chain": 0.5, "view_chain_temperature": 3.0}


def distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """T^2 sum_c p_t log(p_t / p_s), written out, the mean over views; the teacher is fixed."""
    odds_s, odds_t = (student / 3).exp(), (teacher.detach() / 3).exp()
    p_s, p_t = (odds / odds.sum(1, keepdim=True) for odds in (odds_s, odds_t))
    return 9 * (p_t * (p_t / p_s).log()).sum(1).mean()


def chain(hard: torch.Tensor, raw: torch.Tensor, mild: torch.Tensor) -> torch.Tensor:
    return 0.5 * (distance(raw, mild) + distance(mild, hard))


def test_distances_by_hand():
    """Of chosen views and chosen classes; the teacher has no gradient, nor have other classes."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    student.requires_grad_(), teacher.requires_grad_()
    found = distillation(student, teacher, 3.0)
    assert found.item() == pytest.approx(distance(student, teacher).item(), rel=1e-12)
    views, classes = torch.tensor([True, False, True, False]), torch.tensor([True, False, True])
    found = distillation(student, teacher, 3.0, classes=classes, views=views)
    assert found.item() == pytest.approx(distance(student[::2, ::2], teacher[::2, ::2]).item(), rel=1e-12)
    found.backward()
    assert teacher.grad is None and (student.grad != 0).tolist() == [[True, False, True], [False] * 3] * 2


def levels_of(learner, step, raw: torch.Tensor) -> list[torch.Tensor]:
    """The logits of augmented, raw and mild views, each level by itself."""
    views = learner.make_views(step.rows).double()
    hard, easy, mild = views.split(len(raw))
    assert close(easy, raw, 1e-6) and not close(hard, raw, 0.1) and not close(mild, raw, 0.1)
    return [
        torch.cat([logits_of(step.before, p) for p in level.split(learner.view_sizes(step.rows))])
        if learner.config.options.passes == "separate"
        else logits_of(step.before, level)
        for level in (hard, easy, mild)
    ]


@pytest.mark.parametrize(("passes", "augment"), [("joint", "pad_crop"), ("separate", "simclr")])
def test_er(make, teach, batch, passes, augment):
    learner = make("er", mirror="on", options={**SGD, **CHAIN, "augment": augment, "passes": passes})
    teach(learner, steps=2)
    step = step_of(learner, *batch([4, 5] * 5), 2)
    levels, labels = levels_of(learner, step, normalised(step.rows.images)), step.rows.labels
    terms = {
        "incoming": sum(nll(one[:10], labels[:10]) for one in levels) / 3,
        "replayed": sum(nll(one[10:], labels[10:]) for one in levels) / 3,
    }
    expect_terms(step, terms | {"chain": chain(*levels)})


def test_gsa(make, teach, batch):
    """Its own losses of every level, links among the classes that have come, and sums that the
    augmented views alone change.
    """
    learner = make("gsa", options={**SGD, **CHAIN, "augment": "simclr", "new_extra": 3, "warm_up": 0, "mirror": "off"})
    teach(learner, steps=2)
    sums = learner.network.sums.double()
    step = step_of(learner, *batch([2, 3, 2]), 1)
    new, replayed = two_sets(step.rows, step.rows.images)
    levels = levels_of(learner, step, normalised(torch.cat([new, new, replayed, replayed])))
    y_new, y = (one.repeat(2) for one in two_sets(step.rows, step.rows.labels))
    parts, added = [], []
    for one in levels:
        first, second = one[: len(y_new), 2:4], one[len(y_new) :, :4]
        p, own = second.detach().softmax(1), y[:, None] == torch.arange(4)
        added.append(torch.zeros(2, 6).double())
        added[-1][:, :4] = torch.stack([torch.where(own, 1 - p, 0).sum(0), torch.where(own, 0, p).sum(0)])
        weights = class_weights(sums + added[-1])[y]
        parts.append((nll(first, y_new - 2), 2 * (weights * each_nll(second, y)).mean()))
    terms = {name: sum(part) / 3 for name, part in zip(("incoming", "replayed"), zip(*parts, strict=True), strict=True)}
    expect_terms(step, terms | {"chain": chain(*(one[:, :4] for one in levels))})
    assert torch.allclose(learner.network.sums.double(), sums + added[0], rtol=1e-4)


def test_derpp_stores_the_logits_of_the_augmented_views(make, teach, batch):
    learner = teach(make("derpp", mirror="on", options={**SGD, **CHAIN, "augment": "simclr"}), tasks=(0,))
    index = torch.arange(900, 910)
    learner.observe(*batch([2, 3] * 5), 1, index=index[:0].new_tensor(range(800, 810)))
    before, plans, inputs = copy.deepcopy(learner.network).double().train(), [], learner.inputs
    learner.inputs = lambda plan, *stored: (plans.append(plan), inputs(plan, *stored))[1]
    learner.observe(*batch([2, 3] * 5, seed=1), 1, index=index)
    del learner.inputs
    hard = learner.make_views(plans[0]).double()[: len(plans[0].labels)]
    kept = (learner.memory.indices >= 900).nonzero().flatten()
    wanted = logits_of(before, hard).detach()[learner.memory.indices[kept] - 900]
    assert len(kept) and close(learner.memory.extras["logits"][kept], wanted, 1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_mose_links_each_fixed_copy_to_its_augmented_one(make, padded):
    """Sets of two rows and one, image and mirror image of each; one row is padding."""
    pairs = [(0, 4), (1, 5), (2, 6), (3, 7), (8, 10), (9, 11)]
    logits = torch.randn(12 + 4 * padded, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    new, valid = (torch.tensor(n, dtype=torch.int32) for n in (8, 12)) if padded else (8, None)
    learner = make("mose", options=CHAIN)
    (found,) = learner.chained(logits, Targets(None, new, None, valid)).values()
    easy, hard = (logits[list(side)] for side in zip(*pairs, strict=True))
    assert found.item() == pytest.approx(0.5 * distance(easy, hard).item(), rel=1e-12)


def test_a_step_of_mose(make, teach, batch):
    """In the first task and in the second: the last expert's term beside the loss without it."""
    learner, plain = (teach(make("mose", options=options), tasks=(0,)) for options in (CHAIN, {}))
    for seed in range(3):
        plain.load_state(*copy.deepcopy(learner).state())
        network = copy.deepcopy(learner.network).train()
        x, y = batch([2, 3] * 5 if seed else [0, 1] * 5, seed=seed)
        prepared = learner.prepare(x, y, min(seed, 1))
        plan = prepared.steps[0].plan
        sets = network(learner.make_views(plan)).logits[-1].double().split([4 * size for size in plan.sizes])
        easy, hard = (torch.cat(side) for side in zip(*(one.chunk(2) for one in sets if len(one)), strict=True))
        found, without = prepared.take(), plain.observe(x, y, min(seed, 1))
        assert close(found["chain"], 0.5 * distance(easy, hard).detach())
        assert close(found["loss"], without["loss"] + found["chain"]) and "chain" not in without
        assert learner.weights_hash() != plain.weights_hash()


@pytest.mark.parametrize("method", ["er", "gsa", "mose"])
def test_a_loaded_learner_continues_exactly(method, make, teach, batch):
    """Views are those of the seed and the step, and every method trains."""
    learner = teach(make(method, mirror="on", options=CHAIN))
    twin = copy.deepcopy(learner)
    for seed in range(2):
        losses = [one.observe(*batch([4, 5] * 5, seed=seed), task=2) for one in (learner, twin)]
        assert losses[0] == losses[1] and losses[0]["chain"] > 0
    assert learner.weights_hash() == twin.weights_hash()


@pytest.mark.parametrize("method", ["er", "mose"])
def test_without_augmented_views_there_is_no_chain(method, make):
    with pytest.raises(ConfigError, match=r"options\.view_chain is 0\.5 with options\.augment 'none'"):
        make(method, options={**CHAIN, "augment": "none"})
