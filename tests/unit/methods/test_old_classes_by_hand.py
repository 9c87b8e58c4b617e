"""Methods that treat classes of earlier tasks apart, against steps worked out by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mose_fast.methods import Learner
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.draws import Purpose, permutation, random_words
from tests.unit.methods.by_hand import (
    DECAY,
    SGD,
    Step,
    close,
    direction,
    each_nll,
    expect_terms,
    expect_update,
    gradients_of,
    logits_of,
    nll,
    normalised,
    step_of,
)


@pytest.mark.parametrize("options", [{}, {"passes": "separate", "current_classes": "task"}])
def test_gsa(make, teach, batch, options):
    """Both losses of nine steps in three tasks, with weights from the sums over all of them; no
    loss knows a class that has not come.
    """
    own = {"buffer_weight": 3.0, "new_extra": 6, "warm_up": 1, **options}
    learner = make("gsa", options={**SGD, "lr": 0.01, **own})
    untrained = copy.deepcopy(learner.network.classifier1).double()
    pulled, pushed, weights_met = torch.zeros(6).double(), torch.zeros(6).double(), set()
    for number in range(9):
        task = number // 3
        classes, filled = [2 * task, 2 * task + 1], learner.memory.filled
        if number % 3 == 0:
            learner.begin_task(task, classes)
        x, y = batch(classes * 5 if number % 3 else classes[:1] * 10, seed=number)
        step = step_of(learner, x, y, task)
        start_anew(step, untrained, came_now(learner, number, classes))
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
            so_far = logits[1][:, : 2 * task + len(allowed)]
            for row, label in zip(so_far.detach().softmax(1), labels[1].tolist(), strict=True):
                pulled[label] += 1 - row[label]
                for c, p in enumerate(row):
                    pushed[c] += p if c != label else 0
            ratio = pulled[labels[1]] / pushed[labels[1]]
            weights = 2 / (1 + (1 - ratio).exp()) if number % 3 >= 1 else torch.ones(len(ratio)).double()
            weights_met.update(weights.tolist())
            terms["replayed"] = 3 * (weights * each_nll(so_far, labels[1])).sum() / len(weights)
        expect_terms(step, terms, 0.01)
        assert close(step.after.sums, torch.stack([pulled, pushed]), 1e-3)
    assert len(weights_met) > 20 and max(weights_met) > 1.1


def course_of(learner: Learner, batch, networks: list[ExpertNetwork]):
    """Nine batches in three tasks of two classes for a method with exemplars. Yields each one's
    task, all classes of it, those that came so far, and the step, in whose network before it the
    classifier's rows of classes that the losses had not yet are those of the untrained network.

    Args:
        networks: Gets the network, in float64, at the end of each task.
    """
    first, o = copy.deepcopy(learner.network.classifier1).double(), learner.config.options
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
        came = classes if number % 3 else classes[:1]
        replayed = step.rows.labels[step.rows.sizes[0] :].tolist()
        # With the classes that came in this task, from its second batch on, or without them.
        later = o.replay_from == "all" and task > 0 and number % 3 > 0
        assert max(replayed, default=-1) < 2 * task + 2 * later and (set(replayed) > {2 * task - 1, 2 * task}) >= later
        start_anew(step, first, came_now(learner, number, classes))
        yield task, classes, came, step


def came_now(learner: Learner, number: int, classes: list[int]) -> list[int]:
    """The classes that the losses have from batch ``number`` on, three of which make a task whose
    first one has its first class alone; none of the first batch, before which nothing was trained.
    """
    if learner.config.options.current_classes == "task":
        return [classes, [], []][number % 3] if number else []
    return [classes[:1], classes[1:], []][number % 3] if number else []


def start_anew(step: Step, first: torch.nn.Module, new: list[int]) -> None:
    """Gives the rows of new classes, in the network before a step, the untrained values."""
    for now, untrained in zip(step.before.classifier1.parameters(), first.parameters(), strict=True):
        if now.dim():
            now.data[new] = untrained.data[new]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"passes": "separate", "current_classes": "task", "replay_loss": "one_mean"}])
def test_ssil(make, teach, batch, options):
    """Separated cross-entropies, and a divergence within each old task."""
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
        pooled = options.get("replay_loss") == "one_mean"
        terms = {"incoming": each_nll(logits[:given, allowed], labels[:given] - 2 * task).sum()}
        terms["incoming"] /= total if pooled else given
        if task:
            terms["replayed"] = each_nll(logits[given:, : 2 * task], labels[given:]).sum()
            terms["replayed"] /= total if pooled else replayed
            taught, kept = logits_of(networks[-1].eval(), views).detach(), 0
            for first in range(0, 2 * task, 2):
                q, p = ((z[:, first : first + 2] / 3).softmax(1) for z in (taught, logits))
                kept = kept + 9 * (q * (q.log() - p.log())).sum() / total
            terms["distillation"] = kept
        expect_terms(step, terms, 0.01)


@pytest.mark.parametrize("options", [{}, {"current_classes": "task", "replay_loss": "one_mean"}])
def test_bic(make, teach, batch, options):
    """Distillation from corrected logits; held-out images; the correction as the best of two
    numbers.
    """
    # Of 45, 22 and 15 slots for a class, 4, 2 and 1 are held out.
    own = {"temperature": 3.0, "shift_penalty": 0.3, **options}
    learner = make("bic", memory=90, options={**SGD, "lr": 0.01, **own})
    networks, per_task = [], [0, 0, 0]
    for task, _, came, step in course_of(learner, batch, networks):
        given, replayed = step.rows.sizes
        per_task[task] += given
        assert replayed == (12 if task else 0)
        labels, views = step.rows.labels, normalised(step.rows.images)
        logits, old = logits_of(step.before, views), 2 * task
        known = old + (2 if options.get("current_classes") == "task" else len(came))
        if options.get("replay_loss") == "one_mean":
            terms = {"cross_entropy": nll(logits[:, :known], labels)}
        else:
            terms = {"incoming": nll(logits[:given, :known], labels[:given])}
            if task:
                terms["replayed"] = nll(logits[given:, :known], labels[given:])
        if task:
            before = networks[-1].eval()
            linear = before.features(views)[0] @ before.classifier1.weight.T + before.classifier1.bias
            taught = (linear * before.classifier1.scale + before.classifier1.shift).detach()
            q, p = ((z[:, :old] / 3).softmax(1) for z in (taught, logits))
            share = old / known
            terms = {name: (1 - share) * term for name, term in terms.items()}
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
    loss = nll(corrected, learner.memory.labels[held]) + 0.3 / 2 * numbers[1] ** 2
    (slope,) = torch.autograd.grad(loss, [numbers])
    assert slope.abs().max() < 1e-5 and (numbers - torch.tensor([1.0, 0.0])).abs().max() > 0.1
    assert head.scale.tolist() == [1] * 4 + [head.scale[4].item()] * 2
    assert head.shift.tolist() == [0] * 4 + [head.shift[4].item()] * 2
    assert torch.equal(learner.teacher.network.classifier1.scale.float(), head.scale.float())


@pytest.mark.parametrize("options", [{}, {"current_classes": "task"}])
def test_ccil(make, teach, batch, options):
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


def test_lucir(make, teach, batch):
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
            "incoming": nll(head.scale * cosines[:10, :known], labels[:10]),
            "replayed": nll(head.scale * cosines[10:, :known], labels[10:]),
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


def test_lucir_apart(make, teach, batch):
    """Three rivals at hand, of which two count; in the first task it only classifies."""
    learner = make("lucir", classes=7, options={**SGD, "margin": 1.9})
    x, y = batch([0, 1] * 5)
    step = step_of(learner, x, y, 0)
    assert step.losses.keys() == {"loss", "incoming"} and step.rows.sizes == (10, 0)
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


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_il2a(make, teach, batch, passes):
    """Mixed rows and their classes, replay, features of all rows, and means of old classes."""
    options = {**SGD, "temperature": 0.5, "distillation": 0.3, "semantic": 0.7, "prototypes": 9, "ratio": 1.5}
    learner = make(
        "il2a", classes=7, options=options | {"largest_task": 4, "mixes": 4, "least_share": 0.46, "passes": passes}
    )
    untrained = copy.deepcopy(learner.network.classifier1).double()
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
    start_anew(step, untrained, [4, 5, 6])
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
