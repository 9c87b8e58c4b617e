"""Losses on their way from the device to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.methods import Learner, Prepared

#: Largest number of steps whose losses have not arrived. It limits how far the host runs ahead of a
#: GPU, and so how long Ctrl-C takes.
OUTSTANDING = 8

# Largest number of losses of a step.
_WIDTH = 16


class Taken(NamedTuple):
    """A step that was taken: its batch, the run's position before it, how many steps of the batch
    were replayed from a graph, and how many captures were tried once more.
    """

    prepared: Prepared
    position: dict[str, int]
    replayed: int = 0
    retries: int = 0


class _Unread(NamedTuple):
    taken: Taken
    names: tuple[str, ...]
    values: Tensor | dict[str, float] | None
    arrived: torch.cuda.Event | None


class LossReader:
    """Reads losses in the order of their steps: at once, or, if a learner's losses are read late,
    from copies to pinned memory while later steps are launched.
    """

    def __init__(self, learner: Learner) -> None:
        self._device = learner.device if learner.reads_losses_late else None
        self._waiting: deque[_Unread] = deque()
        if self._device is not None:
            self._host = torch.empty(OUTSTANDING, _WIDTH, pin_memory=True)
            self._row = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, taken: Taken, losses: dict[str, Tensor] | None) -> None:
        """Adds a step and its losses; None if nothing was trained."""
        if losses is None or self._device is None:
            values = losses and {name: float(value) for name, value in losses.items()}
            self._waiting.append(_Unread(taken, (), values, None))
            return
        row = self._host[self._row][: len(losses)]
        self._row = (self._row + 1) % OUTSTANDING
        row.copy_(torch.stack(list(losses.values())), non_blocking=True)
        arrived = torch.cuda.current_stream(self._device).record_event()
        self._waiting.append(_Unread(taken, tuple(losses), row, arrived))

    def drain(self, *, wait: bool = False) -> Iterator[tuple[Taken, dict[str, float] | None]]:
        """Yields each step once whose losses have arrived, the oldest first. Without ``wait``, it
        waits only if there is no room for another step.
        """
        while self._waiting:
            taken, names, values, arrived = self._waiting[0]
            if arrived is not None and not arrived.query():
                if not wait and len(self._waiting) < OUTSTANDING:
                    return
                arrived.synchronize()
            self._waiting.popleft()
            yield taken, dict(zip(names, values.tolist(), strict=True)) if isinstance(values, Tensor) else values

    def drop(self) -> list[Taken]:
        """Forgets the steps that :meth:`drain` has not yielded; returns them, the oldest first."""
        dropped = [waiting.taken for waiting in self._waiting]
        self._waiting.clear()
        return dropped
