"""Methods that compare features or projections, against steps worked out by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from mose_fast.memory.feedback import feedback
from mose_fast.ops.draws import Purpose, random_words
from tests.unit.methods.by_hand import (
    SGD,
    close,
    direction,
    each_nll,
    expect_terms,
    logits_of,
    nll,
    normalised,
    step_of,
    steps_of,
)


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_er_aml(make, teach, batch, passes):
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


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_er_ace(make, teach, batch, passes):
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


def test_er_ace_released(make, teach, batch):
    """Incoming rows have the logits of the batch's classes and of all from the highest label seen
    on, also where nothing is replayed.
    """
    learner = make("er-ace", classes=8, options={**SGD, "head": "linear", "incoming_classes": "released"})
    step = step_of(learner, *batch([0, 3] * 5), 0)
    logits = logits_of(step.before, normalised(step.rows.images))
    labels = torch.tensor([0, 1] * 5)
    expect_terms(step, {"incoming": nll(logits[:, [0, 3, 4, 5, 6, 7]], labels)})
    learner.observe(*batch([4, 5] * 5), 1)
    step = step_of(learner, *batch([1, 2] * 5), 2)
    logits = logits_of(step.before, normalised(step.rows.images))
    own = nll(logits[:10][:, [1, 2, 5, 6, 7]], labels)
    expect_terms(step, {"incoming": own, "replayed": nll(logits[10:], step.rows.labels[10:])})


def contrastive(projections, labels, temperature: float) -> torch.Tensor:
    z = projections / projections.norm(dim=1, keepdim=True)
    s, terms = (z @ z.T / temperature).unbind(0), []
    for i, row in enumerate(s):
        others = [j for j in range(len(labels)) if j != i]
        partition = row[others].exp().sum().log()
        own = [j for j in others if labels[j] == labels[i]]
        terms.append(partition - row[own].mean())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_scr(make, teach, batch, passes):
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


@pytest.mark.parametrize("passes", ["separate", "joint"])
def test_ocm(make, teach, batch, passes):
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


def shares_of(views, temperature: float) -> torch.Tensor:
    """By row of projections float64 [V, P], its shares of the others, zero for itself."""
    z = torch.stack([v / v.norm() for v in views])
    similar = (z @ z.T / temperature).exp()
    similar = similar * (1 - torch.eye(len(z), dtype=similar.dtype))
    return similar / similar.sum(1, keepdim=True)


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_co2l(make, teach, batch, passes):
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


def test_co2l_probe(make, teach, batch):
    """The classifier that an evaluation fits, by an own optimiser on the memory's features."""
    learner = teach(make("co2l", options={**SGD, "lr": 1e-3, "probe_passes": 10, "probe_lr": 0.3}), steps=2)
    learner.end_task()
    filled, steps = learner.memory.filled, learner.steps
    ticks = []
    learner.after_step = lambda: ticks.append(1)
    learner.prepare_evaluation()
    assert len(ticks) == 10 + 1 and learner.steps == steps
    network = copy.deepcopy(learner.network).double().eval()
    features = network.features(normalised(learner.memory.images[:filled]))[0].detach()
    assert float(features.std(0).max()) > 1e-3  # no collapse: it matters which images are drawn
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


def test_onpro(make, teach, batch):
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
