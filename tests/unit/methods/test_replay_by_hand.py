"""Fine-tuning and methods that replay stored rows, against steps worked out by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from mose_fast.augment.cutmix import cutmix
from tests.unit.methods.by_hand import (
    DECAY,
    LR,
    SGD,
    close,
    each_nll,
    expect_terms,
    expect_update,
    flat,
    gradients_of,
    logits_of,
    nll,
    normalised,
    step_of,
    steps_of,
    two_means,
)


@pytest.mark.parametrize("replay_loss", ["two_means", "one_mean"])
def test_er(make, teach, batch, replay_loss):
    learner = teach(make("er", options={**SGD, "replay_loss": replay_loss}), steps=2)
    x, y = batch([4, 5] * 5)
    step = step_of(learner, x, y, 2)
    assert step.rows.sizes == (10, 12) and torch.equal(step.rows.images[:10], x)
    assert len(set(step.rows.slots.tolist())) == 12 and torch.equal(step.rows.labels[:10], y)
    if replay_loss == "two_means":
        expect_terms(step, two_means(step))
    else:
        logits = logits_of(step.before, normalised(step.rows.images))
        expect_terms(step, {"cross_entropy": nll(logits, step.rows.labels)})


def test_er_apart(make, teach, batch):
    """Separate passes, rows of other tasks only."""
    learner = teach(make("er", options={**SGD, "passes": "separate", "replay_from": "others"}), steps=2)
    step = step_of(learner, *batch([2, 3] * 5), 1)
    assert len(step.rows.slots) == 12 and set(step.rows.labels[10:].tolist()) == {0, 1}
    views, labels = normalised(step.rows.images).split([10, 12]), step.rows.labels.split([10, 12])
    incoming, replayed = (nll(logits_of(step.before, v), labels) for v, labels in zip(views, labels, strict=True))
    expect_terms(step, {"incoming": incoming, "replayed": replayed})


def test_er_iterations(make, teach, batch):
    """Two steps on a batch, each with a draw of its own from the memory before the batch, and each
    with a number of its own for its views.
    """
    learner = teach(make("er", options={**SGD, "iterations": 2}), steps=2)
    stored, seen, taken = learner.memory.images.clone(), learner.memory.seen, learner.steps
    x, y = batch([4, 5] * 5)
    told: list[dict] = []
    steps = steps_of(learner, lambda: told.append(learner.observe(x, y, 2)))
    assert [step.rows.sizes for step in steps] == [(10, 12)] * 2 and not torch.equal(*(s.rows.slots for s in steps))
    for number, step in enumerate(steps):
        assert step.rows.sequence == taken + number and torch.equal(step.rows.images[:10], x)
        assert torch.equal(step.rows.images[10:], stored[step.rows.slots])
        expect_terms(step, two_means(step))
    assert learner.steps == taken + 2 and learner.memory.seen == seen + 10 and told == [steps[1].losses]


def test_er_review(make, teach, batch):
    """Once through the memory in whole batches with a tenth of the gradient, then as before."""
    learner = make("er", memory=30, options={**SGD, "review": True})
    teach(learner, tasks=(0,), steps=4)
    steps = steps_of(learner, learner.end_task)
    assert [step.rows.sizes for step in steps] == [(0, 12)] * 2
    assert len(set(torch.cat([step.rows.slots for step in steps]).tolist())) == 24
    for step in steps:
        logits = logits_of(step.before, normalised(step.rows.images))
        expect_terms(step, {"replayed": nll(logits, step.rows.labels)}, weight=0.1)
    expect_terms(step := step_of(learner, *batch([2, 3] * 5), 1), two_means(step))


def test_er_balanced(make, teach, batch):
    """Seven classes' worth of one class does not push the others out."""
    learner = make("er", memory=12, options={**SGD, "memory_policy": "balanced"})
    teach(learner, tasks=(0,), steps=4)
    step = step_of(learner, *batch([2] * 10), 1)
    expect_terms(step, two_means(step))
    assert torch.bincount(learner.memory.labels).tolist() == [4, 4, 4]


def test_finetune(make, teach, batch):
    """Two steps of Adam, written out."""
    learner = make("finetune", options={"lr": 0.01, "weight_decay": DECAY, "beta1": 0.8, "augment": "none"})
    first = second = 0
    for number in (1, 2):
        step = step_of(learner, *batch([0, 1] * 5, seed=number), 0)
        assert step.rows.sizes == (10, 0)
        loss = nll(logits_of(step.before, normalised(step.rows.images)), step.rows.labels)
        gradient = flat(gradients_of(loss, step.before)) + DECAY * flat(step.before.parameters())
        first, second = 0.8 * first + 0.2 * gradient, 0.999 * second + 0.001 * gradient**2
        size = (second / (1 - 0.999**number)).sqrt() + 1e-8
        wanted = -0.01 * first / (1 - 0.8**number) / size
        moved = flat(step.after.parameters()) - flat(step.before.parameters())
        assert close(moved, wanted, 1e-2) and close(step.losses["loss"], loss.detach())


def test_agem(make, teach, batch):
    learner, signs = teach(make("agem", options=SGD), steps=2), set()
    for seed in range(8):
        x, y = batch([[4, 5], [0, 1]][seed % 2] * 5, seed=seed)
        step = step_of(learner, x, y, 2)
        assert step.rows.sizes == (10, 12) and (learner.memory.tasks[step.rows.slots] != 2).sum() >= 2
        views, labels = normalised(step.rows.images).split([10, 12]), step.rows.labels.split([10, 12])
        losses = [nll(logits_of(step.before, v), labels) for v, labels in zip(views, labels, strict=True)]
        g, r = (gradients_of(loss, step.before) for loss in losses)
        inner = float(flat(g) @ flat(r))
        signs.add(inner < 0)
        share = min(inner, 0) / float(flat(r) @ flat(r))
        assert close(step.losses["loss"], losses[0].detach()) and close(step.losses["reference"], losses[1].detach())
        expect_update(step, [a - share * b for a, b in zip(g, r, strict=True)])
    assert signs == {True, False}


def test_agem_reference(make, teach, batch):
    """The reference batch comes from finished tasks; before there is one it is fine-tuning."""
    learner = make("agem", options=SGD)
    for number in range(3):
        step = step_of(learner, *batch([0, 1] * 5, seed=number), 0)
        assert step.rows.sizes == (10, 0)
    teach(learner, tasks=(1,), steps=2)
    step = step_of(learner, *batch([2, 3] * 5), 1)
    assert set(step.rows.labels[10:].tolist()) == {0, 1}


def interference_of(learner, network, x, y, slots, virtual_lr: float) -> torch.Tensor:
    """MIR's scores in float64, on two copies of the network."""
    now, later = copy.deepcopy(network), copy.deepcopy(network)
    loss = nll(logits_of(later, normalised(x)), y)
    with torch.no_grad():
        for w, g in zip(later.parameters(), torch.autograd.grad(loss, list(later.parameters())), strict=True):
            w -= virtual_lr * g
        views, labels = normalised(learner.memory.images[slots]), learner.memory.labels[slots]
        return each_nll(logits_of(later, views), labels) - each_nll(logits_of(now, views), labels)


@pytest.mark.parametrize("virtual_lr", [0.3, None])
def test_mir(make, teach, batch, virtual_lr):
    learner = teach(make("mir", options={**SGD, "candidates": 25, "virtual_lr": virtual_lr}), steps=2)
    x, y = batch([4, 5] * 5)
    drawn, draw, score, wanted = [], learner.memory.draw, learner.interference, []
    learner.memory.draw = lambda *a, **how: (drawn.append(draw(*a, **how)), drawn[-1])[1]

    def noted(x, y, slots):
        network = copy.deepcopy(learner.network).double().train()
        wanted.append(interference_of(learner, network, x, y, slots, virtual_lr or LR))
        found = score(x, y, slots)
        assert close(found, wanted[-1], 1e-3)
        return found

    learner.interference = noted
    step = step_of(learner, x, y, 2)
    assert len(wanted) == 1 and len(drawn[0]) == 25
    replayed = torch.isin(drawn[0], step.rows.slots)
    rises = wanted[0][replayed], wanted[0][~replayed]
    # Those that rise most, up to what float32 tells apart.
    assert replayed.sum() == 12 and rises[0].min() > rises[1].max() - 1e-2 * wanted[0].std()
    expect_terms(step, two_means(step))


def test_gss(make, teach, batch):
    """Two pairs of steps; scores by the network after them; a full memory that takes nothing."""
    options = {**SGD, "iterations": 2, "steps": "alternate", "reference_batches": 3, "reference_batch": 5}
    learner = teach(make("gss", memory=45, options={**options, "threshold": -1.0}), steps=2)
    drawn, reference = [], learner.memory.reference
    learner.memory.reference = lambda *a: (drawn.append(reference(*a)), drawn[-1])[1]
    x, y = batch([4, 5] * 5)
    stored = learner.memory.images.clone(), learner.memory.labels.clone()
    steps = steps_of(learner, lambda: learner.observe(x, y, 2, index=torch.arange(900, 910)))
    assert [step.rows.sizes for step in steps] == [(10, 0), (0, 12)] * 2
    for step in steps:
        loss = nll(logits_of(step.before, normalised(step.rows.images)), step.rows.labels)
        assert close(step.losses["loss"], loss.detach())
        expect_update(step, gradients_of(loss, step.before))
    network = copy.deepcopy(learner.network).double().eval()

    def gradient(images, labels):
        return flat(gradients_of(nll(logits_of(network, normalised(images)), labels), network))

    references = [gradient(stored[0][s], stored[1][s]) for s in drawn[0]]
    assert len(references) == 3
    kept = (learner.memory.indices >= 900).nonzero().flatten()
    assert len(kept) == 5
    for slot in kept.tolist():
        own = gradient(learner.memory.images[slot][None], learner.memory.labels[slot][None])
        cosines = [float(own @ r / own.norm() / r.norm()) for r in references]
        assert abs(float(learner.memory.scores[slot]) - max(cosines)) < 1e-3
    indices = learner.memory.indices.clone()
    learner.observe(*batch([4, 5] * 5, seed=1), 2)
    assert torch.equal(learner.memory.indices, indices)


def test_gss_joint(make, teach, batch):
    """One step on the sum of both means, and a full memory that any batch may enter."""
    learner = teach(make("gss", memory=20, options={**SGD, "threshold": 1.5}), steps=1)
    step = step_of(learner, *batch([4, 5] * 5), 2)
    expect_terms(step, two_means(step))
    for seed in range(3):
        learner.observe(*batch([4, 5] * 5, seed=seed), 2)
    assert (learner.memory.tasks == 2).any()


def test_aser(make, teach, batch):
    """Chosen rows, one mean over all of them, and what is stored, all by evaluation features."""
    learner = teach(make("aser", options={**SGD, "buffer_batch": 4, "score": "asv"}), steps=3)
    x, y = batch([4, 5] * 5)

    def features(images):
        network = copy.deepcopy(learner.network).eval()
        with torch.no_grad():
            return network.features(normalised(images).float())[0]

    chosen = {s: learner.memory.retrieve(x, y, 4, s, features, learner.steps).tolist() for s in ("asv", "asvm")}
    assert chosen["asv"] != chosen["asvm"]
    store, wanted = learner.store, []

    def noted(x, y, index):
        twin = copy.deepcopy(learner.memory)
        twin.offer(x, y, 2, index, features)
        wanted.append(twin.indices)
        return store(x, y, index)

    learner.store = noted
    step = step_of(learner, x, y, 2)
    assert step.rows.slots.tolist() == chosen["asv"]
    logits = logits_of(step.before, normalised(step.rows.images))
    expect_terms(step, {"cross_entropy": nll(logits, step.rows.labels)})
    assert torch.equal(learner.memory.indices, wanted[0])


def test_derpp(make, teach, batch):
    """Three terms from two draws, and the logits that are stored."""
    learner = teach(make("derpp", options={**SGD, "augment": "pad_crop", "alpha": 0.3, "beta": 0.7}), tasks=(0,))
    stored = learner.memory.extras["logits"].clone()
    x, y = batch([2, 3] * 5)
    index = torch.arange(900, 910)
    (step,) = steps_of(learner, lambda: learner.observe(x, y, 1, index=index))
    rows = step.rows
    first, second = rows.slots.split([12, 12])
    assert rows.sizes == (10, 12, 12) and set(first.tolist()) != set(second.tolist())
    logits = logits_of(step.before, learner.make_views(rows).double())
    squares = (logits[10:22] - stored[first].double()) ** 2
    terms = {
        "incoming": nll(logits[:10], y),
        "distillation": 0.3 * squares.sum() / (12 * 6),
        "replayed": 0.7 * nll(logits[22:], rows.labels[22:]),
    }
    expect_terms(step, terms)
    kept = (learner.memory.indices >= 900).nonzero().flatten()
    assert len(kept) > 1
    assert close(learner.memory.extras["logits"][kept], logits[:10][learner.memory.indices[kept] - 900].detach(), 1e-3)


def test_gdumb(make, teach, batch):
    """A whole training for an evaluation, step by step: SGD with momentum, written out."""
    options = {"augment": "none", "lr": 0.5, "lr_low": 0.1, "weight_decay": DECAY, "passes_before": 4}
    learner = teach(make("gdumb", memory=24, options=options), steps=2)
    learner.rehearse(torch.arange(12))  # an evaluation must not go on from these weights
    teach(learner, tasks=(1,), steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mose_fast.methods.gdumb._LARGEST_NORM", 0.5)
        steps = steps_of(learner, learner.prepare_evaluation)
    assert len(steps) == 8
    fresh, first = learner.build_model().network, steps[0]
    velocity, shares = 0, set()
    orders = [torch.cat([s.rows.slots for s in steps[at : at + 2]]).tolist() for at in range(0, 8, 2)]
    assert all(sorted(order) == list(range(24)) for order in orders) and len({tuple(o) for o in orders}) == 4
    for number, step in enumerate(steps):
        before = copy.deepcopy(fresh).double().train() if step is first else step.before
        rows, rate = step.rows, (0.05, 0.5, 0.5, 0.3)[number // 2]
        assert torch.equal(rows.images, learner.memory.images[rows.slots])
        views, partners, share = cutmix(normalised(rows.images), 0.5, learner.config.seed, rows.sequence)
        shares.add(float(share))
        logits, share = logits_of(before, views), share.double()
        loss = share * nll(logits, rows.labels) + (1 - share) * nll(logits, rows.labels[partners])
        gradient = flat(gradients_of(loss, before))
        gradient = gradient * min(1, 0.5 / float(gradient.norm()))
        velocity = 0.9 * velocity + gradient + DECAY * flat(before.parameters())
        moved = flat(step.after.parameters()) - flat(before.parameters())
        assert close(step.losses["loss"], loss.detach()) and close(moved, -rate * velocity, 1e-3)
    assert 1.0 in shares and min(shares) < 0.9
