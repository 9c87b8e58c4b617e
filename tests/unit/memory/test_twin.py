"""What the host knows of a memory on a GPU, and how a batch is taken out of the memory again."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mose_fast.memory import BalancedMemory, ReplayMemory
from mose_fast.memory.twin import HostTwin


def batch(start: int, n: int, task: int) -> tuple:
    index = torch.arange(start, start + n)
    return (index % 256).to(torch.uint8).view(n, 1, 1, 1).expand(n, 8, 8, 3), index % 5, task, index


def with_twin(capacity: int, seed: int) -> ReplayMemory:
    """A memory that asks its twin instead of itself, as one on a GPU does."""
    memory = ReplayMemory(capacity, (8, 8), seed=seed)
    memory.twin = HostTwin(capacity, seed)
    return memory


def everything(memory: ReplayMemory) -> list[torch.Tensor]:
    return [*(tensor.clone() for tensor in memory.tensors().values()), torch.tensor([memory.seen, memory.filled])]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_the_twin_counts_what_the_memory_holds(capacity, seed):
    plain, twinned = ReplayMemory(capacity, (8, 8), seed=seed), with_twin(capacity, seed)
    sizes = torch.Generator().manual_seed(seed)
    for step in range(30):
        task, count = step // 10, int(torch.randint(1, 12, (1,), generator=sizes))
        wanted = int(torch.randint(0, 9, (1,), generator=sizes))
        for how in ({}, {"only": task}, {"others": task}, {"only": 99}):
            drawn = twinned.draw(wanted, **how)
            assert torch.equal(drawn, plain.draw(wanted, **how)) and (drawn >= 0).all()
        if step == 17:
            # A memory that is loaded continues, and so does its twin.
            tensors = {name: tensor.clone() for name, tensor in twinned.tensors().items()}
            twinned = with_twin(capacity, 99)
            twinned.load(tensors)
        if step == 23:
            with twinned.record() as record:
                twinned.draw(2)
                twinned.insert(*batch(5000, 3, 77))
            twinned.restore(record)
        for memory in (plain, twinned):
            memory.insert(*batch(20 * step, count, task))
        assert torch.equal(twinned.twin.tasks, twinned.tasks) and torch.equal(twinned.twin.state, twinned.state)
        assert twinned.seen == plain.seen
    assert torch.equal(plain.indices, twinned.indices)


def test_slots_that_a_policy_chose_reach_the_twin():
    memory = with_twin(6, 0)
    for start in range(0, 20, 10):
        memory.insert(*batch(start, 10, 0))
    memory.write(torch.tensor([5, -1, 0]), *batch(20, 3, 1))
    assert torch.equal(memory.twin.tasks, memory.tasks) and torch.equal(memory.twin.state, memory.state)
    assert sorted(memory.draw(6, only=1).tolist()) == [0, 5]


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("capacity", [3, 12, 100])
@pytest.mark.parametrize("policy", ["reservoir", "balanced"])
def test_batches_are_taken_out_again_in_reverse(policy, capacity, twin):
    """Batches that collide with each other and with themselves, in a memory that is still filling
    or full.
    """
    kinds = {"reservoir": ReplayMemory, "balanced": partial(BalancedMemory, classes=5)}
    memory = kinds[policy](capacity, (8, 8), seed=5)
    memory.twin = HostTwin(capacity, 5) if twin else None
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
        assert all(torch.equal(a, b) for a, b in zip(everything(memory), state, strict=True))
        if twin:
            assert torch.equal(memory.twin.tasks, memory.tasks) and torch.equal(memory.twin.state, memory.state)
    for step in range(1, 6):
        memory.draw(4)
        memory.write_extra("score", memory.insert(*batch(10 * step, 10, step)), torch.arange(10.0) + step)
    assert all(torch.equal(a, b) for a, b in zip(everything(memory), last, strict=True))
