"""The class-balanced memory against GDumb's algorithm 1, item by item."""

from __future__ import annotations

import random

import pytest
import torch

from mose_fast.memory import BalancedMemory


def memory(capacity: int, classes: int, seed: int = 0) -> BalancedMemory:
    return BalancedMemory(capacity, (8, 8), classes=classes, seed=seed)


def insert(balanced: BalancedMemory, labels: list[int], task: int = 0) -> torch.Tensor:
    index = torch.arange(balanced.seen, balanced.seen + len(labels))
    x = (index % 256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    return balanced.insert(x, torch.tensor(labels), task, index)


def counts(balanced: BalancedMemory, classes: int) -> list[int]:
    return torch.bincount(balanced.labels[: balanced.filled], minlength=classes).tolist()


def one_by_one(capacity: int, classes: int, labels: list[int]) -> list[int]:
    """Algorithm 1 of the paper: the number of samples of each class at the end, ties going to the
    lowest class.
    """
    held = [0] * classes
    for label in labels:
        share = capacity / max(1, sum(n > 0 for n in held))
        if held[label] == 0 or held[label] < share:
            if sum(held) == capacity:
                held[held.index(max(held))] -= 1
            held[label] += 1
    return held


@pytest.mark.parametrize("size", [1, 3, 10, 40])
def test_counts_are_those_of_the_algorithm_item_by_item(size):
    draw = random.Random(size)
    for trial in range(12):
        classes, capacity = draw.randint(2, 6), draw.randint(6, 30)
        # Classes come one after the other, in part, as in a stream of tasks.
        labels = [min(int(draw.gauss(position / 20, 1)) % classes, classes - 1) for position in range(20 * classes)]
        balanced = memory(capacity, classes, seed=trial)
        for start in range(0, len(labels), size):
            slots = insert(balanced, labels[start : start + size])
            kept = slots >= 0
            assert torch.equal(balanced.indices[slots[kept]], (torch.arange(len(slots)) + start)[kept])
            expected = one_by_one(capacity, classes, labels[: start + size])
            # Which of several largest classes loses a sample is drawn.
            assert sorted(counts(balanced, classes)) == sorted(expected)
            assert sum(expected) == balanced.filled <= capacity


def test_slots_stay_together_and_no_sample_is_held_twice():
    balanced = memory(20, 5)
    for step in range(30):
        insert(balanced, [step // 6, (step // 6 + step) % 5] * 4, task=step)
    filled = balanced.filled
    assert len(set(balanced.indices[:filled].tolist())) == filled == 20
    assert torch.equal(balanced.images[:filled, 2, 3, 1].long(), balanced.indices[:filled] % 256)
    assert torch.equal(balanced.tasks[:filled], balanced.indices[:filled] // 8)
    assert balanced.seen == 240 == int(balanced.state[2])


def test_who_leaves_is_uniform():
    """A second class takes half of ten slots: each of the first ten samples stays with probability
    1/2.
    """
    stays = torch.zeros(10)
    for seed in range(150):
        balanced = memory(10, 2, seed)
        insert(balanced, [0] * 10)
        insert(balanced, [1] * 10)
        assert counts(balanced, 2) == [5, 5]
        old = balanced.indices[balanced.labels == 0]
        stays[old] += 1
    # Five standard deviations of a binomial share.
    assert (stays / 150 - 0.5).abs().max() < 5 * (0.25 / 150) ** 0.5


def test_more_classes_than_slots():
    balanced = memory(3, 10)
    for label in range(10):
        insert(balanced, [label] * 4)
    held = counts(balanced, 10)
    assert sum(held) == 3 and max(held) == 1 and held[9] == 1


def test_draws_skip_slots_that_a_refused_item_left_free():
    balanced = memory(10, 2)
    insert(balanced, [0, 1] + [1] * 8)
    assert balanced.filled == 6 and balanced.seen == 10
    assert sorted(balanced.draw(10).tolist()) == list(range(6))
    assert len(balanced.draw(10, others=5)) == 6 and len(balanced.draw(10, only=5)) == 0
    assert balanced.state.tolist() == [0, 3, 10]


def test_a_restored_memory_continues():
    balanced, copy = memory(12, 4, seed=3), memory(12, 4, seed=9)
    for _ in range(5):
        insert(balanced, [0, 1, 0, 1, 2])
    copy.load({name: tensor.clone() for name, tensor in balanced.tensors().items()})
    assert copy.filled == balanced.filled
    for _ in range(5):
        assert torch.equal(insert(balanced, [3, 2, 3, 2, 1]), insert(copy, [3, 2, 3, 2, 1]))
    assert torch.equal(balanced.indices, copy.indices)
