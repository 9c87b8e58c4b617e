"""The memory of GSS: reference batches, who is challenged, who wins."""

from __future__ import annotations

import pytest
import torch

from mose_fast.memory import GradientMemory


def offer(memory: GradientMemory, scores, start: int | None = None) -> torch.Tensor:
    """Offers images that show their stream index."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    start = memory.seen if start is None else start
    index = torch.arange(start, start + len(scores))
    x = (index % 256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    return memory.offer(x, index % 5, 0, index, scores)


def test_free_slots_are_filled_in_order_and_the_rest_is_dropped():
    memory = GradientMemory(14, (8, 8), seed=0)
    assert offer(memory, [0.1] * 10).tolist() == list(range(10))
    assert offer(memory, torch.linspace(-0.5, 0.4, 10)).tolist() == [10, 11, 12, 13, *[-1] * 6]
    assert memory.indices.tolist() == list(range(14)) and memory.seen == 20 and memory.state[2] == 20
    assert torch.allclose(memory.scores, torch.tensor([0.1] * 10 + [-0.5, -0.4, -0.3, -0.2]))


@pytest.mark.parametrize(
    ("filled", "shape"),
    [(0, (0, 0)), (1, (1, 1)), (7, (1, 7)), (10, (1, 10)), (29, (2, 10)), (30, (3, 10)), (90, (4, 10))],
)
def test_reference_batches_are_disjoint_and_hold_samples(filled, shape):
    memory = GradientMemory(100, (8, 8), seed=3)
    if filled:
        offer(memory, [0.0] * filled)
    slots = memory.reference(4, 10)
    assert slots.shape == shape and len(set(slots.flatten().tolist())) == slots.numel()
    assert set(slots.flatten().tolist()) <= set(range(filled))


def test_reference_batches_change_with_every_batch_offered_and_are_uniform():
    memory = GradientMemory(20, (8, 8), seed=3)
    counts, before = torch.zeros(20), None
    for _ in range(400):
        offer(memory, [0.0])
        slots = memory.reference(2, 5)
        if memory.seen > 20:
            assert before is None or slots.tolist() != before
            before = slots.tolist()
            counts[slots.flatten()] += 1
    expected = counts.sum() / 20
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def frequencies(stored, items, rounds: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each slot is taken, and how often an item wins (standard errors are below
    0.016).
    """
    memory = GradientMemory(len(stored), (8, 8), seed=1)
    offer(memory, stored)
    taken = torch.zeros(len(stored))
    for _ in range(rounds):
        slots = offer(memory, items)
        taken[slots[slots >= 0]] += 1
        memory.scores.copy_(torch.as_tensor(stored))
    return taken / rounds, taken.sum() / rounds / len(items)


def test_slots_are_challenged_in_proportion_to_their_score_above_the_least():
    stored = [-0.2, 0.0, 0.2, 0.6]
    weights = (torch.tensor(stored) + 0.2) / (0.8 + 0.01)
    taken, _ = frequencies(stored, [-1.0])  # P of the item is 0: it wins
    assert torch.allclose(taken, weights / weights.sum(), atol=0.05)
    assert taken[0] == 0


def test_two_items_challenge_two_slots_as_two_successive_weighted_draws_would():
    stored = [-0.2, 0.0, 0.2, 0.6]
    w = [0.0, 0.2, 0.4, 0.8]
    pairs = {(i, j): w[i] / 1.4 * w[j] / (1.4 - w[i]) for i in range(1, 4) for j in range(1, 4) if i != j}
    wanted = torch.tensor([sum(p for pair, p in pairs.items() if slot in pair) for slot in range(4)])
    taken, _ = frequencies(stored, [-1.0, -1.0])
    assert torch.allclose(taken, wanted, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("item", "slot"), [(0.0, 0.5), (0.5, 0.0), (-0.6, 0.2), (1.0, 1.0)])
def test_an_item_wins_in_proportion_to_the_slots_score(item, slot):
    _, won = frequencies([slot, slot], [item])
    wanted = ((slot + 1) / 2) / ((slot + 1) / 2 + (item + 1) / 2)
    assert won == pytest.approx(wanted, abs=0.05)


def test_slots_of_the_least_score_are_challenged_only_where_there_are_no_others():
    memory = GradientMemory(4, (8, 8), seed=5)
    offer(memory, [0.1] * 4)
    slots = offer(memory, [-1.0] * 3)  # all stored scores are equal
    assert sorted(set(slots.tolist())) == sorted(slots.tolist()) and (slots >= 0).all()
    memory.scores.copy_(torch.tensor([0.5, -0.5, -0.5, -0.5]))
    slots = offer(memory, [-1.0] * 6)  # more items than slots
    assert slots[0] == 0 and sorted(slots[:4].tolist()) == [0, 1, 2, 3] and slots[4:].tolist() == [-1, -1]
    assert memory.scores.tolist() == [-1.0] * 4 and memory.seen == 13


def test_certain_losers_change_nothing():
    """A stored score of -1 has P = 0: nothing that is less alike could be found."""
    memory = GradientMemory(3, (8, 8), seed=5)
    offer(memory, [-1.0] * 3)
    assert offer(memory, [0.5, -1.0]).tolist() == [-1, -1] and memory.indices.tolist() == [0, 1, 2]


def test_a_restored_memory_continues():
    memory, copy = GradientMemory(12, (8, 8), seed=3), GradientMemory(12, (8, 8), seed=99)
    offer(memory, torch.linspace(-0.5, 0.5, 12))
    copy.load({name: tensor.clone() for name, tensor in memory.tensors().items()})
    for _ in range(5):
        assert torch.equal(memory.reference(2, 3), copy.reference(2, 3))
        assert torch.equal(offer(memory, [-0.9, -0.2, 0.1]), offer(copy, [-0.9, -0.2, 0.1]))
    assert torch.equal(memory.scores, copy.scores) and torch.equal(memory.indices, copy.indices)
