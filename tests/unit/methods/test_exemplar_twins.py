"""CCIL and BiC beside a plain trainer written from their papers: 210 steps of Adam over three tasks
give the same weights.

One step by hand cannot see what needs many, or a class that comes later: weight decay on rows of a
classifier that no loss has moved yet, moments that outlive what they belong to, a teacher of the
wrong time.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mose_fast.methods import METHODS
from mose_fast.nn import ExpertNetwork

TASKS, STEPS = 3, 70  # steps in each task
LR, DECAY, BETAS, EPS = 1e-3, 1e-4, (0.9, 0.999), 1e-8


class Small(ExpertNetwork):
    """A network without batch norm and without kinks, in which rounding does not grow."""

    experts, feature_size = 1, 16

    def __init__(self, learner) -> None:
        nn.Module.__init__(self)
        self.hidden = nn.Linear(3 * 8 * 8, self.feature_size)
        self.classifier1 = learner.classification_head(nn.Linear(self.feature_size, learner.classes))
        self.projection1 = nn.Identity()

    def use_kernels(self, kernels: str) -> None:
        pass

    def features(self, views):
        return self.hidden(views.flatten(1)).tanh()

    def forward(self, views):
        features = self.features(views)
        logits = self.classifier1(features)
        return SimpleNamespace(logits=logits[None], features=features[None], projections=features[None])


class Adam:
    """Adam with weight decay in the gradient (Kingma and Ba 2015), one count of steps for all."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)
        self.first, self.second = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients) -> None:
        self.steps += 1
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            g = g + DECAY * p
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
            mean, square = m / (1 - BETAS[0] ** self.steps), v / (1 - BETAS[1] ** self.steps)
            p -= LR * mean / (square.sqrt() + EPS)


class Twin:
    """The trainer: a network in float64, its optimiser, and the network of the task before.

    A class's row in the classifier is made when the class first comes, as in the official code,
    which adds rows to the classifier then: with its untrained values, and without moments.
    """

    def __init__(self, network) -> None:
        self.network = copy.deepcopy(network).double().train()
        self.untrained = copy.deepcopy(self.network.classifier1)
        self.named = list(self.network.named_parameters())
        self.adam = Adam(p for _, p in self.named)
        self.teacher, self.old, self.current = None, [], []

    def begin_task(self, held=None) -> None:
        if self.current:
            self.teacher = copy.deepcopy(self.network).eval()
        self.old, self.current = self.old + self.current, []

    def features(self, network, images):
        return network.features(images.double().permute(0, 3, 1, 2) / 127.5 - 1)

    def step(self, x, y, r, r_labels) -> None:
        for label in y.tolist():
            if label not in self.old + self.current:
                self.current.append(label)
                self.add_row(label)
        features = self.features(self.network, torch.cat([x, r]))
        taught = None if self.teacher is None else self.features(self.teacher, torch.cat([x, r])).detach()
        loss = self.loss(features, taught, y, r_labels)
        self.adam.step(torch.autograd.grad(loss, self.adam.parameters))

    @torch.no_grad()
    def add_row(self, label: int) -> None:
        untrained = dict(self.untrained.named_parameters())
        for (name, p), m, v in zip(self.named, self.adam.first, self.adam.second, strict=True):
            if name.startswith("classifier1.") and p.dim():
                p[label] = untrained[name.removeprefix("classifier1.")][label]
                m[label] = v[label] = 0

    def loss(self, features, taught, y, r_labels):
        raise NotImplementedError


class CcilTwin(Twin):
    """Mittal et al.: X within its task, R over all classes seen, both distilled."""

    def logits(self, network, features):
        head = network.classifier1
        directions, rows = (v / (v.norm(dim=1, keepdim=True) + 1e-5) for v in (features, head.weight))
        return head.scale * directions @ rows.T

    def loss(self, features, taught, y, r_labels):
        logits, known = self.logits(self.network, features), self.old + self.current
        own = torch.tensor([self.current.index(label) for label in y.tolist()])
        loss = F.cross_entropy(logits[: len(y), self.current], own)
        if taught is None:
            return loss
        own = torch.tensor([known.index(label) for label in r_labels.tolist()])
        loss = loss + F.cross_entropy(logits[len(y) :, known], own)
        taught = self.logits(self.teacher, taught).detach()
        for rows in (slice(len(y)), slice(len(y), None)):
            p, q = (z[rows][:, self.old].div(2).softmax(1) for z in (logits, taught))
            # The mean is over rows and old classes.
            loss = loss + 5 * (len(known) / len(self.current)) ** 0.66 * 4 * (q * (q / p).log()).mean()
        return loss


class BicTwin(Twin):
    """Wu et al.: cross-entropies over all classes seen, and distillation from corrected logits."""

    correction = (1.0, 0.0)
    corrected: ClassVar[list[int]] = []

    def begin_task(self, held=None) -> None:
        newest, old = self.current, self.old
        super().begin_task()
        self.corrected = newest if old else []
        if old:
            self.correction = self.fit(*held, old, newest)

    def fit(self, images, labels, old, newest):
        """Newton's method for the scale and the shift of the newest classes' logits."""
        with torch.no_grad():
            logits = self.logits(self.teacher, self.features(self.teacher, images))
        known = old + newest
        own = torch.tensor([known.index(label) for label in labels.tolist()])

        def loss(numbers):
            corrected = torch.cat([logits[:, old], numbers[0] * logits[:, newest] + numbers[1]], 1)
            return F.cross_entropy(corrected, own) + 0.1 * numbers[1] ** 2 / 2

        numbers = torch.tensor([1.0, 0.0], dtype=torch.float64)
        for _ in range(30):
            slope = torch.autograd.functional.jacobian(loss, numbers)
            numbers = numbers - torch.linalg.solve(torch.autograd.functional.hessian(loss, numbers), slope)
        assert slope.abs().max() < 1e-12
        return numbers.tolist()

    def logits(self, network, features):
        return features @ network.classifier1.weight.T + network.classifier1.bias

    def loss(self, features, taught, y, r_labels):
        logits, known = self.logits(self.network, features), self.old + self.current
        own = [torch.tensor([known.index(label) for label in labels.tolist()]) for labels in (y, r_labels)]
        loss = F.cross_entropy(logits[: len(y), known], own[0])
        if taught is None:
            return loss
        loss = loss + F.cross_entropy(logits[len(y) :, known], own[1])
        share, taught = len(self.old) / len(known), self.logits(self.teacher, taught).detach()
        taught[:, self.corrected] = taught[:, self.corrected] * self.correction[0] + self.correction[1]
        q, p = ((z[:, self.old] / 2).softmax(1) for z in (taught, logits))
        return (1 - share) * loss - share * (q * p.log()).sum(1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind", "kernels"), [("ccil", CcilTwin, "torch"), ("bic", BicTwin, "fused")])
def test_two_hundred_steps_give_the_weights_of_a_plain_trainer(method, kind, kernels, make, batch, monkeypatch):
    monkeypatch.setattr(METHODS[method], "build_network", lambda learner: Small(learner))
    learner = make(method, memory=40, kernels=kernels, options={"augment": "none"})
    untrained = copy.deepcopy(dict(learner.network.named_parameters()))
    twin, plans, met = kind(learner.network), [], set()
    inputs = learner.inputs
    learner.inputs = lambda plan, *stored: (plans.append(plan), inputs(plan, *stored))[1]
    for number in range(TASKS * STEPS):
        task = number // STEPS
        if number % STEPS == 0:
            if task:
                learner.end_task()
            held = learner.memory.held_slots
            twin.begin_task((learner.memory.images[held], learner.memory.labels[held]))
        # The second class of a task comes some steps after the first.
        x, y = batch([2 * task, 2 * task + (number % STEPS >= 20)] * 5, seed=number)
        learner.observe(x, y, task)
        if plans:  # else every row was held out
            images, labels, sizes = plans.pop()[:3]
            rows = [part for pair in zip(images.split(sizes), labels.split(sizes), strict=True) for part in pair]
            twin.step(*rows)
            met.update(rows[3].tolist())
    assert twin.old == [0, 1, 2, 3] and twin.current == [4, 5] and met == set(range(6 if method == "ccil" else 4))
    for name, found in learner.network.named_parameters():
        wanted = dict(twin.named)[name].detach()
        apart, moved = (found.detach() - wanted).norm(), (wanted - untrained[name].detach()).norm()
        assert apart < 1e-5 * moved + 1e-7 * wanted.norm(), f"{name} differs by {apart:.1e} after moving by {moved:.1e}"
