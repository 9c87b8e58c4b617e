"""ER with MKD's momentum teacher by its formulas, in float64 and plain PyTorch, over the views that
a learner's own steps had (docs/specification/baselines.md section 20).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

RATE, TEMPERATURE, WEIGHT, LR = 0.01, 4.0, 5.5, 5e-4


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In float64 a learner is built and takes its steps so, where PyTorch's kernels compute."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Taught(NamedTuple):
    """What a step gave: the minimised loss, then the weights and the teacher's, by name."""

    loss: float
    weights: dict[str, Tensor]
    teacher: dict[str, Tensor]


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of logits [N, K] / T, a mean over N."""
    p, q = (logits / TEMPERATURE for logits in (teacher, student))
    p, q = p - p.exp().sum(1, keepdim=True).log(), q - q.exp().sum(1, keepdim=True).log()
    return (p.exp() * (p - q)).sum() / len(p)


class Twin:
    """Network, teacher and Adam, at first those of a learner that took no step yet."""

    def __init__(self, learner) -> None:
        self.network = copy.deepcopy(learner.network).cpu()
        self.network.use_kernels("torch")
        self.network = self.network.double().train()
        self.weights = dict(self.network.named_parameters())
        self.teacher = {name: RATE * weight.detach() for name, weight in self.weights.items()}
        self.adam = torch.optim.Adam(self.network.parameters(), lr=LR, eps=learner.config.options.eps)

    def take_state(self, learner) -> None:
        """Weights, averages and moments of a learner, none of its settings."""
        self.network.load_state_dict(learner.network.state_dict())
        averages = (average.cpu().double().clone() for average in learner.model.teacher.averages)
        self.teacher = dict(zip(self.weights, averages, strict=True))
        moments = copy.deepcopy(learner.model.optimiser.state_dict()["state"])
        self.adam.load_state_dict(self.adam.state_dict() | {"state": moments})

    def step(self, views: Tensor, labels: Tensor) -> Taught:
        """On views [2 N, 3, H, W], augmented and then raw, with labels [N]."""
        augmented, raw = views.double().chunk(2)
        statistics = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        with torch.no_grad():
            taught = functional_call(self.network, {**self.teacher, **statistics}, (augmented,)).logits[0]
        of_augmented, of_raw = self.network(augmented).logits[0], self.network(raw).logits[0]
        cross_entropy = (of_augmented.exp().sum(1).log() - of_augmented[range(len(labels)), labels]).mean()
        both = divergence(taught, of_augmented) + divergence(taught, of_raw)
        loss = cross_entropy + WEIGHT / 2 * TEMPERATURE**2 * both
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        self.teacher = {name: (1 - RATE) * t + RATE * self.weights[name].detach() for name, t in self.teacher.items()}
        return Taught(loss.item(), self.weights, self.teacher)


def ten_steps(learner, size: int, *, from_equal_states: bool = False) -> Iterator[tuple[Taught, Taught]]:
    """Ten steps of a learner of preset ``mkd``, four images each, and the twin's. If asked
    for, each step of the twin starts where the learner was before its step, else only the first.

    For a learner in float32 give Adam a large ``eps``: with 1e-8 it makes whole steps of what
    rounding leaves of gradients that are zero.
    """
    twin, last, inputs, train_on = Twin(learner), [], learner.inputs, learner.train_on
    wide = next(learner.network.parameters()).dtype

    def noted(*given):
        made = inputs(*given)
        made = made._replace(views=made.views.to(wide))
        last[:] = made.views.cpu(), made.labels.cpu()
        return made

    def in_its_dtype(*given):
        with default_dtype(wide):
            return train_on(*given)

    learner.inputs, learner.train_on = noted, in_its_dtype
    noise = torch.Generator().manual_seed(1)
    for step in range(10):
        y = torch.tensor([0, 1, 1, 0]) + 2 * (step >= 4)
        x = torch.randint(0, 90, (4, size, size, 3), generator=noise) + 50 * y.view(-1, 1, 1, 1)
        if from_equal_states:
            twin.take_state(learner)
        loss = float(learner.observe(x.to(torch.uint8), y, int(step >= 4))["loss"])
        weights = dict(learner.network.named_parameters())
        yield Taught(loss, weights, dict(zip(weights, learner.model.teacher.averages, strict=True))), twin.step(*last)


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The distance between two sets of tensors as a part of the second one's length."""
    both = [
        torch.cat([tensors[name].detach().double().cpu().flatten() for name in wanted]) for tensors in (found, wanted)
    ]
    return float((both[0] - both[1]).norm() / both[1].norm())
