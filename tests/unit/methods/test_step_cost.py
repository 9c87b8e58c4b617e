"""What a step costs, counted instead of timed: floating-point operations relative to ER's, and no
growth over a run.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mose_fast.methods import METHODS, Learner, create_learner


class Work(TorchDispatchMode):
    """Counts operators and the elements that they return, but for views, which cost nothing."""

    def __init__(self):
        super().__init__()
        self.operators = self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operators += 1
        for part in () if function.is_view else result if isinstance(result, tuple | list) else [result]:
            self.elements += part.numel() if isinstance(part, torch.Tensor) else 0
        return result


#: Methods whose step is not the same work whatever the number of classes and of samples kept.
#: bench/bench_methods.py times all methods.
VARYING = ("aser", "er-aml", "gdumb", "gss")


def batch(task: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, with the labels of a task of ten classes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, 256, (10, size, size, 3), dtype=torch.uint8, generator=generator)
    return x, torch.arange(10 * task, 10 * task + 10)


def in_second_task(name: str, size: int, width: int) -> Learner:
    """A learner with the shared batch sizes and a full memory of 200, some batches into its second
    task: images of it fill the shares of their classes.
    """
    learner = create_learner(classes=20, method=name, memory=200, width=width, image_size=(size, size), device="cpu")
    for step in range(20):
        learner.observe(*batch(0, step, size), task=0, train=False)
    for step in range(20):
        learner.observe(*batch(1, step, size), task=1, train=step == 2)
    return learner


def flops(name: str) -> int:
    """Of a step at a quarter of the size of CIFAR images and an eighth of the network's width,
    where convolutions still outweigh all else.
    """
    learner = in_second_task(name, 16, 8)
    with FlopCounterMode(display=False) as counter:
        learner.observe(*batch(1, 99, 16), task=1)
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def flops_of_er() -> int:
    return flops("er")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in VARYING])
def test_operations_relative_to_er_are_those_of_the_list(flops_of_er, name):
    """docs/specification/baselines.md section 0.1 counts images through the network; heads and
    losses may add what is left of a factor 1.3.
    """
    measured = flops(name) / flops_of_er
    assert METHODS[name].about.cost / 1.3 < measured < METHODS[name].about.cost * 1.3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in VARYING])
def test_a_step_does_not_grow_with_the_run(name):
    learner = in_second_task(name, 8, 1)
    totals = []
    for _ in range(2):
        with Work() as work:
            for step in range(3):
                learner.observe(*batch(1, step, 8), task=1)
        totals.append((work.operators, work.elements))
        for step in range(50):
            learner.observe(*batch(1, step, 8), task=1, train=step % 20 == 0)
    (operators, elements), (later_operators, later_elements) = totals
    assert operators > 100
    assert later_operators <= 1.05 * operators and later_elements <= 1.05 * elements
