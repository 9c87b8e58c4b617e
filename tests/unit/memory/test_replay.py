"""The replay memory's slots and draws, through the class that learners use (the laws are tested in
tests/unit/ops).
"""

from __future__ import annotations

import pytest
import torch

from mose_fast.memory import ReplayMemory


def batch(start: int, n: int, task: int = 0) -> tuple:
    """Images that show their stream index, labels index modulo 5."""
    index = torch.arange(start, start + n)
    x = (index % 256).to(torch.uint8).view(n, 1, 1, 1).expand(n, 8, 8, 3)
    return x, index % 5, task, index


def filled(capacity: int = 20, tasks: int = 3, per_task: int = 30, seed: int = 0) -> ReplayMemory:
    memory = ReplayMemory(capacity, (8, 8), seed=seed)
    for start in range(0, tasks * per_task, 10):
        memory.insert(*batch(start, 10, start // per_task))
    return memory


def test_slots_stay_together():
    memory = filled()
    assert memory.seen == 90 and memory.filled == 20 and memory.state.tolist()[2] == 90
    assert len(set(memory.indices.tolist())) == 20
    assert torch.equal(memory.images[:, 3, 4, 1].long(), memory.indices % 256)
    assert torch.equal(memory.labels, memory.indices % 5)
    assert torch.equal(memory.tasks, memory.indices // 30)


def test_returned_slots_hold_the_samples():
    memory = ReplayMemory(7, (8, 8), seed=4)
    for start in range(0, 60, 10):
        x, y, task, index = batch(start, 10)
        slots = memory.insert(x, y, task, index)
        kept = slots >= 0
        assert torch.equal(memory.indices[slots[kept]], index[kept])


def test_an_empty_memory():
    memory = ReplayMemory(4, (8, 8), seed=0)
    assert memory.filled == 0
    assert memory.draw(3).tolist() == memory.draw(3, only=0).tolist() == memory.draw(3, others=0).tolist() == []


def test_draws_respect_filters_and_never_repeat():
    memory = filled()
    for _ in range(20):
        assert (memory.tasks[memory.draw(5, only=1)] == 1).all()
        assert (memory.tasks[memory.draw(5, others=1)] != 1).all()
        drawn = memory.draw(50)
        assert sorted(drawn.tolist()) == list(range(20))
    assert memory.draw(3, only=99).tolist() == []
    assert len(memory.draw(0)) == 0


def test_a_single_slot_keeps_its_dimension():
    """The released code loses the batch dimension where exactly one slot qualifies."""
    memory = ReplayMemory(10, (8, 8), seed=0)
    memory.insert(*batch(0, 1, task=0))
    memory.insert(*batch(1, 5, task=1))
    only = memory.draw(4, only=0)
    assert only.shape == (1,) and memory.images[only].shape == (1, 8, 8, 3)


def test_a_restored_memory_continues():
    memory, copy = filled(seed=3), ReplayMemory(20, (8, 8), seed=99)
    copy.load({name: tensor.clone() for name, tensor in memory.tensors().items()})
    for start in range(90, 150, 10):
        assert torch.equal(memory.draw(6, others=2), copy.draw(6, others=2))
        assert torch.equal(memory.insert(*batch(start, 10, 3)), copy.insert(*batch(start, 10, 3)))
    assert torch.equal(memory.indices, copy.indices) and copy.seen == 150


def test_slots_that_a_policy_chose():
    memory = filled()
    x, y, task, index = batch(90, 4, task=3)
    memory.write(torch.tensor([5, -1, 0, 19]), x, y, task, index)
    assert memory.indices[[5, 0, 19]].tolist() == [90, 92, 93] and memory.tasks[[5, 0, 19]].tolist() == [3, 3, 3]
    assert torch.equal(memory.images[:, 0, 0, 0].long(), memory.indices % 256) and torch.equal(
        memory.labels, memory.indices % 5
    )
    assert memory.seen == 94 == memory.state[2] and 91 not in memory.indices


def test_extras_follow_their_slots_and_belong_to_the_state():
    memory, copy = ReplayMemory(6, (8, 8), seed=0), ReplayMemory(6, (8, 8), seed=0)
    for one in (memory, copy):
        assert one.keep("score", (2,), torch.float64).shape == (6, 2)
    for start in range(0, 40, 10):
        x, y, task, index = batch(start, 10)
        memory.write_extra("score", memory.insert(x, y, task, index), torch.stack([index, -index], dim=1))
    assert torch.equal(memory.extras["score"][:, 0], memory.indices.double())
    copy.load({name: tensor.clone() for name, tensor in memory.tensors().items()})
    assert torch.equal(copy.extras["score"], memory.extras["score"])
    with pytest.raises(ValueError, match=r"memory\.extra/score is missing"):
        copy.load(ReplayMemory(6, (8, 8), seed=0).tensors())


def test_unusable_arguments():
    with pytest.raises(ValueError, match="capacity is 0"):
        ReplayMemory(0, (8, 8), seed=0)
    memory = ReplayMemory(4, (8, 8), seed=0)
    with pytest.raises(ValueError, match="at most one"):
        memory.draw(2, only=0, others=1)
    with pytest.raises(ValueError, match="wanted"):
        memory.load(ReplayMemory(5, (8, 8), seed=0).tensors())
