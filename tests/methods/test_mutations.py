"""Each baseline's step against a step worked out by hand, and faults that these checks must find.

A check observes batches and compares every step with one in float64: losses, weights after the
update (hence gradients, learning rate and weight decay), batch norm's running statistics, replayed
rows, and what was stored. A fault is a change to the text of one function of a method.
"""

from __future__ import annotations
import __future__

import copy
import functools
import importlib
import inspect
import math
import textwrap
from typing import NamedTuple

import pytest
import torch

from mose_fast.augment.cutmix import cutmix
from mose_fast.memory.feedback import feedback
from mose_fast.methods import Learner
from mose_fast.methods.replay import Rows
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.draws import Purpose, permutation, random_words

LR, DECAY = 0.05, 0.1
SGD = {"optimiser": "sgd", "lr": LR, "weight_decay": DECAY, "augment": "none"}


class Step(NamedTuple):
    """A step that was taken: its rows, the losses it gave, and the network before (float64) and
    after it.
    """

    rows: Rows
    losses: dict[str, torch.Tensor]
    before: ExpertNetwork
    after: ExpertNetwork


def steps_of(learner: Learner, act) -> list[Step]:
    """Calls ``act`` and returns the steps that the learner took. The first one's network is that
    from before ``act``, so that nothing may happen to it unseen.
    """
    networks, plans, steps = [copy.deepcopy(learner.network).double().train()], [], []
    inputs, take = learner.inputs, learner.step

    def planned(plan, *stored):
        plans.append(plan)
        return inputs(plan, *stored)

    def noted(*how):
        before = copy.deepcopy(learner.network).double().train() if steps else networks[0]
        losses = take(*how)
        steps.append(Step(plans[len(steps)], losses, before, copy.deepcopy(learner.network)))
        return losses

    learner.inputs, learner.step = planned, noted
    act()
    del learner.inputs, learner.step
    return steps


def step_of(learner: Learner, x, y, task: int) -> Step:
    """The single step of an observed batch; checks that all but its incoming rows are what the
    memory held.
    """
    images, labels = learner.memory.images.clone(), learner.memory.labels.clone()
    steps = steps_of(learner, lambda: learner.observe(x, y, task))
    assert len(steps) == 1
    step = steps[0]
    slots, given = step.rows.slots, step.rows.sizes[0]
    stored = slots >= 0
    assert given + len(slots) == len(step.rows.labels) == len(step.rows.images)
    assert torch.equal(step.rows.images[given:][stored], images[slots[stored]])
    assert torch.equal(step.rows.labels[given:][stored], labels[slots[stored]])
    return step


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Views float64 [N, 3, H, W] of raw images, with mean and deviation 1/2."""
    return images.double().permute(0, 3, 1, 2) / 127.5 - 1


def logits_of(network: ExpertNetwork, views: torch.Tensor) -> torch.Tensor:
    return network.classify(network.features(views))[0]


def each_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p(label) of each row, written out."""
    return logits.exp().sum(1).log() - logits[torch.arange(len(labels)), labels]


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return each_nll(logits, labels).mean()


def close(found, wanted, tolerance: float = 1e-4) -> bool:
    found, wanted = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    return bool((found - wanted).norm() <= tolerance * wanted.norm() + 1e-7)


def gradients_of(loss: torch.Tensor, network: ExpertNetwork) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, list(network.parameters()), allow_unused=True, retain_graph=True))


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def expect_update(step: Step, gradients, lr: float = LR, decay: float = DECAY) -> None:
    """w - lr (g + decay w) for every parameter that the loss depends on; the others do not move.
    Batch norm's running statistics are those of the forward passes by hand.
    """
    pairs = list(zip(step.before.parameters(), gradients, strict=True))
    wanted = flat(torch.zeros_like(w) if g is None else -lr * (g + decay * w) for w, g in pairs)
    start = flat(step.before.parameters())
    moved = flat(step.after.parameters()) - start
    assert (moved - wanted).norm() < 1e-3 * wanted.norm() + 1e-6
    for g, w, now in zip(gradients, step.before.parameters(), step.after.parameters(), strict=True):
        assert g is not None or torch.equal(w.float(), now)
    buffers = dict(step.after.named_buffers())
    running = [(b, buffers[name]) for name, b in step.before.named_buffers() if "running" in name]
    assert running and all(close(found, wanted, 1e-3) for wanted, found in running)


def expect_terms(step: Step, terms: dict[str, torch.Tensor], lr: float = LR, weight: float = 1.0) -> None:
    """The step's losses and its update, for terms whose sum times ``weight`` is minimised."""
    total = sum(terms.values())
    assert step.losses.keys() == {"loss", *terms} and close(step.losses["loss"], total.detach())
    assert all(close(step.losses[name], term.detach()) for name, term in terms.items())
    expect_update(step, gradients_of(weight * total, step.before), lr)


def two_means(step: Step) -> dict[str, torch.Tensor]:
    """The terms of ER: a mean over incoming rows and one over replayed rows, from one pass."""
    given = step.rows.sizes[0]
    logits, labels = logits_of(step.before, normalised(step.rows.images)), step.rows.labels
    return {"incoming": nll(logits[:given], labels[:given]), "replayed": nll(logits[given:], labels[given:])}


# The steps by hand


def check_er(make, teach, batch):
    learner = teach(make("er", options=SGD), steps=2)
    x, y = batch([4, 5] * 5)
    step = step_of(learner, x, y, 2)
    assert step.rows.sizes == (10, 12) and torch.equal(step.rows.images[:10], x)
    assert len(set(step.rows.slots.tolist())) == 12 and torch.equal(step.rows.labels[:10], y)
    expect_terms(step, two_means(step))


def check_er_apart(make, teach, batch):
    """Separate passes, rows of other tasks only."""
    learner = teach(make("er", options={**SGD, "passes": "separate", "replay_from": "others"}), steps=2)
    step = step_of(learner, *batch([2, 3] * 5), 1)
    assert len(step.rows.slots) == 12 and set(step.rows.labels[10:].tolist()) == {0, 1}
    views, labels = normalised(step.rows.images).split([10, 12]), step.rows.labels.split([10, 12])
    incoming, replayed = (nll(logits_of(step.before, v), labels) for v, labels in zip(views, labels, strict=True))
    expect_terms(step, {"incoming": incoming, "replayed": replayed})


def check_er_iterations(make, teach, batch):
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


def check_er_review(make, teach, batch):
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


def check_er_balanced(make, teach, batch):
    """Seven classes' worth of one class does not push the others out."""
    learner = make("er", memory=12, options={**SGD, "memory_policy": "balanced"})
    teach(learner, tasks=(0,), steps=4)
    step = step_of(learner, *batch([2] * 10), 1)
    expect_terms(step, two_means(step))
    assert torch.bincount(learner.memory.labels).tolist() == [4, 4, 4]


def check_finetune(make, teach, batch):
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


def check_agem(make, teach, batch):
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


def check_agem_reference(make, teach, batch):
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


def check_mir(make, teach, batch, virtual_lr=0.3):
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


def check_mir_as_optimiser(make, teach, batch):
    """Without a learning rate of its own, the virtual step has the optimiser's."""
    check_mir(make, teach, batch, None)


def check_gss(make, teach, batch):
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


def check_gss_joint(make, teach, batch):
    """One step on the sum of both means, and a full memory that any batch may enter."""
    learner = teach(make("gss", memory=20, options={**SGD, "threshold": 1.5}), steps=1)
    step = step_of(learner, *batch([4, 5] * 5), 2)
    expect_terms(step, two_means(step))
    for seed in range(3):
        learner.observe(*batch([4, 5] * 5, seed=seed), 2)
    assert (learner.memory.tasks == 2).any()


def check_aser(make, teach, batch):
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


def direction(v: torch.Tensor) -> torch.Tensor:
    return v / (v.norm() + 1e-5)


def check_er_aml(make, teach, batch, passes="joint"):
    """Pairs, the metric loss over positives and negatives alone, and replay by cosines."""
    options = {**SGD, "temperature": 0.3, "passes": passes}
    learner = teach(make("er-aml", options=options), tasks=(0, 1), steps=3)
    for seed in range(9, 14):
        x, y = batch([2, 3] * 5, seed=seed)
        step = step_of(learner, x, y, 1)
        rows = step.rows
        assert rows.sizes == (10, 10, 10, 12) and torch.equal(rows.images[:10], x) and torch.equal(rows.labels[:10], y)
        _, positives, negatives, replayed = rows.labels.split(rows.sizes)
        assert torch.equal(positives, y) and torch.equal(negatives, 5 - y) and set(replayed.tolist()) & {0, 1}
        assert (rows.images[10:20] != rows.images[:10]).flatten(1).any(1).all()
        parts = normalised(rows.images).split([10, 20, 12] if passes == "separate" else [42])
        features = torch.cat([step.before.features(part)[0] for part in parts])

        total = 0
        for i in range(10):
            a = [direction(features[i]) @ direction(features[j]) / 0.3 for j in range(10, 30)]
            partition = sum(value.exp() for value in a).log()
            own = [value - partition for value, label in zip(a, rows.labels[10:30], strict=True) if label == y[i]]
            total = total - sum(own) / len(own) / 10
        head = [direction(w) for w in step.before.classifier1.weight]
        cosines = torch.stack([torch.stack([10 * (direction(f) @ w) for w in head]) for f in features[30:]])
        expect_terms(step, {"incoming": 0.3 / 0.07 * total, "replayed": nll(cosines, replayed)})


def check_er_aml_apart(make, teach, batch):
    """Anchors, pairs and replayed rows pass the network one set after the other."""
    check_er_aml(make, teach, batch, "separate")


def check_er_ace(make, teach, batch, passes="joint"):
    """Incoming rows among the classes of their batch alone, replayed rows among all, by cosines; an
    empty memory leaves the first batch all classes.
    """
    learner = make("er-ace", options={**SGD, "passes": passes})

    def cosines(step):
        parts = normalised(step.rows.images).split(step.rows.sizes if passes == "separate" else len(step.rows.images))
        features = torch.cat([step.before.features(part)[0] for part in parts if len(part)])
        head = [direction(w) for w in step.before.classifier1.weight]
        return torch.stack([torch.stack([10 * (direction(f) @ w) for w in head]) for f in features])

    step = step_of(learner, *batch([0, 1] * 5), 0)
    assert step.rows.sizes == (10, 0)
    expect_terms(step, {"incoming": nll(cosines(step), step.rows.labels)})
    teach(learner, steps=2)
    x, y = batch([2, 5] * 5)
    step = step_of(learner, x, y, 2)
    assert step.rows.sizes == (10, 12) and torch.equal(step.rows.images[:10], x)
    logits, labels = cosines(step), step.rows.labels
    assert {0, 1, 3} & set(labels[10:].tolist())
    own = nll(logits[:10][:, [2, 5]], torch.tensor([0, 1] * 5))
    expect_terms(step, {"incoming": own, "replayed": nll(logits[10:], labels[10:])})


def check_er_ace_apart(make, teach, batch):
    check_er_ace(make, teach, batch, "separate")


def contrastive(projections, labels, temperature: float) -> torch.Tensor:
    z = projections / projections.norm(dim=1, keepdim=True)
    s, terms = (z @ z.T / temperature).unbind(0), []
    for i, row in enumerate(s):
        others = [j for j in range(len(labels)) if j != i]
        partition = row[others].exp().sum().log()
        own = [j for j in others if labels[j] == labels[i]]
        terms.append(partition - row[own].mean())
    return sum(terms) / len(terms)


def check_scr(make, teach, batch, passes="joint"):
    """Both views in one loss; then the review with a tenth of it, and again the whole."""
    options = {**SGD, "augment": "scr", "temperature": 0.2, "review": True, "passes": passes}
    learner = make("scr", memory=14, options=options)
    teach(learner, tasks=(0,), steps=2)
    learner.data.ended = True  # the review of the first task is left out

    def by_hand(step):
        second = learner.views.augmented(step.rows.images, learner.config.seed, step.rows.sequence)
        views = [normalised(step.rows.images), second.double()]
        views = views if passes == "separate" else [torch.cat(views)]
        z = torch.cat([step.before.project(step.before.features(part))[0] for part in views])
        return contrastive(z, step.rows.labels.tolist() * 2, 0.2)

    step = step_of(learner, *batch([2, 3] * 5), 1)
    assert step.rows.sizes == (10, 12)
    expect_terms(step, {"contrastive": by_hand(step)})
    steps = steps_of(learner, learner.end_task)
    assert [step.rows.sizes for step in steps] == [(0, 12)]
    expect_terms(steps[0], {"contrastive": by_hand(steps[0])}, weight=0.1)
    step = step_of(learner, *batch([4, 5] * 5), 2)
    expect_terms(step, {"contrastive": by_hand(step)})
    assert learner.resolve_expert()[0] == "ncm"


def check_scr_apart(make, teach, batch):
    check_scr(make, teach, batch, "separate")


def check_derpp(make, teach, batch):
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


def check_gdumb(make, teach, batch):
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


def check_gsa(make, teach, batch, **options):
    """Both losses of nine steps in three tasks, with weights from the sums over all of them."""
    own = {"buffer_weight": 3.0, "new_extra": 6, "warm_up": 1, **options}
    learner = make("gsa", options={**SGD, "lr": 0.01, **own})
    pulled, pushed, weights_met = torch.zeros(6).double(), torch.zeros(6).double(), set()
    for number in range(9):
        task = number // 3
        classes, filled = [2 * task, 2 * task + 1], learner.memory.filled
        if number % 3 == 0:
            learner.begin_task(task, classes)
        x, y = batch(classes * 5 if number % 3 else classes[:1] * 10, seed=number)
        step = step_of(learner, x, y, task)
        given, current, old = step.rows.sizes
        new, known = given + current, 2 * task + (2 if number % 3 else 1)
        share = known - 2 * task  # of the current task's classes among those known
        assert (number % 3 > 0) == (current > 0) and old == 12 * 2 * task // known
        assert set(step.rows.labels[given:new].tolist()) <= set(classes)
        assert max(step.rows.labels[new:].tolist(), default=-1) < 2 * task
        copies = min(12 * share // known, new) if filled else 0
        views = normalised(step.rows.images)
        views = [views[:new], torch.cat([views[:copies], views[new:]])]
        views = [torch.cat([v, v.flip(3)]) for v in views]
        labels = [step.rows.labels[:new], torch.cat([step.rows.labels[:copies], step.rows.labels[new:]])]
        labels = [torch.cat([one, one]) for one in labels]
        if own.get("passes") == "separate":
            logits = [logits_of(step.before, v) for v in views if len(v)]
        else:
            logits = logits_of(step.before, torch.cat(views)).split([len(v) for v in views])
        allowed = classes if own.get("current_classes") == "task" else classes[:share]
        terms = {"incoming": nll(logits[0][:, allowed], labels[0] - 2 * task)}
        if len(labels[1]):
            p = logits[1].detach().softmax(1)
            for row, label in zip(p, labels[1].tolist(), strict=True):
                pulled[label] += 1 - row[label]
            for row, label in zip(p, labels[1].tolist(), strict=True):
                pushed += torch.where((torch.arange(6) == label) | (pulled == 0), 0, row)
            ratio = pulled[labels[1]] / pushed[labels[1]]
            weights = 2 / (1 + (1 - ratio).exp()) if number % 3 >= 1 else torch.ones(len(ratio)).double()
            weights_met.update(weights.tolist())
            terms["replayed"] = 3 * (weights * each_nll(logits[1], labels[1])).sum() / len(weights)
        expect_terms(step, terms, 0.01)
    assert len(weights_met) > 20 and max(weights_met) > 1.1


def check_gsa_apart(make, teach, batch):
    """The two sets pass the network one after the other; all classes of the task are known."""
    check_gsa(make, teach, batch, passes="separate", current_classes="task")


def course_of(learner: Learner, batch, networks: list[ExpertNetwork]):
    """Nine batches in three tasks of two classes for a method with exemplars, which replays earlier
    tasks only. Yields each one's task, all classes of it, those that came so far, and the step.

    Args:
        networks: Gets the network, in float64, at the end of each task.
    """
    for number in range(9):
        task = number // 3
        classes = [2 * task, 2 * task + 1]
        if number % 3 == 0:
            if task:
                learner.end_task()
                networks.append(copy.deepcopy(learner.network).double())
            learner.begin_task(task, classes)
        x, y = batch(classes * 5 if number % 3 else classes[:1] * 10, seed=number)
        step = step_of(learner, x, y, task)
        assert max(step.rows.labels[step.rows.sizes[0] :].tolist(), default=-1) < 2 * task
        yield task, classes, classes if number % 3 else classes[:1], step


def check_ssil(make, teach, batch, **options):
    """Separated cross-entropies as one mean, and a divergence within each old task."""
    learner, networks = make("ssil", options={**SGD, "lr": 0.01, "temperature": 3.0, **options}), []
    for task, classes, came, step in course_of(learner, batch, networks):
        given, replayed = step.rows.sizes
        assert replayed == (12 if task else 0)
        labels, views = step.rows.labels, normalised(step.rows.images)
        if options.get("passes") == "separate":
            logits = torch.cat([logits_of(step.before, part) for part in views.split([given, replayed]) if len(part)])
        else:
            logits = logits_of(step.before, views)
        allowed = classes if options.get("current_classes") == "task" else came
        total = given + replayed
        terms = {"incoming": each_nll(logits[:given, allowed], labels[:given] - 2 * task).sum() / total}
        if task:
            terms["replayed"] = each_nll(logits[given:, : 2 * task], labels[given:]).sum() / total
            taught, kept = logits_of(networks[-1].eval(), views).detach(), 0
            for first in range(0, 2 * task, 2):
                q, p = ((z[:, first : first + 2] / 3).softmax(1) for z in (taught, logits))
                kept = kept + 9 * (q * (q.log() - p.log())).sum() / total
            terms["distillation"] = kept
        expect_terms(step, terms, 0.01)


def check_ssil_apart(make, teach, batch):
    check_ssil(make, teach, batch, passes="separate", current_classes="task")


def half_turns(images: torch.Tensor) -> torch.Tensor:
    """uint8 [4 R, H, W, 3]: no half turned by 180 degrees, the right one, the left one, both."""
    middle, turned = images.shape[2] // 2, []
    for left in (False, True):
        for right in (False, True):
            image = images.clone()
            if left:
                image[:, :, :middle] = images[:, :, :middle].rot90(2, (1, 2))
            if right:
                image[:, :, middle:] = images[:, :, middle:].rot90(2, (1, 2))
            turned.append(image)
    return torch.cat(turned)


def unit(v: torch.Tensor) -> torch.Tensor:
    return v / (v.norm(dim=1, keepdim=True) + 1e-8)


def surprises(s: torch.Tensor, temperature: float, skip_self: bool = False) -> torch.Tensor:
    """-log(q_ij / (sum of row i + 1e-8) + 1e-8), row by row."""
    rows = []
    for i, row in enumerate(s):
        q = ((row - row.detach().max()) / temperature).exp()
        q = q * (torch.arange(len(q)) != i) if skip_self else q
        rows.append(-(q / (q.sum() + 1e-8) + 1e-8).log())
    return torch.stack(rows)


def mean_of_class(r: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return sum(row[labels == label].mean() for row, label in zip(r, labels, strict=True)) / len(r)


def rotated_terms(projections, features, labels, sizes, offsets, temperature, scale=1.0) -> dict[str, torch.Tensor]:
    """The contrastive losses of OCM and OnPro, from outputs [2 views, 4 rotations, rows, ...]."""
    terms, first = {}, 0
    for name, size, offset in zip(("incoming", "replayed"), sizes, offsets.tolist(), strict=True):
        part = slice(first, first + size)
        p, v = (unit(torch.cat([*torch.cat([*out[:, :, part]])])) for out in (projections, features))
        y = torch.cat([labels[part] + 1000 * b for b in range(4)] * 2)
        s = scale * (p @ p.T + p @ v[:, offset : offset + p.shape[1]].T)
        if name == "incoming":
            r, n = surprises(s, temperature, skip_self=True), len(s) // 2
            views = torch.stack([r[i, i + n if i < n else i - n] for i in range(2 * n)])
            terms[name] = 2 * mean_of_class(r, y) + views.mean()
        elif size:
            terms[name] = mean_of_class(surprises(s, temperature), y)
        first += size
    return terms


def check_ocm(make, teach, batch, passes="separate"):
    """A step of the first task, and one with a teacher."""
    options = {**SGD, "lr": 0.01, "augment": "simclr", "rotations": 4, "temperature": 0.3, "per_class_cap": 2}
    learner = make("ocm", seed=4, options={**options, "projection": 4, "passes": passes})

    def by_hand(step, teacher):
        rows, sizes = step.rows, step.rows.sizes
        turned = half_turns(rows.images)
        classified = rows.images[sizes[0] :] if sizes[1] else rows.images
        augmented = [turned, classified] if teacher is None else [turned, classified, classified]
        views = learner.views.augmented(torch.cat(augmented), learner.config.seed, rows.sequence).double()
        second, third, *fourth = views.split([*map(len, augmented)])
        contrasted = torch.cat([normalised(turned), second])
        passing = [torch.cat([contrasted, third])] if passes == "joint" else [contrasted, third]
        features = torch.cat([step.before.features(part)[0] for part in passing])
        projections, logits = step.before.projection1(features), step.before.classifier1(features)[len(contrasted) :]
        outputs = [out[: len(contrasted)].view(2, 4, len(rows.images), -1) for out in (projections, features)]
        y = rows.labels[sizes[0] :] if sizes[1] else rows.labels
        terms = rotated_terms(*outputs, rows.labels, sizes, rows.extras["offsets"], 0.3)
        terms = {"cross_entropy": nll(logits, y), **terms}
        if teacher is not None:
            own = unit(torch.cat([*outputs[0][0, :, sizes[0] :]]))
            shown = torch.cat([*normalised(turned).view(4, -1, 3, 8, 8)[:, sizes[0] :]])
            taught = unit(teacher.project(teacher.features(shown))[0]).detach()
            y = torch.cat([y + 1000 * b for b in range(4)])
            terms["distillation"] = mean_of_class(surprises(own @ taught.T, 0.3), y)
            squares = (logits - logits_of(teacher, *fourth).detach()) ** 2
            terms["regression"] = squares[:, :2].sum() / (2 * len(logits))
        expect_terms(step, terms, 0.01)

    teach(learner, tasks=(0,), steps=2)
    step = step_of(learner, *batch([0, 1] * 5, seed=7), 0)
    assert step.rows.sizes == (10, 0)
    by_hand(step, None)
    teacher = copy.deepcopy(learner.network).double().train()
    teach(learner, tasks=(1,), steps=2)
    step = step_of(learner, *batch([2, 3] * 5, seed=8), 1)
    assert step.rows.sizes == (10, 8) and len(set(step.rows.extras["offsets"].tolist())) == 2
    by_hand(step, teacher)


def check_ocm_joint(make, teach, batch):
    """All of the student's views pass the network together."""
    check_ocm(make, teach, batch, "joint")


def check_bic(make, teach, batch, **options):
    """Distillation from corrected logits; held-out images; the correction as the best of two
    numbers.
    """
    # Of 45, 22 and 15 slots for a class, 4, 2 and 1 are held out.
    own = {"temperature": 3.0, "bias_lr": 0.05, "bias_steps": 400, **options}
    learner = make("bic", memory=90, options={**SGD, "lr": 0.01, **own})
    networks, per_task = [], [0, 0, 0]
    for task, _, came, step in course_of(learner, batch, networks):
        given, replayed = step.rows.sizes
        per_task[task] += given
        assert replayed == (12 if task else 0)
        labels, views = step.rows.labels, normalised(step.rows.images)
        logits, old = logits_of(step.before, views), 2 * task
        known = old + (2 if options.get("current_classes") == "task" else len(came))
        terms = {"cross_entropy": nll(logits[:, :known], labels)}
        if task:
            before = networks[-1].eval()
            linear = before.features(views)[0] @ before.classifier1.weight.T + before.classifier1.bias
            taught = (linear * before.classifier1.scale + before.classifier1.shift).detach()
            q, p = ((z[:, :old] / 3).softmax(1) for z in (taught, logits))
            share = old / known
            terms["cross_entropy"] = (1 - share) * terms["cross_entropy"]
            terms["distillation"] = -share * (q * p.log()).sum(1).mean()
        expect_terms(step, terms, 0.01)
        head = learner.network.classifier1
        assert head.scale.eq(1).all() and head.shift.eq(0).all()
    # Of the thirty images of a task the first ones of each class were held out.
    assert per_task == [22, 26, 28]
    learner.end_task()
    held = learner.memory.held_slots
    assert sorted(learner.memory.labels[held].tolist()) == [0, 1, 2, 3, 4, 5]
    logits = learner.network.double().eval().features(normalised(learner.memory.images[held]))[0]
    logits = (logits @ head.weight.T + head.bias).detach()
    numbers = torch.tensor([head.scale[4].item(), head.shift[4].item()], requires_grad=True)
    corrected = torch.cat([logits[:, :4], numbers[0] * logits[:, 4:] + numbers[1]], 1)
    (slope,) = torch.autograd.grad(nll(corrected, learner.memory.labels[held]), [numbers])
    assert slope.abs().max() < 1e-3 and (numbers - torch.tensor([1.0, 0.0])).abs().max() > 0.1
    assert head.scale.tolist() == [1] * 4 + [head.scale[4].item()] * 2
    assert head.shift.tolist() == [0] * 4 + [head.shift[4].item()] * 2
    assert torch.equal(learner.teacher.tensors()["teacher/classifier1.scale"].float(), head.scale.float())


def check_bic_known(make, teach, batch):
    check_bic(make, teach, batch, current_classes="task")


def check_ccil(make, teach, batch, **options):
    """Two cross-entropies over other classes, and a distillation of each set as a mean over rows
    and old classes.
    """
    own = {"temperature": 3.0, "distillation": 4.0, "power": 0.5, "scale": 2.0, **options}
    learner, networks = make("ccil", options={**SGD, "lr": 0.01, **own}), []
    assert torch.as_tensor(learner.network.classifier1.scale).item() == 2
    for task, classes, came, step in course_of(learner, batch, networks):
        given, replayed = step.rows.sizes
        assert replayed == (12 if task else 0)
        labels, views = step.rows.labels, normalised(step.rows.images)
        # The cosines by hand: the head adds 1e-5 to each length.
        head = step.before.classifier1
        features = step.before.features(views)[0]
        unit_features, weights = (v / (v.norm(dim=1, keepdim=True) + 1e-5) for v in (features, head.weight))
        logits = head.scale * unit_features @ weights.T
        new = classes if options.get("current_classes") == "task" else came
        old, known = 2 * task, 2 * task + len(new)
        terms = {"incoming": nll(logits[:given, new], labels[:given] - old)}
        if task:
            terms["replayed"] = nll(logits[given:, :known], labels[given:])
            taught = logits_of(networks[-1].eval(), views).detach()
            q, p = ((z[:, :old] / 3).softmax(1) for z in (taught, logits))
            each = 9 * q * (q / p).log()
            terms["distillation"] = 4 * (known / len(new)) ** 0.5 * (each[:given].mean() + each[given:].mean())
        expect_terms(step, terms, 0.01)
    assert torch.as_tensor(learner.network.classifier1.scale).item() != 2


def check_ccil_known(make, teach, batch):
    check_ccil(make, teach, batch, current_classes="task")


def check_lucir(make, teach, batch):
    """Imprinted weights, cross-entropy by cosines over the classes known, distilled directions, the
    margin of old rows; weights of old classes stay.
    """
    options = {**SGD, "scale": 2.0, "distillation": 0.7, "ranking": 3.0, "margin": 1.5}
    learner = teach(make("lucir", options=options), steps=2)
    learner.end_task()
    taught, imprinted = copy.deepcopy(learner.network).double().eval(), set()
    scale = dict(make("lucir", options=options).network.named_parameters()).get("classifier1.scale")
    assert scale is not None and scale.item() == 2
    for number, classes in enumerate(([4], [4, 5], [4, 5])):
        x, y = batch(classes * (10 // len(classes)), seed=number)
        x[:6] //= 16  # another direction than that of the other rows
        step = step_of(learner, x, y, 2)
        assert step.rows.sizes == (10, 12) and max(step.rows.labels[10:]) < 4
        head = step.before.classifier1
        seen_in_evaluation = copy.deepcopy(step.before).eval().features(normalised(x))[0].detach()
        length = sum(row.norm() for row in head.weight.detach()[:4]) / 4
        for label in set(classes) - imprinted:
            mean = sum(direction(f) for f, own in zip(seen_in_evaluation, y, strict=True) if own == label)
            head.weight.detach()[label] = length * direction(mean)
        imprinted |= set(classes)
        views, labels = normalised(step.rows.images), step.rows.labels
        features, known = step.before.features(views)[0], 4 + len(classes)
        weights = torch.stack([direction(w) for w in head.weight])
        cosines = torch.stack([direction(f) @ weights.T for f in features])
        apart = [1 - direction(a) @ direction(b) for a, b in zip(features, taught.features(views)[0], strict=True)]
        pairs = []
        for row, label in zip(cosines, labels.tolist(), strict=True):
            rivals = sorted((row[c] for c in classes), key=lambda cosine: cosine.item()) if label < 4 else []
            pairs += [(1.5 - row[label] + rival).clamp_min(0) for rival in rivals]
        terms = {
            "cross_entropy": nll(head.scale * cosines[:, :known], labels),
            "distillation": 0.7 * math.sqrt(4 / len(classes)) * sum(apart) / 22,
            "ranking": 3 * sum(pairs) / len(pairs),
        }
        total = sum(terms.values())
        assert all(close(step.losses[name], term.detach()) for name, term in terms.items())
        gradients = gradients_of(total, step.before)
        names = [name for name, _ in step.before.named_parameters()]
        place = names.index("classifier1.weight")
        # Whatever moves the rows of old classes is undone.
        gradients[place][:4] = -DECAY * head.weight.detach()[:4]
        expect_update(step, gradients)
        assert torch.equal(step.after.classifier1.weight[:4].double(), head.weight[:4])


def check_lucir_apart(make, teach, batch):
    """Three rivals at hand, of which two count; in the first task it only classifies."""
    learner = make("lucir", classes=7, options={**SGD, "margin": 1.9})
    x, y = batch([0, 1] * 5)
    step = step_of(learner, x, y, 0)
    assert step.losses.keys() == {"loss", "cross_entropy"} and step.rows.sizes == (10, 0)
    teach(learner, tasks=(0, 1), steps=2)
    learner.observe(*batch([4, 5, 6] * 5), 2)
    learner.network.classifier1.weight.data[4:] = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    step = step_of(learner, *batch([4, 5, 6] * 5, seed=1), 2)
    weights = torch.stack([direction(w) for w in step.before.classifier1.weight])
    features = step.before.features(normalised(step.rows.images))[0]
    pairs = []
    for f, label in zip(features, step.rows.labels.tolist(), strict=True):
        cosines = direction(f) @ weights.T
        pairs += [1.9 - cosines[label] + s for s in cosines[4:].sort().values[1:]] if label < 4 else []
    assert close(step.losses["ranking"], sum(v.clamp_min(0) for v in pairs).detach() / len(pairs))


def shares_of(views, temperature: float) -> torch.Tensor:
    """By row of projections float64 [V, P], its shares of the others, zero for itself."""
    z = torch.stack([v / v.norm() for v in views])
    similar = (z @ z.T / temperature).exp()
    similar = similar * (1 - torch.eye(len(z), dtype=similar.dtype))
    return similar / similar.sum(1, keepdim=True)


def check_co2l(make, teach, batch, passes="joint"):
    """Anchors are views of the current task; the teacher sees the batch's statistics."""
    options = {**SGD, "augment": "scr", "temperature": 0.4, "distillation": 0.6, "passes": passes}
    learner = teach(make("co2l", options=options | {"teacher_temperature": 0.1}), steps=2)
    for layer in learner.network.projection1[::2]:
        layer.bias.data.zero_()  # else all projections would be alike
    learner.end_task()
    taught = copy.deepcopy(learner.network).double().train()
    x, y = batch([4, 5] * 5)
    step = step_of(learner, x, y, 2)
    rows = step.rows
    assert rows.sizes == (10, 12) and max(rows.labels[10:]) < 4
    views = learner.views.augmented(torch.cat([rows.images] * 2), learner.config.seed, rows.sequence).double()
    assert (views[:22] != views[22:]).flatten(1).any(1).all()
    parts = views.split(22) if passes == "separate" else [views]
    z = torch.cat([step.before.project(step.before.features(part))[0] for part in parts])
    # The teacher has all views in one pass.
    wanted = taught.project(taught.features(views))[0].detach()
    labels, total = rows.labels.tolist() * 2, 0
    shares = shares_of(z, 0.4)
    for i, label in enumerate(labels):
        own = [j for j, other in enumerate(labels) if other == label and j != i]
        total = total - shares[i, own].log().sum() / len(own) / 44 * (label in (4, 5))
    found, wanted = shares_of(z, 0.2), shares_of(wanted, 0.1)
    apart = [[j for j in range(44) if j != i] for i in range(44)]
    relations = -sum((wanted[i, others] * found[i, others].log()).sum() for i, others in enumerate(apart)) / 44
    expect_terms(step, {"contrastive": 0.4 / 0.07 * total, "distillation": 0.6 * relations})


def check_co2l_apart(make, teach, batch):
    check_co2l(make, teach, batch, "separate")


def check_co2l_probe(make, teach, batch):
    """The classifier that an evaluation fits, by an own optimiser on the memory's features."""
    learner = teach(make("co2l", options={**SGD, "probe_passes": 10, "probe_lr": 0.3}), steps=2)
    learner.end_task()
    filled, steps = learner.memory.filled, learner.steps
    ticks = []
    learner.after_step = lambda: ticks.append(1)
    learner.prepare_evaluation()
    assert len(ticks) == 10 + 1 and learner.steps == steps
    network = copy.deepcopy(learner.network).double().eval()
    features = network.features(normalised(learner.memory.images[:filled]))[0].detach()
    labels, sequence = learner.memory.labels[:filled].tolist(), learner.memory.seen << 24
    head = torch.nn.Linear(8, 6).double()
    torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
    optimiser, drawn = torch.optim.SGD(head.parameters(), lr=0.3, momentum=0.9), []
    for number in range(10):
        optimiser.param_groups[0]["lr"] = 0.3 * 0.2 ** ((number >= 6) + (number >= 7.5) + (number >= 9))
        words = random_words(learner.config.seed, sequence + number, filled, Purpose.FIT)
        chosen = []
        for which, within in zip(words[0].tolist(), words[1].tolist(), strict=True):
            stored = sorted(set(labels))
            own = [i for i, label in enumerate(labels) if label == stored[which * len(stored) >> 32]]
            chosen.append(own[within * len(own) >> 32])
        drawn += chosen
        optimiser.zero_grad()
        nll(head(features[chosen]), torch.tensor(labels)[chosen]).backward()
        optimiser.step()
    assert len(set(drawn)) > 0.9 * filled
    fitted = learner.network.classifier1
    assert close(fitted.weight.detach(), head.weight.detach(), 1e-3) and close(fitted.bias.detach(), head.bias.detach())
    # Only what changed the features or the memory calls for another fit.
    learner.prepare_evaluation()
    assert len(ticks) == 11
    teach(learner, tasks=(2,), steps=1)
    learner.prepare_evaluation()
    first = len(ticks)
    assert first > 11
    learner.rehearse(torch.arange(12))
    learner.prepare_evaluation()
    assert len(ticks) > first
    first = len(ticks)
    learner.end_task()
    learner.prepare_evaluation()
    assert len(ticks) > first and learner.resolve_expert() == ("linear", "1")


def prototype_term(means: list[dict[int, torch.Tensor]], temperature: float) -> torch.Tensor:
    """NT-Xent between the class means of two views."""
    p = [unit(torch.stack([view[c] for c in sorted(view)])) for view in means]
    count, s = len(p[0]), torch.cat(p) @ torch.cat(p).T / temperature
    terms = []
    for i, row in enumerate(s):
        others = [j for j in range(2 * count) if j != i]
        terms.append(row[others].exp().sum().log() - row[(i + count) % (2 * count)])
    return sum(terms) / len(terms)


def check_onpro(make, teach, batch):
    """A step of the first task, two of the second, and one of the third: both kinds of prototypes,
    and rows mixed from the second step of a later task on.
    """
    options = {"augment": "simclr", "rotations": 4, "temperature": 0.3, "per_class_cap": 2, "projection": 4}
    own = {"random_share": 0.5, "mixup": 0.9, "prototype_temperature": 0.7}
    learner = make("onpro", seed=1, options={**SGD, "lr": 0.01, **options, **own})
    memory, prototypes = learner.memory, None

    def by_hand(step, partners, shares):
        nonlocal prototypes
        rows, (given, replayed, shown) = step.rows, step.rows.sizes
        incoming, other, seen = rows.images.split(rows.sizes)
        turned, classified = half_turns(rows.images[: given + replayed]), other if replayed else incoming
        parts = [turned, seen, classified]
        views = learner.views.augmented(torch.cat(parts), learner.config.seed, rows.sequence).double()
        second, seen_second, third = views.split([*map(len, parts)])
        passing = [torch.cat([normalised(turned), second]), torch.cat([normalised(seen), seen_second]), third]
        features = [step.before.features(part)[0] for part in passing]
        z, logits = step.before.projection1(features[0]), step.before.classifier1(features[2])
        outputs = [out.view(2, 4, given + replayed, -1) for out in (z, features[0])]
        y, y_other, y_seen = rows.labels.split(rows.sizes)
        numbers = torch.cat([y.double(), (1 - shares) * y_other + shares * partners])
        terms = rotated_terms(*outputs, numbers, (given, replayed), rows.extras["offsets"], 0.3)

        def means(z, labels):
            return {c: unit(z)[labels == c].mean(0) for c in set(labels.tolist())}

        new = [means(view, y) for view in outputs[0][:, 0, :given]]
        seen = [means(view, y_seen) for view in step.before.projection1(features[1]).view(2, shown, -1)]
        prototypes = torch.zeros(6, 4).double()
        for c in seen[0]:
            prototypes[c] = (seen[0][c] + seen[1][c]).detach() / 2
        terms["incoming_prototypes"], terms["seen_prototypes"] = prototype_term(new, 0.7), prototype_term(seen, 0.7)
        if replayed:
            each = (1 - shares) * each_nll(logits, y_other) + shares * each_nll(logits, partners)
            terms["cross_entropy"] = each.mean()
        else:
            terms["cross_entropy"] = nll(logits, y)
        expect_terms(step, terms, 0.01)
        assert close(step.after.prototypes, prototypes, 1e-3)

    none = torch.zeros(0)
    teach(learner, tasks=(0,), steps=2)
    step = step_of(learner, *batch([0, 1] * 5, seed=7), 0)
    assert step.rows.sizes == (10, 0, 12)
    by_hand(step, none.long(), none)
    for task in (1, 2):
        step = step_of(learner, *batch([2 * task, 2 * task + 1] * 5, seed=8 + task), task)
        assert step.rows.sizes == (10, *[min(12, 4 * task + 4)] * 2)
        slots = step.rows.slots.split(step.rows.sizes[1:])
        assert torch.equal(*slots) and not step.rows.extras["shares"].any()
        by_hand(step, step.rows.labels.split(step.rows.sizes)[1], torch.zeros(len(slots[0])).double())
        chosen, images, labels = [], memory.images.clone(), memory.labels.clone()

        def noted(drawn, stored, given, *numbers, taken=chosen):
            taken += [(drawn, stored.clone(), given.clone(), *numbers), feedback(drawn, stored, given, *numbers)]
            return taken[1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mose_fast.methods.onpro.feedback", noted)
            step = step_of(learner, *batch([2 * task, 2 * task + 1] * 5, seed=18 + task), task)
        assert len(chosen) == 2
        (drawn, stored, given, *numbers), (one, other, shares) = chosen
        assert torch.equal(step.rows.slots.split(step.rows.sizes[1:])[1], drawn) and numbers[:2] == [0.5, 0.9]
        assert torch.equal(stored, labels[:30]) and close(given, prototypes, 1e-3) and (shares > 0).any()
        mixed = (1 - shares.double())[:, None, None, None] * images[one] + shares[:, None, None, None] * images[other]
        found = step.rows.images.split(step.rows.sizes)[1]
        assert (found - mixed).abs().max() < 0.502
        assert torch.equal(step.rows.labels.split(step.rows.sizes)[1], labels[one])
        by_hand(step, labels[other], shares.double())


def check_il2a(make, teach, batch, passes="joint"):
    """Mixed rows and their classes, replay, features of all rows, and means of old classes."""
    options = {**SGD, "temperature": 0.5, "distillation": 0.3, "semantic": 0.7, "prototypes": 9, "ratio": 1.5}
    learner = make(
        "il2a", classes=7, options=options | {"largest_task": 4, "mixes": 4, "least_share": 0.46, "passes": passes}
    )
    teach(learner, steps=3)
    images, labels = zip(*[batch([2, 3] * 5, seed=100 + step) for step in range(3)], strict=True)
    learner.end_task()
    assert not any(p.any() for p in learner.network.projection1.parameters())
    taught = copy.deepcopy(learner.network).double().eval()
    views, labels = normalised(torch.cat(images)), torch.cat(labels)
    of_task = taught.features(views)[0].detach()
    for label in (2, 3):
        own = of_task[labels == label]
        assert close(learner.means[label], own.mean(0), 1e-3) and close(learner.covariances[label], own.T.cov(), 1e-3)
    learner.covariances += torch.eye(8)  # those of this small network hardly matter

    x, y = batch([4, 5, 6, 4, 5, 6, 4, 5, 6, 4])
    step = step_of(learner, x, y, 2)
    rows, seed, sequence = step.rows, learner.config.seed, step.rows.sequence
    pairs = []
    for number in range(4):
        order = permutation(seed, 4 * sequence + number, 10, Purpose.MIX).tolist()
        pairs += [(a, b) for a, b in enumerate(order) if y[a] != y[b]]
    words = torch.stack(
        [w for lane in range(1, 11) for w in random_words(seed, sequence, len(pairs), Purpose.MIX, "cpu", lane)]
    )
    shares = [sorted(column)[19] / 2**32 for column in words[:39].T.tolist()]
    shares = [share if 0.46 <= share <= 0.54 else 0.5 for share in shares]
    assert 10 < len(pairs) < 40 and len(set(shares)) > 2
    given, replayed = normalised(rows.images).split(rows.sizes)
    mixed = [s * given[a] + (1 - s) * given[b] for s, (a, b) in zip(shares, pairs, strict=True)]
    number = {(4, 5): 0, (4, 6): 1, (5, 6): 2}
    labels = torch.tensor([*y.tolist(), *(7 + number[tuple(sorted((int(y[a]), int(y[b]))))] for a, b in pairs)])
    new = torch.cat([given, torch.stack(mixed)])
    parts = [new, replayed] if passes == "separate" else [torch.cat([new, replayed])]
    features = torch.cat([step.before.features(part)[0] for part in parts])
    head, apart = step.before.classifier1, step.before.projection1
    wide = torch.cat([head(features), apart(features)], 1) / 0.5
    differences = features - taught.features(torch.cat([new, replayed]))[0]
    drawn = random_words(seed, sequence, 9, Purpose.RETRIEVAL)[0].tolist()
    means = []
    for k in (word * 4 >> 32 for word in drawn):
        mean, covariance = learner.means[k].double(), learner.covariances[k].double()
        logits = [
            w @ mean + b + 0.75 * (w - head.weight[k]) @ covariance @ (w - head.weight[k])
            for w, b in zip(head.weight, head.bias, strict=True)
        ]
        means.append(each_nll(torch.stack(logits)[None] / 0.5, torch.tensor([k])))
    expect_terms(
        step,
        {
            "incoming": nll(wide[: len(new), :10], labels),
            "replayed": nll(wide[len(new) :, :7], rows.labels[10:]),
            "distillation": 0.3 * (differences**2).sum().sqrt(),
            "semantic": 0.7 * sum(means)[0] / 9,
        },
    )


def check_il2a_apart(make, teach, batch):
    check_il2a(make, teach, batch, "separate")


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}

# Check that must find it, function, text, text with the fault.
FAULTS = [
    # What all share.
    ("er", "model.Model.minimise", "self.optimiser.zero_grad(set_to_none=True)", "pass"),
    ("er", "replay.ReplayLearner.build_optimiser", ", weight_decay=o.weight_decay", ""),
    ("er", "replay.ReplayLearner.build_optimiser", "lr=o.lr", "lr=1e-2"),
    ("er", "replay.ReplayLearner.rows", "self.memory.labels[slots]", "self.memory.labels[slots.flip(0)]"),
    ("er", "replay.ReplayLearner.retrieve", "o.buffer_batch", "o.buffer_batch // 2"),
    ("er_apart", "replay.ReplayLearner.retrieve", 'self.task if o.replay_from == "others" else None', "None"),
    ("er_apart", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "False"),
    ("er", "replay.ReplayLearner.train_on", "if separate else [views]", "if not separate else [views]"),
    ("finetune", "base.Learner.build_optimiser", "o.weight_decay", "0.0"),
    ("finetune", "base.Learner.build_optimiser", "(o.beta1, o.beta2)", "(0.9, 0.999)"),
    # ER
    ("er", "er.Er.losses", '== "pooled_mean"', '!= "pooled_mean"'),
    (
        "er",
        "replay.ReplayLearner.losses",
        "cross_entropy(logits,",
        'cross_entropy(logits.detach() if "r" in name else logits,',
    ),
    ("er_iterations", "base.Learner.prepare", "self.config.options.iterations", "1"),
    (
        "er_iterations",
        "base.Learner.prepare",
        "plan = self.plan(x, y)",
        "plan = plans[0] if plans else self.plan(x, y)",
    ),
    ("er_iterations", "base.Learner.prepare", "self.data.ahead += 1", "self.data.ahead += len(plans) == 1"),
    ("scr", "base.Learner.review", "self.model.weighted(_REVIEW_WEIGHT)", "self.model.weighted(1.0)"),
    ("scr", "model.Model.weighted", "self._weight = 1.0", "pass"),
    ("er_review", "base.Learner.review", "if len(slots) == config.options.buffer_batch:", "if True:"),
    ("er_review", "base.Learner.review", "self.rehearse(slots)", "self.rehearse(order[: len(slots)])"),
    ("er_review", "model.Model._backward", "self._weight * loss", "loss"),
    ("er_review", "base.Learner.on_task_end", "self.config.options.review", "False"),
    ("er_balanced", "base.Learner.build_memory", '== "balanced"', '== "off"'),
    # Fine-tuning
    ("finetune", "finetune.Finetune.retrieve", "y[:0]", "super().retrieve(x, y)"),
    # A-GEM
    ("agem", "agem.project", ".clamp_max(0)", ".clamp_max(0) * 0"),
    ("agem", "agem.project", ".clamp_max(0)", ""),
    ("agem", "agem.project", "gradient - opposed", "gradient + opposed"),
    ("agem", "agem.Agem.train_on", "project(gradient, reference)", "project(gradient, reference) + reference"),
    ("agem", "agem.Agem.train_on", "project(gradient, reference)", "project(reference, gradient)"),
    ("agem_reference", "replay.ReplayLearner.retrieve", 'self.task if o.replay_from == "others" else None', "None"),
    # MIR
    ("mir", "mir.Mir.interference", "p - virtual_lr", "p + virtual_lr"),
    ("mir", "mir.Mir.interference", "batch_statistics(self.network)", "batch_statistics(nn.Sequential())"),
    ("mir", "mir.Mir.interference", 'F.cross_entropy(after, labels, reduction="none") - ', "0 - "),
    ("mir", "mir.Mir.retrieve", "self.interference(x, y, candidates)", "-self.interference(x, y, candidates)"),
    ("mir", "mir.Mir.retrieve", "o.candidates", "o.buffer_batch"),
    (
        "mir_as_optimiser",
        "mir.Mir.interference",
        "o.lr if o.virtual_lr is None else o.virtual_lr",
        "o.virtual_lr or 0.1",
    ),
    ("mir", "mir.Mir.interference", "o.lr if o.virtual_lr is None else o.virtual_lr", "o.lr"),
    # GSS
    ("gss", "base.Learner.observe", "self.config.options.iterations", "1"),
    ("gss", "gss.Gss.train_batch", 'self.config.options.steps == "joint"', "True"),
    ("gss_joint", "gss.Gss.train_batch", 'self.config.options.steps == "joint"', "False"),
    ("gss", "gss.Gss.store", ".amax(1)", ".mean(1)"),
    ("gss", "gss.Gss.store", ">= o.threshold", ">= 1.5"),
    ("gss_joint", "gss.Gss.store", ">= o.threshold", ">= -1"),
    (
        "gss",
        "gss.Gss.gradients",
        "self.views.normalise(x.flatten(0, 1))",
        "self.views.normalise(255 - x.flatten(0, 1))",
    ),
    # ASER
    ("aser", "aser.Aser.losses", "return ", "return super().losses(outputs, rows) or "),
    ("aser", "aser.Aser.retrieve", "self.memory.seen <= self.memory.capacity", "True"),
    ("aser", "aser.Aser.retrieve", "o.score", '"asvm"'),
    (
        "aser",
        "aser.Aser.store",
        "self.memory.offer(x, y, self.task, index, self.features)",
        "super().store(x, y, index)",
    ),
    (
        "aser",
        "aser.Aser.features",
        "self.outputs(images)[0][0]",
        "self.forward(self.views.normalise(images)).features.detach()",
    ),
    # ER-AML
    ("er_aml", "er_aml.metric_loss", "directions(contrast)", "directions(contrast).detach()"),
    ("er_aml", "er_aml.metric_loss", "directions(anchors)", "directions(anchors).detach()"),
    ("er_aml", "er_aml.metric_loss", "-temperature / _BASE_TEMPERATURE", "-1"),
    ("er_aml", "er_aml.ErAml.losses", "self.config.options.temperature", "0.1"),
    ("er_aml", "er_aml.ErAml.losses", "slice(incoming,", "slice(0,"),
    ("er_aml", "er_aml.ErAml.losses", "len(rows.labels) - replayed)", "incoming + positives)"),
    ("er_aml", "er_aml.draw_pairs", "same[itself, len(stored) + itself] = False", "pass"),
    ("er_aml_apart", "er_aml.ErAml.view_sizes", "positives + negatives", "positives, negatives"),
    (
        "er_aml",
        "er_aml.ErAml.losses",
        "outputs.logits[first:], rows.labels[first:]",
        "outputs.logits[contrast], rows.labels[contrast]",
    ),
    ("er_aml", "er_aml.ErAml.losses", "outputs.logits[first:], rows.labels[first:]", "outputs.logits, rows.labels"),
    ("er_aml", "er_aml.ErAml.losses", "if positives:", "if False:"),
    ("er_aml", "er_aml.ErAml.plan", "allowed[y if", "allowed[torch.arange(6) if"),
    ("er_aml", "er_aml.ErAml.plan", "memory.labels[slots.clamp(min=0)], y", "memory.labels[slots.clamp(min=0)] * 0, y"),
    ("er_aml", "er_aml.ErAml.classification_head", '== "cosine"', '!= "cosine"'),
    # ER-ACE
    ("er_ace", "er_ace.ErAce.losses", "incoming.masked_fill(~present, -torch.inf)", "incoming"),
    ("er_ace", "er_ace.ErAce.losses", "masked_fill(~present", "masked_fill(present"),
    ("er_ace", "er_ace.ErAce.losses", "[:, None] == y)", "[:, None] == rows.labels)"),
    ("er_ace", "er_ace.ErAce.losses", "-torch.inf", "-5.0"),
    ("er_ace", "er_ace.ErAce.losses", "cross_entropy(replayed,", "cross_entropy(replayed.masked_fill(~present, -50),"),
    ("er_ace", "er_ace.ErAce.losses", "incoming.masked_fill", "incoming.detach().masked_fill"),
    ("er_ace", "er_ace.ErAce.losses", "if not len(replayed)", "if False"),
    ("er_ace", "er_ace.ErAce.classification_head", '== "cosine"', '!= "cosine"'),
    ("er_ace_apart", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "False"),
    # GDumb
    ("gdumb", "gdumb.Gdumb.prepare_evaluation", "learning_rate(number, o.lr_low, o.lr)", "o.lr"),
    ("gdumb", "gdumb.learning_rate", "(0.1, 1.0)", "(1.0, 1.0)"),
    ("gdumb", "gdumb.Gdumb.prepare_evaluation", "permutation(self.config.seed, sequence,", "permutation(0, 0,"),
    ("gdumb", "gdumb.Gdumb.prepare_evaluation", "self.model = self.build_model()", "pass"),
    ("gdumb", "gdumb.Gdumb.prepare_evaluation", "else o.passes_before", "else o.passes_before + 1"),
    ("gdumb", "gdumb.Gdumb.train_on", "rows.labels[partners]", "rows.labels"),
    ("gdumb", "gdumb.Gdumb.train_on", "share * whole + (1 - share)", "(1 - share) * whole + share"),
    ("gdumb", "gdumb.Gdumb.train_on", "config.options.cutmix,", "1.0,"),
    ("gdumb", "gdumb.Gdumb.train_on", "nn.utils.clip_grad_norm_(self.network.parameters(), _LARGEST_NORM)", "pass"),
    ("gdumb", "gdumb.Gdumb.build_optimiser", ", weight_decay=o.weight_decay", ""),
    ("gdumb", "gdumb.Gdumb.build_optimiser", "momentum=_MOMENTUM", "momentum=0.0"),
    # SCR
    ("scr", "scr.Scr.losses", "self.config.options.temperature", "0.07"),
    ("scr", "scr.Scr.losses", "outputs.projections", "outputs.features"),
    ("scr", "scr.Scr.losses", "rows.labels.repeat(2)", "rows.labels.repeat_interleave(2)"),
    (
        "scr",
        "scr.Scr.losses",
        "outputs.projections",
        "torch.cat([(z := outputs.projections)[: len(z) // 2], z[len(z) // 2 :].detach()])",
    ),
    ("scr", "scr.Scr.make_views", "super().make_views(rows)", "self.views.normalise(rows.images)"),
    ("scr_apart", "scr.Scr.view_sizes", "len(rows.labels), len(rows.labels)", "(2 * len(rows.labels),)"),
    # DER++
    ("derpp", "derpp.Derpp.losses", "o.alpha * ", ""),
    ("derpp", "derpp.Derpp.losses", "o.beta * ", ""),
    ("derpp", "derpp.Derpp.losses", "distilled.float()", "distilled.float().detach()"),
    (
        "derpp",
        "derpp.Derpp.losses",
        "distilled.float(), stored",
        "distilled.float()[:, self.seen], stored[:, self.seen]",
    ),
    ("derpp", "derpp.Derpp.losses", "rows.slots[: len(distilled)]", "rows.slots[len(distilled) :]"),
    ("derpp", "derpp.Derpp.plan", "replayed = self.retrieve(x, y)", "replayed = distilled"),
    ("derpp", "derpp.Derpp.after_update", "outputs.logits[", "self.forward(rows.views).logits["),
    ("derpp", "derpp.Derpp.after_update", ".detach()", ".detach().flip(0)"),
    # GSA
    ("gsa", "gsa.class_weights", "pulled / pushed", "pushed / pulled"),
    ("gsa", "gsa.class_weights", " - 1)", ")"),
    ("gsa", "gsa.Gsa.count", "1 - p", "p"),
    ("gsa", "gsa.Gsa.count", "own | (sums[0] == 0)", "own"),
    ("gsa", "gsa.Gsa.count", "own | (sums[0] == 0)", "sums[0] == 0"),
    ("gsa", "gsa.Gsa.losses", "self.count(logits.detach().float(), replayed)", "pass"),
    ("gsa", "gsa.Gsa.losses", 'if rows.extras["weighted"]', "if True"),
    ("gsa", "gsa.Gsa.losses", 'if rows.extras["weighted"]', "if False"),
    ("gsa", "gsa.Gsa.losses", 'new, rows.extras["current"]', "new"),
    ("gsa_apart", "gsa.Gsa.losses", 'new, rows.extras["current"]', "new"),
    ("gsa", "gsa.Gsa.losses", "self.config.options.buffer_weight * ", ""),
    ("gsa", "gsa.Gsa.plan", "o.buffer_batch * now // seen,", "o.buffer_batch,"),
    ("gsa", "gsa.Gsa.plan", "len(x) + len(current)", "len(x)"),
    ("gsa", "gsa.Gsa.plan", " if memory.filled else 0", ""),
    ("gsa", "gsa.Gsa.plan", "only=self.task", "others=self.task"),
    ("gsa", "gsa.Gsa.plan", "others=self.task if others else None", "others=None"),
    ("gsa", "gsa.Gsa.plan", "(seen - now) // seen", "now // now"),
    ("gsa", "gsa.Gsa.extras", "> o.warm_up", "> o.warm_up + 1"),
    ("gsa_apart", "gsa.Gsa.extras", "o.current_classes", '"seen"'),
    ("gsa", "gsa.Gsa.begin_task", '["steps_of_task"] = 0', '.setdefault("steps_of_task", 0)'),
    ("gsa", "gsa.Gsa.make_views", "one.flip(2) if self.mirrored else one", "one"),
    ("gsa", "gsa.two_sets", 'values[: rows.extras["copies"]]', "values[:0]"),
    ("gsa_apart", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "False"),
    # SS-IL, and what methods with exemplars share.
    ("ssil", "exemplars.ExemplarLearner.on_task_end", "super().on_task_end()", "pass"),
    ("ssil", "exemplars.ExemplarLearner.on_task_end", "self.memory.rebuild(self.seen, self.task, features)", "pass"),
    ("ssil", "exemplars.ExemplarLearner.begin_task", "len(self.seen)", "len(self.seen) + 1"),
    ("ssil_apart", "exemplars.ExemplarLearner.current", "self.config.options.current_classes", '"seen"'),
    ("ssil", "replay.ReplayLearner.build_model", 'self.teacher_mode == "train"', "True"),
    ("ssil", "ssil.task_wise_distillation", "temperature**2 * ", ""),
    ("ssil", "ssil.task_wise_distillation", "logits / temperature", "logits / 2.0"),
    ("ssil", "ssil.task_wise_distillation", " / len(student)", ""),
    (
        "ssil",
        "ssil.task_wise_distillation",
        "log_softmax(teacher), log_softmax(student)",
        "log_softmax(student), log_softmax(teacher)",
    ),
    ("ssil", "ssil.task_wise_distillation", "tasks[:, None] != tasks", "(tasks[:, None] >= 6) | (tasks >= 6)"),
    ("ssil", "ssil.Ssil.losses", "len(y) / total * ", ""),
    ("ssil", "ssil.Ssil.losses", "outputs.logits.float(), taught", "outputs.logits.float().detach(), taught"),
    ("ssil", "ssil.Ssil.extras", "self.mask(self.current())", "self.mask(self.seen)"),
    ("ssil", "ssil.Ssil.extras", '"old": self.mask(self.old)', '"old": self.mask(self.seen)'),
    ("ssil", "ssil.Ssil.extras", "bool(self.old)", "False"),
    ("ssil", "ssil.Ssil.on_task_end", "list(self.current())", "list(self.old)"),
    ("ssil_apart", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "False"),
    # OCM
    ("ocm", "ocm.Ocm.losses", "y.repeat(2)", "y.repeat_interleave(2)"),
    ("ocm", "ocm.view_information", "2 * _mean_of_class", "_mean_of_class"),
    ("ocm", "ocm.view_information", "count // 2", "count // 4"),
    ("ocm", "ocm.view_information", "torch.eye(count,", "torch.zeros(count, count,"),
    ("ocm", "ocm.class_information", "temperature)", "0.07)"),
    ("ocm", "ocm.Ocm.losses", 'rows.extras["offsets"][1]', 'rows.extras["offsets"][0]'),
    ("ocm", "rotated.mixed_similarities", "p @ (p + ", "p @ ("),
    ("ocm", "rotated.mixed_similarities", "directions(features, _EPS)", "features"),
    ("ocm", "rotated.mixed_similarities", "v.index_select", "v.detach().index_select"),
    ("ocm", "ocm.Ocm.losses", ".chunk(2)[0]", ".chunk(2)[1]"),
    ("ocm", "ocm.Ocm.losses", "directions(taught.projections", "directions(own.detach()"),
    ("ocm", "ocm.Ocm.losses", "torch.where(earlier, squares, 0)", "squares"),
    ("ocm", "ocm.Ocm.losses", "(replayed * earlier.sum())", "(0 * replayed + earlier.sum())"),
    ("ocm", "ocm.Ocm.losses", "rows.views[-replayed:]", "rows.views[-2 * replayed : -replayed]"),
    ("ocm", "ocm.Ocm.losses", "rows.labels[incoming:] if", "rows.labels[:replayed] if"),
    ("ocm", "ocm.Ocm.make_views", "rows.images[rows.sizes[0] :] if", "rows.images[: rows.sizes[1]] if"),
    ("ocm", "replay.ReplayLearner.build_model", 'self.teacher_mode == "train"', "False"),
    ("ocm", "ocm.Ocm.extras", "if c not in self.data.current", ""),
    ("ocm", "ocm.Ocm.plan", "self.alone", "False"),
    ("ocm", "rotated.RotatedLearner.retrieve", "o.per_class_cap * len(self.seen)", "o.buffer_batch"),
    ("ocm", "rotated.RotatedLearner.rotated_labels", "self.classes * blocks", "0 * blocks"),
    ("ocm", "rotated.RotatedLearner.view_parts", "self.views.normalise(rotated)", "views[: len(rotated)]"),
    ("ocm", "rotated.rotations", "half.flip(1, 2)", "half.flip(2)"),
    ("ocm", "rotated.rotations", "in left for other in right", "in right for other in left"),
    ("ocm", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "False"),
    ("ocm_joint", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "True"),
    # BiC
    ("bic", "bic.Bic.plan", "if not held", "if True"),
    ("bic", "bic.Bic.store", "index, held)", "index)"),
    ("bic", "bic.Bic.held_out", "came[label] < wanted", "came[label] <= wanted"),
    ("bic", "bic.Bic.held_out", "len(known)", "2"),
    ("bic", "bic.Bic.extras", "len(old) / len(seen)", "len(old) / self.classes"),
    ("bic_known", "bic.Bic.extras", "self.current()", "self.data.current"),
    ("bic", "bic.Bic.extras", '"seen": self.mask(seen)', '"seen": self.mask(range(6))'),
    ("bic", "bic.Bic.extras", '"old": self.mask(old)', '"old": self.mask(seen)'),
    ("bic", "bic.Bic.losses", '(1 - extras["share"]) * ', ""),
    ("bic", "bic.Bic.losses", 'extras["share"] * distillation', "distillation"),
    ("bic", "bic.Bic.losses", ".sum(1).mean()", ".mean()"),
    ("bic", "bic.Bic.losses", "(taught, outputs.logits)", "(outputs.logits, taught)"),
    ("bic", "bic.log_softmax_within", "logits / temperature", "logits"),
    ("bic", "bic.log_softmax_within", "(~classes, -torch.inf)", "(~classes, -3.0)"),
    ("bic", "bic.Bic.forward", "self.network.classifier1.forget()", "pass"),
    ("bic", "bic.Bic.on_task_end", "self.correct()", "pass"),
    ("bic", "bic.Bic.on_task_end", "self.teacher.take(self.network)", "pass"),
    ("bic", "bic.Bic.correct", "numbers[0] * logits + numbers[1], logits", "numbers[0] * logits, logits"),
    ("bic", "bic.Bic.correct", ">= len(self.old)", ">= 0"),
    ("bic", "bic.Bic.correct", "range(o.bias_steps)", "range(3)"),
    ("bic", "bic.Bic.correct", "adam.step()", "pass"),
    ("bic", "bic.CorrectedLinear.forward", "logits if self.training else", ""),
    ("bic", "bic.CorrectedLinear.forward", "* self.scale + self.shift", "* self.scale"),
    # CCIL
    ("ccil", "ccil.mean_distillation", "temperature**2 * ", ""),
    ("ccil", "ccil.mean_distillation", " / old.sum()", ""),
    ("ccil", "ccil.mean_distillation", "(teacher, student)", "(student, teacher)"),
    ("ccil", "ccil.Ccil.classification_head", "self.config.options.scale", "1.0"),
    ("ccil", "ccil.Ccil.classification_head", "learned_scale=True", "learned_scale=False"),
    ("ccil", "ccil.Ccil.extras", '"current": self.mask(current)', '"current": self.mask(known)'),
    ("ccil", "ccil.Ccil.extras", '"known": self.mask(known)', '"known": self.mask(range(6))'),
    ("ccil", "ccil.Ccil.extras", '"old": self.mask(self.old)', '"old": self.mask(known)'),
    ("ccil_known", "ccil.Ccil.extras", "self.current()", "self.data.current"),
    ("ccil", "ccil.Ccil.extras", "** o.power", "** 0.66"),
    ("ccil", "ccil.Ccil.extras", "len(known) / len(current)", "len(known) / len(self.old or [0])"),
    ("ccil", "ccil.Ccil.extras", "o.distillation * ", "5.0 * "),
    ("ccil", "ccil.Ccil.losses", "torch.stack(kept).sum()", "torch.stack(kept).mean()"),
    ("ccil", "ccil.Ccil.losses", "self.config.options.temperature", "2.0"),
    ("ccil", "ccil.Ccil.losses", "s.float(), t.float()", "s.float().detach(), t.float()"),
    # LUCIR
    ("lucir", "lucir.feature_distillation", "directions(taught)", "directions(features)"),
    ("lucir", "lucir.feature_distillation", "directions(features) *", "directions(features).detach() *"),
    ("lucir", "lucir.margin_ranking", "old[labels][:, None] & ", ""),
    ("lucir", "lucir.margin_ranking", "masked_fill(~new", "masked_fill(new"),
    ("lucir", "lucir.margin_ranking", "margin - own + nearest", "margin - own.detach() + nearest"),
    ("lucir", "lucir.margin_ranking", "counts.sum().clamp_min(1)", "len(labels)"),
    ("lucir_apart", "lucir.margin_ranking", "min(rivals, cosines.shape[1])", "1"),
    ("lucir_apart", "lucir.margin_ranking", "min(rivals, cosines.shape[1])", "3"),
    ("lucir", "lucir.Lucir.losses", "o.ranking * ", ""),
    ("lucir", "lucir.Lucir.losses", "rows.labels, known)", "rows.labels)"),
    ("lucir", "lucir.Lucir.losses", 'extras["weight"] * ', ""),
    ("lucir", "lucir.Lucir.extras", "math.sqrt(", "("),
    ("lucir", "lucir.Lucir.extras", "len(current)", "self.classes"),
    ("lucir_apart", "lucir.Lucir.extras", "bool(self.old)", "True"),
    ("lucir", "lucir.Lucir.train_on", "weight.copy_(torch.where(kept[:, None], before, weight))", "pass"),
    ("lucir", "lucir.Lucir.train_on", "self.imprint(rows)", "pass"),
    ("lucir", "lucir.Lucir.imprint", "length * ", ""),
    ("lucir", "lucir.Lucir.imprint", ' & extras["fresh"][:, None]', ""),
    ("lucir", "lucir.Lucir.imprint", "self.network.eval()", "self.network.train()"),
    ("lucir", "lucir.Lucir.imprint", "directions(features))", "features)"),
    ("lucir", "lucir.Lucir.plan", 'self.data.own["imprinted"] = len(seen)', "pass"),
    ("lucir", "lucir.Lucir.classification_head", "learned_scale=True", "learned_scale=False"),
    ("lucir", "lucir.Lucir.classification_head", "self.config.options.scale", "1.0"),
    # Co2L
    ("co2l", "co2l.similarities", "F.normalize(projections.float(), dim=1)", "projections.float()"),
    ("co2l", "co2l.asymmetric_contrastive_loss", "torch.where(anchors, each, 0).mean()", "each[anchors].mean()"),
    ("co2l", "co2l.asymmetric_contrastive_loss", "torch.where(anchors, each, 0)", "each"),
    ("co2l", "co2l.asymmetric_contrastive_loss", " / _BASE_TEMPERATURE", ""),
    ("co2l", "co2l.asymmetric_contrastive_loss", " / positive.sum(1)", ""),
    ("co2l", "co2l.relation_distillation", "(taught, taught_temperature)", "(taught, temperature)"),
    ("co2l", "co2l.relation_distillation", "(projections, temperature)", "(projections.detach(), temperature)"),
    ("co2l", "co2l.Co2l.losses", "o.distillation * ", ""),
    ("co2l", "co2l.Co2l.losses", "o.temperature", "0.5"),
    ("co2l", "co2l.Co2l.losses", "outputs.projections", "outputs.features"),
    ("co2l", "co2l.Co2l.losses", "rows.labels.repeat(2)", "rows.labels.repeat_interleave(2)"),
    ("co2l", "co2l.Co2l.make_views", "[rows.images, rows.images]", "[rows.images, rows.images.flip(0)]"),
    ("co2l", "co2l.Co2l.extras", "self.mask(self.current())", "self.mask(self.seen)"),
    ("co2l_apart", "co2l.Co2l.view_sizes", "len(rows.labels), len(rows.labels)", "(2 * len(rows.labels),)"),
    ("co2l_probe", "co2l.Co2l.on_task_end", 'self.data.own["fitted"] = None', "pass"),
    ("co2l_probe", "co2l.Co2l.prepare_evaluation", 'self.data.own["fitted"] = state', "pass"),
    ("co2l_probe", "co2l.Co2l.prepare_evaluation", "[self.steps, self.memory.seen]", "[self.memory.seen, 0]"),
    ("co2l_probe", "co2l.Co2l.prepare_evaluation", "o.probe_lr", "0.1"),
    ("co2l_probe", "co2l.Co2l.prepare_evaluation", "head.bias.copy_(bias)", "pass"),
    ("co2l_probe", "co2l.fit_probe", "sizes[drawn])]", "torch.ones_like(within))]"),
    ("co2l_probe", "co2l.fit_probe", "probe_rate(number, passes, lr)", "lr"),
    ("co2l_probe", "co2l.fit_probe", "_MOMENTUM * velocity", "0"),
    # OnPro
    ("onpro", "onpro.OnPro.plan", "> 1 and len(drawn)", "> 2 and len(drawn)"),
    ("onpro", "onpro.OnPro.plan", "> 1 and len(drawn)", "> 0 and len(drawn)"),
    ("onpro", "onpro.OnPro.plan", "self.rows(x, y, drawn, drawn)", "self.rows(x, y, drawn, drawn.flip(0))"),
    ("onpro", "onpro.OnPro.begin_task", '["steps_of_task"] = 0', '.setdefault("steps_of_task", 0)'),
    ("onpro", "onpro.OnPro.mixed", "torch.lerp(one, other,", "torch.lerp(other, one,"),
    ("onpro", "onpro.OnPro.mixed", "labels[place] = memory.labels[slots]", "labels[place] = memory.labels[partners]"),
    ("onpro", "onpro.OnPro.mixed", '"partners": memory.labels[partners]', '"partners": memory.labels[slots]'),
    ("onpro", "onpro.OnPro.make_views", "self.views.normalise(seen)", "augmented"),
    ("onpro", "onpro.OnPro.make_views", "replayed if len(replayed)", "seen if len(replayed)"),
    ("onpro", "onpro.OnPro.losses", "torch.lerp(*each, share)", "torch.lerp(*each[::-1], share)"),
    ("onpro", "onpro.OnPro.losses", "partners.double(), share.double()", "partners.double(), 0 * share.double()"),
    ("onpro", "onpro.OnPro.losses", "means.detach().mean(0)", "means.detach()[0]"),
    ("onpro", "onpro.OnPro.losses", "first[:incoming], second[:incoming]", "first[-incoming:], second[-incoming:]"),
    ("onpro", "onpro.OnPro.losses", "o.prototype_temperature", "0.5"),
    ("onpro", "onpro.OnPro.losses", "prototype_loss(means,", "prototype_loss(means.detach(),"),
    ("onpro", "onpro.prototype_loss", "itself | ~present", "~present"),
    ("onpro", "onpro.prototype_loss", "itself | ~present", "itself"),
    ("onpro", "onpro.class_means", "directions(projections, _EPS)", "projections"),
    # IL2A
    ("il2a", "il2a.semantic_augmentation", "ratio / 2", "ratio"),
    ("il2a", "il2a.semantic_augmentation", "weight - weight[drawn]", "weight - weight.detach()[drawn]"),
    ("il2a", "il2a.semantic_augmentation", " + bias", ""),
    ("il2a", "il2a.semantic_augmentation", "logits / temperature", "logits"),
    ("il2a", "il2a.draw_mixes", "sequence * rounds + n", "sequence"),
    ("il2a", "il2a.draw_mixes", "labels[a] != labels[b]", "labels[a] > labels[b]"),
    ("il2a", "il2a.draw_mixes", "high * (high - 1) // 2 + low", "high * (high + 1) // 2 - 1 - low"),
    ("il2a", "il2a.Mixes.mix", "(1 - share) *", "share *"),
    ("il2a", "il2a.Il2a.make_views", "mix(incoming)", "mix(incoming.flip(0))"),
    ("il2a", "il2a.Il2a.plan", "least=o.least_share", "least=0.4"),
    ("il2a", "il2a.Il2a.losses", "o.distillation * ", ""),
    ("il2a", "il2a.Il2a.losses", "o.semantic * ", ""),
    ("il2a", "il2a.Il2a.losses", "outputs.projections.float() / o.temperature", "outputs.projections.float()"),
    ("il2a", "il2a.Il2a.losses", "torch.linalg.vector_norm(", "torch.mean("),
    ("il2a", "il2a.Il2a.losses", "logits[new:], rows.labels[given:]", "logits[new:].detach(), rows.labels[given:]"),
    ("il2a_apart", "replay.ReplayLearner.train_on", 'self.config.options.passes == "separate"', "False"),
    ("il2a", "il2a.Il2a.plan", "rounds=o.mixes", "rounds=3"),
    ("il2a", "il2a.class_statistics", "own.mean(0)", "own.mean(0) * 0"),
    ("il2a", "il2a.class_statistics", "max(len(own) - 1, 1)", "len(own)"),
    ("il2a", "il2a.Il2a.on_task_end", "tensor.zero_()", "pass"),
    ("il2a", "il2a.Il2a.extras", "m * (m - 1) // 2", "m * (m - 1)"),
    ("il2a", "il2a.Il2a.extras", "torch.tensor(old)", "torch.tensor(old).flip(0)"),
]


@functools.cache
def mutant(where: str, old: str, new: str):
    """The owner of a function, its name, and the function with one change to its text."""
    module, *names = where.split(".")
    owner = importlib.import_module(f"mose_fast.methods.{module}")
    for name in names[:-1]:
        owner = getattr(owner, name)
    function = getattr(owner, names[-1])
    text = textwrap.dedent(inspect.getsource(function))
    if old not in text:
        raise LookupError(f"{where} no longer contains {old!r}: write its fault anew")
    # Inside a function that has __class__, so that super() works.
    body = textwrap.indent(text.replace(old, new), "    ")
    code = f"def build(__class__):\n{body}\n    return {names[-1]}"
    flags = __future__.annotations.compiler_flag
    scope: dict = {}
    exec(compile(code, f"<{where}: {new}>", "exec", flags, dont_inherit=True), function.__globals__, scope)
    return owner, names[-1], scope["build"](owner)


@pytest.mark.parametrize("name", CHECKS)
def test_steps_are_those_worked_out_by_hand(name, make, teach, batch):
    CHECKS[name](make, teach, batch)


@pytest.mark.parametrize(("check", "where", "old", "new"), FAULTS, ids=lambda text: text[:40])
def test_a_fault_is_found(check, where, old, new, make, teach, batch, monkeypatch):
    monkeypatch.setattr(*mutant(where, old, new))
    with pytest.raises(AssertionError):
        CHECKS[check](make, teach, batch)
