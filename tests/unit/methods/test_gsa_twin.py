"""GSA beside an independent trainer, over hundreds of steps: a fault that one step does not show
can need the moments of Adam, or classes that come later.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mose_fast.learner.replay_learner import Rows
from mose_fast.nn import ExpertNetwork
from tests.unit.methods.by_hand import normalised

STEPS, BUFFER = 100, 16


class Trainer:
    """GSA as its paper has it (docs/specification/baselines.md section 11), in float64, for classes
    0 ... K - 1 that come in this order; it is given the rows that were drawn from the memory.
    """

    def __init__(self, network: ExpertNetwork, classes: int):
        self.network = network
        self.adam = torch.optim.Adam(network.parameters(), lr=3e-3, betas=(0.9, 0.99))
        self.pulled, self.pushed = torch.zeros(2, classes).double()
        self.seen: set[int] = set()

    def begin_task(self):
        self.earlier, self.steps = len(self.seen), 0

    def step(self, rows: Rows):
        self.steps += 1
        given, current, old = rows.images.split(rows.sizes)
        self.seen |= set(rows.labels[: len(given)].tolist())
        known, new = len(self.seen), len(given) + len(current)
        share = (known - self.earlier) / known
        replays = known > 0 and (len(current) > 0 or self.earlier > 0)
        copies = min(int(BUFFER * share + 1e-9), new) if replays else 0
        assert len(old) == (int(BUFFER * (1 - share) + 1e-9) if self.earlier else 0)
        pixels, labels = [given, current], rows.labels
        first = normalised(torch.cat(pixels))
        second = torch.cat([first[:copies], normalised(old)])
        labels_first, labels_second = labels[:new], torch.cat([labels[:copies], labels[new:]])
        views = torch.cat([first, first.flip(3), second, second.flip(3)])
        features = self.network.features(views.contiguous(memory_format=torch.channels_last))
        logits = self.network.classify(features)[0][:, :known]
        loss = F.cross_entropy(logits[: 2 * new, self.earlier :], labels_first.repeat(2) - self.earlier)
        if len(second):
            scores, labels = logits[2 * new :], labels_second.repeat(2)
            p = scores.detach().softmax(1)
            own = F.one_hot(labels, known).double()
            self.pulled[:known] += (own * (1 - p)).sum(0)
            self.pushed[:known] += ((1 - own) * p).sum(0)
            weights = torch.ones(known).double()
            if self.steps > 5:
                weights = 2 / (1 + torch.exp(1 - self.pulled[:known] / self.pushed[:known]))
            loss = loss + 2 * (weights[labels] * -scores.log_softmax(1)[torch.arange(len(labels)), labels]).mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


@pytest.mark.slow
def test_two_hundred_steps_give_the_weights_of_an_independent_trainer(make, batch):
    """The learner runs in float64 too, so that rounding stays small in all these steps. There is no
    weight decay, which moves the rows of classes that have not come.
    """
    options = {"lr": 3e-3, "beta2": 0.99, "weight_decay": 0.0, "augment": "none", "buffer_batch": BUFFER}
    learner = make("gsa", width=2, memory=40, mirror="on", kernels="torch", options=options)
    learner.network.double()
    views = learner.make_views
    # Pixels have 256 levels, so that the views can be made exact.
    learner.make_views = lambda rows: ((views(rows).double() + 1) * 127.5).round() / 127.5 - 1
    trainer = Trainer(copy.deepcopy(learner.network), learner.classes)
    plans, inputs = [], learner.inputs
    learner.inputs = lambda plan, *stored: (plans.append(plan), inputs(plan, *stored))[1]
    start = [p.detach().clone() for p in learner.network.parameters()]
    for task in range(2):
        trainer.begin_task()
        for step in range(STEPS):
            learner.observe(*batch([3 * task, 3 * task + 1, 3 * task + 2] * 3, seed=1000 * task + step), task)
            trainer.step(plans.pop())
    assert learner.steps == 2 * STEPS and not plans
    for (name, found), wanted, before in zip(
        learner.network.named_parameters(), trainer.network.parameters(), start, strict=True
    ):
        moved = (wanted - before).norm()
        assert (found - wanted).norm() <= 1e-6 * moved, name
    sums = torch.stack([trainer.pulled, trainer.pushed])
    assert learner.network.sums.tolist() == [pytest.approx(row) for row in sums.tolist()]
