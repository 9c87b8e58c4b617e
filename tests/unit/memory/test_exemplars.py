"""The memory of exemplars and the buffer of the current task."""

from __future__ import annotations

import pytest
import torch

from mose_fast.memory import ExemplarMemory
from mose_fast.memory.exemplars import HERDINGS, SELECTIONS, herding_ranks


def memory(capacity: int = 20, selection: str = "first", **settings) -> ExemplarMemory:
    return ExemplarMemory(capacity, (8, 8), selection=selection, classes=10, **{"seed": 0, **settings})


def fill(memory: ExemplarMemory, labels, task: int = 0, held_out=None) -> torch.Tensor:
    """Inserts a batch whose images show their position in the stream."""
    index = torch.arange(memory.seen, memory.seen + len(labels))
    x = index.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    labels = torch.as_tensor(labels)
    stored = [*memory.labels[: memory.filled].tolist(), *memory.buffer.classes.tolist()]
    held_out = torch.zeros(len(labels), dtype=torch.bool) if held_out is None else held_out
    known = list(dict.fromkeys(stored + labels.tolist()))
    return memory.insert(x, labels, task, index, known=known, classes=labels, held_out=held_out)


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


@pytest.mark.parametrize("selection", HERDINGS)
def test_herding_follows_the_mean(selection):
    """Image by image and class by class. In LUCIR's repository, whose images are directions, one
    that was chosen may be chosen again, as no further exemplar; in BiC's it may not.
    """
    random = torch.Generator().manual_seed(3)
    labels = torch.tensor([0] * 7 + [4] * 3 + [2] * 9)[torch.randperm(19, generator=random)]
    vectors = torch.randn(19, 4, generator=random).double()
    ranks, again = herding_ranks(vectors, labels, 5, selection), 0
    for c, size in ((0, 7), (4, 3), (2, 9)):
        own = (labels == c).nonzero().flatten().tolist()
        points = {n: vectors[n] / (vectors[n].norm() if selection == "herding" else 1) for n in own}
        mean, chosen, total = sum(points.values()) / size, [], torch.zeros(4).double()
        for step in range(1, 1001):
            open_to = own if selection == "herding" else [n for n in own if n not in chosen]
            # The one that brings the sum of those chosen nearest to as many times the mean.
            n = min(open_to, key=lambda n: float((total + points[n] - step * mean).norm()))
            total, again = total + points[n], again + (n in chosen)
            chosen += [n] * (n not in chosen)
            if len(chosen) == min(5, size):
                break
        assert [ranks[n].item() for n in chosen] == list(range(len(chosen)))
        assert all(ranks[n] == 5 for n in own if n not in chosen)
    assert (again > 0) == (selection == "herding")


def test_herding_gives_up_a_class_whose_other_images_never_come_nearest():
    """Of two copies of one direction the second is never chosen, as in LUCIR's repository."""
    assert herding_ranks(torch.tensor([[1.0, 0], [2.0, 0]]), torch.tensor([0, 0]), 2).tolist() == [0, 2]


@pytest.mark.parametrize("selection", ["first", "random"])
def test_the_buffer_keeps_what_can_become_an_exemplar_and_no_more(selection):
    """The exemplars are those that a buffer of all images gives."""
    trimmed, whole = (memory(20, selection, whole=whole, validation=0.1) for whole in (False, True))
    for exemplars in (trimmed, whole):
        for task in range(3):
            for _ in range(4):
                held = torch.arange(10) < 2
                fill(exemplars, [2 * task, 2 * task + 1] * 5, task, held_out=held)
            assert exemplars.buffer.filled == (40 if exemplars is whole else 20 // (task + 1))
            exemplars.rebuild(list(range(2 * task + 2)), task)
    assert torch.equal(trimmed.indices, whole.indices) and trimmed.held == whole.held > 0
    assert trimmed.most == 30 and whole.most == 60


def test_images_of_the_task_may_count_against_the_memory():
    exemplars, seen = memory(20, "random", within=True), []
    for task in range(3):
        for step in range(4):
            labels = [2 * task, 2 * task + (step > 0)] * 5
            fill(exemplars, labels, task)
            seen += [c for c in dict.fromkeys(labels) if c not in seen]
            shares = {c: 20 // len(seen) + (number < 20 % len(seen)) for number, c in enumerate(seen)}
            kept = [*exemplars.labels[: exemplars.filled].tolist(), *exemplars.buffer.classes.tolist()]
            assert all(kept.count(c) <= shares[c] for c in seen) and len(kept) <= 20
        exemplars.rebuild(seen, task)
        assert exemplars.filled == 20
    assert exemplars.most == 20


@pytest.mark.parametrize("selection", SELECTIONS)
def test_rows_of_all_classes_come_from_what_would_be_exemplars(selection):
    """Every class has an equal share of them, its first choices; none that is held out."""
    exemplars = memory(24, selection, validation=0.1)
    fill(exemplars, [0, 1] * 15, held_out=torch.arange(30) < 4)
    exemplars.rebuild([0, 1], 0, features(exemplars))
    old = held_by_class(exemplars)
    fill(exemplars, [2, 3] * 10, 1, held_out=torch.arange(20) < 4)
    met = {}
    for _ in range(200):
        drawn = exemplars.draw_all(7, [0, 1, 2, 3])
        images, labels = exemplars.gather(drawn)
        assert len(drawn) == len(set(drawn.tolist())) == 7
        for index, label in zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True):
            met[index, label] = met.get((index, label), 0) + 1
    found = {c: {index for index, label in met if label == c} for c in range(4)}
    assert found[0] == set(old[0][:5]) and found[1] == set(old[1][:5])
    assert all(len(found[c]) == 5 and min(found[c]) >= 34 for c in (2, 3))
    assert sum(met.values()) == 1400 and min(met.values()) > 40
    assert int(exemplars.twin.state[1]) == int(exemplars.state[1]) == 200


def test_herding_leaves_held_out_images_alone():
    """They stay the first ones, and the mean is that of the others."""
    exemplars = memory(20, "herding", validation=0.2)
    held = torch.arange(20) < 6
    fill(exemplars, [0, 1] * 10, held_out=held)
    points = features(exemplars)
    exemplars.rebuild([0, 1], 0, torch.where(held[:, None], 1000.0, points))
    assert exemplars.indices[exemplars.held_slots].tolist() == [0, 2, 1, 3]
    ranks = herding_ranks(points[~held], torch.tensor([0, 1] * 7), 8)
    for c, chosen in held_by_class(exemplars).items():
        assert [ranks[n - 6].item() for n in chosen[:7]] == list(range(7)), c


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


@pytest.mark.parametrize(("selection", "within"), [*((name, False) for name in SELECTIONS), ("random", True)])
def test_all_can_be_undone_and_done_again(selection, within):
    """Batches, growth of the buffer, the end of a task and draws."""
    exemplars = memory(20, selection, within=within)
    fill(exemplars, [0, 1] * 8)
    exemplars.rebuild([0, 1], 0, features(exemplars))
    fill(exemplars, [2, 3], 1)
    before, records = bits(exemplars), []

    def act():
        for labels in ([2] * 9, [3] * 20):
            with exemplars.record() as record:
                fill(exemplars, labels, 1)
                exemplars.draw(3)
                exemplars.draw_all(3, [0, 1, 2, 3])
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
        assert torch.equal(exemplars.twin.tasks, exemplars.tasks)
        assert torch.equal(exemplars.twin.labels, exemplars.labels)
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
    assert saved["buffer/images"].shape == (10, 8, 8, 3)
