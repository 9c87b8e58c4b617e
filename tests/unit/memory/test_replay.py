"""The replay memory's slots and draws, through the class that learners use (the laws are tested in
tests/unit/ops).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mose_fast.memory import BalancedMemory, ReplayMemory, highest


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


def told_apart(memory: ReplayMemory) -> bool:
    """Whether the host knows something else than what the memory holds."""
    return not torch.equal(memory.twin.tasks, memory.tasks) or not torch.equal(memory.twin.state, memory.state)


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
    memory.write(torch.tensor([5, -1, 0, 19]), *batch(90, 4, task=3))
    assert memory.indices[[5, 0, 19]].tolist() == [90, 92, 93] and memory.tasks[[5, 0, 19]].tolist() == [3, 3, 3]
    assert torch.equal(memory.images[:, 0, 0, 0].long(), memory.indices % 256)
    assert torch.equal(memory.labels, memory.indices % 5) and not told_apart(memory)
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


# What the host knows of it, and undoing


def everything(memory: ReplayMemory) -> list[torch.Tensor]:
    return [*(tensor.clone() for tensor in memory.tensors().values()), torch.tensor([memory.seen, memory.filled])]


@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_the_host_counts_what_the_memory_holds(capacity):
    memory, sizes = ReplayMemory(capacity, (8, 8), seed=capacity), torch.Generator().manual_seed(capacity)
    for step in range(30):
        task, count = step // 10, int(torch.randint(1, 12, (1,), generator=sizes))
        wanted = int(torch.randint(0, 9, (1,), generator=sizes))
        tasks = memory.tasks[: memory.filled]
        for how, fit in (({}, tasks >= 0), ({"only": task}, tasks == task), ({"others": task}, tasks != task)):
            drawn = memory.draw(wanted, **how)
            assert len(drawn) == min(wanted, int(fit.sum())) and fit[drawn].all()
        if step == 17:  # a memory that is loaded continues
            tensors = {name: tensor.clone() for name, tensor in memory.tensors().items()}
            memory = ReplayMemory(capacity, (8, 8), seed=99)
            memory.load(tensors)
        if step == 23:
            with memory.record() as record:
                memory.draw(2)
                memory.insert(*batch(5000, 3, 77))
            memory.restore(record)
        memory.insert(*batch(20 * step, count, task))
        assert not told_apart(memory) and memory.seen == memory.state[2]


@pytest.mark.parametrize("capacity", [3, 12, 100])
@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_batches_are_taken_out_again_in_reverse(policy, capacity):
    """Batches that collide with each other and with themselves, in a memory that is still filling
    or full.
    """
    kinds = {"reservoir": ReplayMemory, "balanced": partial(BalancedMemory, classes=5)}
    memory = kinds[policy](capacity, (8, 8), seed=5)
    memory.keep("score")
    memory.insert(*batch(0, 10, 0))
    states, records = [], []
    for step in range(1, 6):
        states.append(everything(memory))
        with memory.record() as record:
            memory.draw(4)
            slots = memory.insert(*batch(10 * step, 10, step))
            memory.write_extra("score", slots, torch.arange(10.0) + step)
        records.append(record)
    last = everything(memory)
    for state, record in zip(reversed(states), reversed(records), strict=True):
        memory.restore(record)
        assert all(map(torch.equal, everything(memory), state)) and not told_apart(memory)
    for step in range(1, 6):
        memory.draw(4)
        memory.write_extra("score", memory.insert(*batch(10 * step, 10, step)), torch.arange(10.0) + step)
    assert all(map(torch.equal, everything(memory), last))


def test_the_highest_are_taken_in_the_order_in_which_they_were_drawn():
    slots, scores = torch.tensor([7, 3, 9, 1]), torch.tensor([0.5, 2.0, -1.0, 3.0])
    assert highest(slots, scores, 2).tolist() == [3, 1]
    assert highest(slots, scores, 4).tolist() == highest(slots, scores, 9).tolist() == [7, 3, 9, 1]
    assert highest(torch.arange(10, 16), torch.tensor([0.0, 1, 0, 1, 0, 1]), 2).tolist() == [11, 13]
