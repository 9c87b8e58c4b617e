"""The memory of exemplars and the buffer of the current task."""

from __future__ import annotations

import pytest
import torch

from mose_fast.memory import ExemplarMemory
from mose_fast.memory.exemplars import SELECTIONS, herding_ranks, positions_in_group
from mose_fast.memory.twin import HostTwin


def memory(capacity: int = 20, selection: str = "first", **settings) -> ExemplarMemory:
    return ExemplarMemory(capacity, (8, 8), selection=selection, classes=10, **{"seed": 0, **settings})


def fill(memory: ExemplarMemory, labels, task: int = 0, **how) -> torch.Tensor:
    """Inserts a batch whose images show their position in the stream."""
    index = torch.arange(memory.seen, memory.seen + len(labels))
    x = index.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    return memory.insert(x, torch.as_tensor(labels), task, index, **how)


def features(memory: ExemplarMemory) -> torch.Tensor:
    return torch.randn(memory.buffer.filled, 5, generator=torch.Generator().manual_seed(memory.seen))


def held_by_class(memory: ExemplarMemory) -> dict[int, list[int]]:
    """The stream positions of each class's exemplars, in order of their slots."""
    found = {}
    for label, index in zip(memory.labels[: memory.filled].tolist(), memory.indices.tolist(), strict=False):
        found.setdefault(label, []).append(index)
    return found


def bits(memory: ExemplarMemory) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in memory.tensors().items()} | {
        "host": [memory.seen, memory.filled, memory.held, memory.seed]
    }


def test_positions_among_equals():
    assert positions_in_group(torch.tensor([3, 0, 3, 3, 1, 0])).tolist() == [0, 0, 1, 2, 0, 1]
    assert positions_in_group(torch.tensor([], dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_class_has_its_share_and_keeps_its_first_choices(selection):
    exemplars = memory(20, selection)
    seen, before = [], {}
    for task in range(4):
        classes = [9 - 2 * task, 8 - 2 * task]
        for _ in range(4):
            assert fill(exemplars, classes * 3, task).tolist() == [-1] * 6
        assert exemplars.filled == sum(map(len, before.values()))
        seen += classes
        exemplars.rebuild(seen, task, features(exemplars))
        now = held_by_class(exemplars)
        shares = [20 // len(seen) + (position < 20 % len(seen)) for position in range(len(seen))]
        assert {c: len(positions) for c, positions in now.items()} == dict(
            zip(seen, (min(s, 12) for s in shares), strict=True)
        )
        assert all(now[c] == positions[: len(now[c])] for c, positions in before.items())
        assert exemplars.buffer.filled == 0 and exemplars.seen == 24 * (task + 1) == int(exemplars.state[2])
        before = now
    filled = exemplars.filled
    assert filled == 20 and (exemplars.labels >= 0).all()
    assert torch.equal(exemplars.tasks, exemplars.indices // 24)
    assert torch.equal(exemplars.images[:, 3, 2, 1].long(), exemplars.indices)


def test_a_class_with_few_images_leaves_slots_empty_and_later_classes_take_their_share():
    exemplars = memory(12)
    fill(exemplars, [0] * 9 + [1] * 2)
    exemplars.rebuild([0, 1], 0)
    assert held_by_class(exemplars) == {0: [0, 1, 2, 3, 4, 5], 1: [9, 10]}
    fill(exemplars, [2], 1)
    exemplars.rebuild([0, 1, 2], 1)
    assert held_by_class(exemplars) == {0: [0, 1, 2, 3], 1: [9, 10], 2: [11]} and exemplars.filled == 7
    for tensor in (exemplars.labels, exemplars.tasks, exemplars.indices):
        assert (tensor[:7] >= 0).all() and (tensor[7:] == -1).all()


def test_a_class_that_comes_again_keeps_what_it_has():
    exemplars = memory(4)
    fill(exemplars, [0] * 5)
    exemplars.rebuild([0], 0)
    fill(exemplars, [1, 0, 1], 1)
    exemplars.rebuild([0, 1], 1)
    assert held_by_class(exemplars) == {0: [0, 1], 1: [5, 7]}


def test_a_random_choice_is_uniform_and_depends_on_the_seed():
    chosen = torch.zeros(30)
    for seed in range(300):
        exemplars = memory(10, "random", seed=seed)
        fill(exemplars, [0] * 30)
        exemplars.rebuild([0], 0)
        chosen[exemplars.indices] += 1
    assert chosen.sum() == 3000 and chosen.min() > 60 and chosen.max() < 140


def test_herding_follows_the_mean():
    """Image by image and class by class."""
    random = torch.Generator().manual_seed(3)
    labels = torch.tensor([0] * 7 + [4] * 3 + [2] * 9)[torch.randperm(19, generator=random)]
    vectors = torch.randn(19, 4, generator=random)
    ranks = herding_ranks(vectors, labels, 5)
    for c, size in ((0, 7), (4, 3), (2, 9)):
        own = (labels == c).nonzero().flatten().tolist()
        directions = {n: vectors[n].double() / vectors[n].double().norm() for n in own}
        mean, chosen = sum(directions.values()) / size, []
        for step in range(1, min(5, size) + 1):
            rest = [n for n in own if n not in chosen]
            total = sum(directions[n] for n in chosen) if chosen else 0
            # The image that most reduces what the sum of the chosen ones lacks along the mean's.
            chosen.append(max(rest, key=lambda n: float(directions[n] @ (step * mean - total))))
        assert [ranks[n].item() for n in chosen] == list(range(len(chosen)))
        assert all(ranks[n] == 5 for n in own if n not in chosen)


def test_a_share_is_held_out_and_never_drawn():
    exemplars = memory(40, validation=0.1)
    first = torch.zeros(20, dtype=torch.bool)
    first[:8] = True
    fill(exemplars, [0, 1] * 10, held_out=first)
    assert exemplars.quota(0, 2) == (18, 2) and exemplars.quota(2, 11) == (3, 1) and exemplars.quota(5, 40) == (1, 0)
    exemplars.rebuild([0, 1], 0)
    assert exemplars.held == 4 and exemplars.filled == 16
    assert exemplars.indices[exemplars.held_slots].tolist() == [0, 2, 1, 3]
    for _ in range(20):
        assert sorted(exemplars.indices[exemplars.draw(40)].tolist()) == list(range(8, 20))
    fill(exemplars, [2, 3, 4] * 10, 1, held_out=torch.arange(30) < 3)
    exemplars.rebuild([0, 1, 2, 3, 4], 1)
    assert exemplars.quota(0, 5) == (7, 1) and exemplars.held == 5
    assert exemplars.indices[exemplars.held_slots].tolist() == [0, 1, 20, 21, 22]
    assert exemplars.filled == 2 * 6 + 3 * 7 + 5


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_all_can_be_undone_and_done_again(selection, twin):
    """Batches, growth of the buffer, the end of a task and draws, as on a card with the host's
    twin and without.
    """
    exemplars = memory(20, selection)
    if twin:
        exemplars.twin = HostTwin(20, 0)
    fill(exemplars, [0, 1] * 8)
    exemplars.rebuild([0, 1], 0, features(exemplars))
    fill(exemplars, [2, 3], 1)
    before, records = bits(exemplars), []

    def act():
        for labels in ([2] * 9, [3] * 20):
            with exemplars.record() as record:
                fill(exemplars, labels, 1)
                exemplars.draw(3)
            records.append(record)
        with exemplars.record() as record:
            exemplars.rebuild([0, 1, 2, 3], 1, features(exemplars))
            fill(exemplars, [4] * 5, 2)
            exemplars.draw(7)
        records.append(record)

    act()
    after = bits(exemplars)
    while records:
        exemplars.restore(records.pop())
        assert not twin or torch.equal(exemplars.twin.tasks, exemplars.tasks)
    assert bits(exemplars) == before != after
    act()
    assert bits(exemplars) == after


def test_it_is_saved_in_the_middle_of_a_task():
    one, other = memory(20, "random", validation=0.1), memory(20, "random", validation=0.1)
    fill(one, [0, 1] * 10, held_out=torch.arange(20) < 4)
    one.rebuild([0, 1], 0)
    fill(one, [2, 3] * 10, 1, held_out=torch.arange(20) < 4)
    fill(other, [5])
    saved = {name: tensor.clone() for name, tensor in one.tensors().items()}
    other.load(saved)
    for exemplars in (one, other):
        fill(exemplars, [2, 3], 1)
        exemplars.rebuild([0, 1, 2, 3], 1)
        exemplars.draw(5)
    assert bits(one) == bits(other)
    assert saved["buffer/images"].shape == (20, 8, 8, 3)
