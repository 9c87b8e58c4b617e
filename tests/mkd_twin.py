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


class Ten(NamedTuple):
    """What ten steps gave: the minimised losses, then the weights and the teacher's, by name."""

    losses: list[float]
    weights: dict[str, Tensor]
    teacher: dict[str, Tensor]


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher || student) of logits [N, K] / T, a mean over N."""
    p, q = (logits / TEMPERATURE for logits in (teacher, student))
    p, q = p - p.exp().sum(1, keepdim=True).log(), q - q.exp().sum(1, keepdim=True).log()
    return (p.exp() * (p - q)).sum() / len(p)


def twin(network: torch.nn.Module, steps: list[tuple[Tensor, Tensor]], eps: float) -> Ten:
    """The steps on views [2 N, 3, H, W], augmented and then raw, with labels [N]."""
    network.use_kernels("torch")
    network = network.double().train()
    weights = dict(network.named_parameters())
    teacher = {name: RATE * weight.detach() for name, weight in weights.items()}
    adam = torch.optim.Adam(network.parameters(), lr=LR, eps=eps)
    losses = []
    for views, labels in steps:
        augmented, raw = views.double().chunk(2)
        statistics = {name: buffer.clone() for name, buffer in network.named_buffers()}
        with torch.no_grad():
            taught = functional_call(network, {**teacher, **statistics}, (augmented,)).logits[0]
        of_augmented, of_raw = network(augmented).logits[0], network(raw).logits[0]
        cross_entropy = (of_augmented.exp().sum(1).log() - of_augmented[range(len(labels)), labels]).mean()
        both = divergence(taught, of_augmented) + divergence(taught, of_raw)
        loss = cross_entropy + WEIGHT / 2 * TEMPERATURE**2 * both
        adam.zero_grad()
        loss.backward()
        adam.step()
        teacher = {name: (1 - RATE) * t + RATE * weights[name].detach() for name, t in teacher.items()}
        losses.append(loss.item())
    return Ten(losses, {name: weight.detach() for name, weight in weights.items()}, teacher)


def ten_steps(learner, size: int) -> tuple[Ten, Ten]:
    """Ten steps of a learner of preset ``mkd``, four images each, and the twin's. For a learner in
    float32 give Adam a large ``eps``: with 1e-8 it makes whole steps of what rounding leaves of
    gradients that are zero.
    """
    before, steps, inputs, losses = copy.deepcopy(learner.network), [], learner.inputs, []
    wide = next(learner.network.parameters()).dtype

    def noted(*given):
        made = inputs(*given)
        made = made._replace(views=made.views.to(wide))
        steps.append((made.views.cpu(), made.labels.cpu()))
        return made

    def in_its_dtype(*given):
        with default_dtype(wide):
            return train_on(*given)

    train_on, learner.train_on = learner.train_on, in_its_dtype
    learner.inputs = noted
    noise = torch.Generator().manual_seed(1)
    for step in range(10):
        y = torch.tensor([0, 1, 1, 0]) + 2 * (step >= 4)
        x = torch.randint(0, 90, (4, size, size, 3), generator=noise) + 50 * y.view(-1, 1, 1, 1)
        losses.append(float(learner.observe(x.to(torch.uint8), y, int(step >= 4))["loss"]))
    names = [name for name, _ in learner.network.named_parameters()]
    averages = dict(zip(names, learner.model.teacher.averages, strict=True))
    weights = {name: weight.detach() for name, weight in learner.network.named_parameters()}
    return Ten(losses, weights, averages), twin(before.cpu(), steps, learner.config.options.eps)


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The distance between two sets of tensors as a part of the second one's length."""
    both = [torch.cat([tensors[name].double().cpu().flatten() for name in wanted]) for tensors in (found, wanted)]
    return float((both[0] - both[1]).norm() / both[1].norm())
