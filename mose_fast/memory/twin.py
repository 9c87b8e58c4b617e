"""A copy on the host of the decisions of a memory on a GPU, which depend on seed and counters."""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.ops.reservoir import insert

__all__ = ["HostTwin"]


class HostTwin:
    """The tasks of all slots and the state of a reservoir memory, kept on the host by the same
    decisions as on the GPU.

    Attributes:
        tasks: int64 [M], as :attr:`mose_fast.memory.ReplayMemory.tasks`.
        labels: int64 [M], as :attr:`mose_fast.memory.ReplayMemory.labels`; only a memory of
            exemplars keeps them.
        state: int64 [3], as :attr:`mose_fast.memory.ReplayMemory.state`.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.tasks, self.labels = (torch.full((capacity,), -1, dtype=torch.int64) for _ in range(2))
        self.state = torch.tensor([seed, 0, 0], dtype=torch.int64)


def decide(tasks: Tensor, state: Tensor, count: int, task: int) -> Tensor:
    """Offers ``count`` items without images to slots: writes ``tasks`` int64 [M] and ``state``;
    returns int64 [count], -1 if an item is not stored.
    """
    slots, items = torch.empty(len(tasks), 0, 0, 3, dtype=torch.uint8), torch.empty(count, 0, 0, 3, dtype=torch.uint8)
    unused, labels = torch.empty_like(tasks), torch.zeros(count, dtype=torch.int64)
    return insert(slots, unused, tasks, torch.empty_like(tasks), state, items, labels, task, labels)
