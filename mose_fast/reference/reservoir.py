"""The replay memory's decisions in PyTorch: the definition of ``csrc/core/reservoir.h``.

State is int64[3] = {seed, counter, n_seen}.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from mose_fast.reference.philox import Purpose, philox, uniform_below

SEED, COUNTER, SEEN = 0, 1, 2


class SlotFilter(IntEnum):
    """Which filled slots a draw may return."""

    ALL = 0
    ONLY = 1
    OTHERS = 2


def reservoir_slots(seed: Tensor, positions: Tensor, capacity: int) -> Tensor:
    """Applies Algorithm R (Vitter 1985) to every item by itself, whatever the batch: from
    ``positions`` in the stream, int64 [B], to the slot each item is written to, int64 [B], -1 where
    it is rejected.
    """
    words = philox(seed, positions, torch.zeros_like(positions), Purpose.RESERVOIR)
    drawn = uniform_below(words[0], words[1], positions + 1)
    slots = torch.where(positions < capacity, positions, drawn)
    return torch.where(slots < capacity, slots, -1)


def insert(
    images: Tensor,
    labels: Tensor,
    tasks: Tensor,
    indices: Tensor,
    state: Tensor,
    x: Tensor,
    y: Tensor,
    task: int,
    index: Tensor,
) -> Tensor:
    """Offers a batch to the memory; see :func:`mose_fast.ops.reservoir.insert`."""
    capacity, count = len(images), len(x)
    order = torch.arange(count, device=x.device)
    slots = reservoir_slots(state[SEED], state[SEEN] + order, capacity)
    # In sequential order the last item that claims a slot stays. Rejected items claim a slot beyond
    # the last.
    claimed = torch.where(slots >= 0, slots, capacity)
    last = torch.full((capacity + 1,), -1, device=x.device).scatter_reduce_(0, claimed, order, "amax")
    slots = torch.where(last[claimed] == order, slots, -1)
    kept = slots >= 0
    written = slots[kept]
    images[written] = x[kept]
    labels[written] = y[kept]
    tasks[written] = task
    indices[written] = index[kept]
    state[SEEN] += count
    return slots


def draw_keys(seed: Tensor, counter: Tensor, slots: Tensor) -> Tensor:
    """Returns random 63-bit sort keys, int64, for the given slots (int64)."""
    words = philox(seed, counter, slots, Purpose.DRAW)
    return (words[0] << 31) | (words[1] >> 1)


def draw(tasks: Tensor, state: Tensor, k: int, filter: SlotFilter, task: int) -> Tensor:
    """Draws slots without replacement; see :func:`mose_fast.ops.reservoir.draw`."""
    candidates = torch.arange(len(tasks), device=tasks.device)
    if filter != SlotFilter.ALL:
        candidates = candidates[(tasks == task) == (filter == SlotFilter.ONLY)]
    # Candidates ascend, so a stable sort breaks ties of keys by slot.
    order = torch.argsort(draw_keys(state[SEED], state[COUNTER], candidates), stable=True)
    winners = candidates[order[:k]]
    state[COUNTER] += 1
    return torch.cat([winners, winners.new_full((min(k, len(tasks)) - len(winners),), -1)])
