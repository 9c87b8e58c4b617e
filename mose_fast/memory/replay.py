"""A replay memory filled by reservoir sampling (docs/specification/mose.md section 4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.device import upload
from mose_fast.ops.reservoir import SlotFilter, draw, insert
from mose_fast.settings.knob import ConfigError, plain


class MemoryRecord(NamedTuple):
    """What :meth:`ReplayMemory.restore` needs to undo draws and writes: the state (seed, draws,
    items seen), and for each write, in order, its slots, int64 [n], and their old contents by name.
    """

    state: tuple[int, int, int]
    filled: int
    overwritten: list[tuple[Tensor, dict[str, Tensor]]]


class HostTwin:
    """What decisions depend on, once more on the host, where the same ones are made as on a GPU:
    the tasks and labels of all slots, int64 [M], and the memory's state, int64 [3]. Only a memory
    of exemplars keeps the labels.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.tasks, self.labels = (torch.full((capacity,), -1, dtype=torch.int64) for _ in range(2))
        self.state = torch.tensor([seed, 0, 0], dtype=torch.int64)

    def insert(self, count: int, task: int) -> Tensor:
        """Offers ``count`` items without images; returns int64 [count], their slots or -1."""
        images, x = (torch.empty(n, 0, 0, 3, dtype=torch.uint8) for n in (len(self.tasks), count))
        labels, indices, y = *(torch.empty_like(self.tasks) for _ in range(2)), torch.zeros(count, dtype=torch.int64)
        return insert(images, labels, self.tasks, indices, self.state, x, y, task, y)


class Extras(dict[str, Tensor]):
    """What a method keeps beside the samples, by name.

    Attributes:
        by_steps: The names of those that training steps write.
        planning: Whether plans are made ahead of steps; ``by_steps`` must not be read then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_steps: set[str] = set()
        self.planning = False

    def __getitem__(self, name: str) -> Tensor:
        if self.planning and name in self.by_steps:
            raise ConfigError(
                f"memory.extras[{name!r}], which steps write, is used in plan, retrieve or store, which run ahead of"
                " steps; wanted planning = Planning.BATCH_BY_BATCH in the method's class, or it used in the step alone"
            )
        return super().__getitem__(name)


class ReplayMemory:
    """A memory whose slots hold image, label, task and index in the original stream; each stream
    item is kept with equal probability.

    Random decisions are counter-based: they depend only on (seed, counters), so that every device
    makes the same ones and a restored memory continues as if it had never stopped. The host makes
    them too, so that neither :meth:`insert` nor :meth:`draw` waits for a GPU.

    Args:
        capacity: Slots M.
        image_size: (H, W) of the images.

    Attributes:
        images: uint8 [M, H, W, 3]; labels, tasks, indices: int64 [M], -1 in a slot without a
            sample.
        filled: Number of slots that hold samples: the first ones.
        state: int64 [3]: seed, number of draws so far, number of items seen.
        extras: Tensors [M, ...] that a method keeps beside each sample, by name; see :meth:`keep`.
    """

    def __init__(
        self, capacity: int, image_size: tuple[int, int], *, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; wanted a replay memory of at least 1 slot")
        self.capacity = capacity
        self.images = torch.zeros(capacity, *image_size, 3, dtype=torch.uint8, device=device)
        self.labels, self.tasks, self.indices = (
            torch.full((capacity,), -1, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.state = torch.tensor([seed, 0, 0], dtype=torch.int64, device=device)
        self.extras = Extras()
        self.seed, self.seen, self.filled = seed, 0, 0
        self.twin = HostTwin(capacity, seed)
        self._record: MemoryRecord | None = None

    @property
    def drawable(self) -> int:
        """Number of slots that :meth:`draw` draws from: the first ones."""
        return self.filled

    @property
    def most(self) -> int:
        """The most samples that the memory has held after a batch."""
        return self.filled

    @property
    def bytes_a_sample(self) -> int:
        """Bytes of a sample with all that is kept beside it."""
        return sum(tensor.nbytes for tensor in self._by_slot().values()) // self.capacity

    def insert(self, x: Tensor, y: Tensor, task: int, index: Tensor) -> Tensor:
        """Offers a batch, item by item: ``x`` uint8 [B, H, W, 3], ``y`` int64 [B], ``index`` int64
        [B], positions in the original stream; all on the memory's device. Returns int64 [B]: the
        slot of each item now, -1 if it was not stored.
        """
        task = plain(task)
        slots = self.twin.insert(len(x), task)
        if self._record is not None:
            self._note_old(upload(slots[slots >= 0], self.images.device))
        slots = insert(self.images, self.labels, self.tasks, self.indices, self.state, x, y, task, index)
        self.seen += len(x)
        self.filled = min(self.filled + len(x), self.capacity)
        return slots

    def write(self, slots: Tensor, x: Tensor, y: Tensor, task: int, index: Tensor) -> None:
        """Stores a batch in slots that another policy has chosen, int64 [B], each at most once, -1
        if an item is not stored. A policy must fill the slots in order: exactly the first
        ``filled`` slots hold samples. On a GPU this waits for it.
        """
        kept = slots >= 0
        written = slots[kept]
        self._note_old(written)
        self.images[written], self.labels[written], self.indices[written] = x[kept], y[kept], index[kept]
        self.tasks[written] = self.twin.tasks[written.cpu()] = task
        self._count_seen(len(x))
        if self.filled < self.capacity:
            self.filled += int((written >= self.filled).sum())

    def keep(
        self, name: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, *, by_steps: bool = False
    ) -> Tensor:
        """Adds zeros ``[M, *shape]``, a row for each slot, to :meth:`tensors`; the caller of
        :meth:`insert` writes them with :meth:`write_extra`. ``by_steps``: training steps write
        them, in their order, not the plans that store samples; undoing a plan then leaves them.
        """
        # The last row takes what is not stored, so that nobody need ask which samples are.
        rows = torch.zeros(self.capacity + 1, *shape, dtype=dtype, device=self.images.device)
        self.extras[name] = rows[: self.capacity]
        if by_steps:
            self.extras.by_steps.add(name)
        return self.extras[name]

    def write_extra(self, name: str, slots: Tensor, values: Tensor, *, unless: Tensor | None = None) -> None:
        """Writes ``values`` [B, ...] beside the samples that :meth:`insert` put into ``slots``
        (int64 [B], -1: not stored), unless the bool scalar ``unless`` is True. The host never waits
        for a GPU. Raises ConfigError for slots None: a step has none whose batch is stored later.
        """
        if slots is None:
            raise ConfigError(
                f"write_extra({name!r}, ...) got slots None; wanted the slots of a batch: rows.stored is None in a step"
                " on the memory alone, and where batches are not planned ahead, since they are stored after their step;"
                " then write in store()"
            )
        kept = self.extras[name]
        rows = kept.as_strided((self.capacity + 1, *kept.shape[1:]), kept.stride())
        places, values = torch.where(slots < 0, self.capacity, slots), values.to(kept.dtype)
        rows.index_copy_(0, places, values if unless is None else torch.where(unless, rows[places], values))

    def draw(self, count: int, *, only: int | None = None, others: int | None = None) -> Tensor:
        """Draws slots uniformly without replacement, ``only`` from this task, or from all
        ``others`` but this: int64 [n], n = min(count, slots that qualify), in random order.
        """
        count, only, others = plain(count), plain(only), plain(others)
        if only is not None and others is not None:
            raise ValueError(f"only is {only} and others is {others}; wanted at most one of them")
        tasks = self.twin.tasks[: self.drawable]
        if only is not None:
            chosen, task, qualify = SlotFilter.ONLY, only, int((tasks == only).sum())
        elif others is not None:
            chosen, task, qualify = SlotFilter.OTHERS, others, int((tasks != others).sum())
        else:
            chosen, task, qualify = SlotFilter.ALL, 0, len(tasks)
        slots = draw(self.tasks[: self.drawable], self.state, count, chosen, task)
        self.twin.state[1] += 1
        return slots[: min(count, qualify)]

    @property
    def slots_end(self) -> int:
        """One more than the largest slot that a draw can give."""
        return self.filled

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 [n, H, W, 3] and labels int64 [n] of drawn ``slots`` int64 [n]."""
        return self.images[slots], self.labels[slots]

    @contextmanager
    def record(self) -> Iterator[MemoryRecord]:
        """A context that records what :meth:`restore` needs to undo all draws and writes inside."""
        self._record = MemoryRecord(tuple(self.twin.state.tolist()), self.filled, [])
        try:
            yield self._record
        finally:
            self._record = None

    def restore(self, record: MemoryRecord) -> None:
        """Undoes what happened while :meth:`record` recorded. Restore the newest record first."""
        state, own = torch.tensor(record.state), self._by_slot()
        for slots, contents in reversed(record.overwritten):
            for name, old in contents.items():
                own[name][slots] = old
        self.state.copy_(upload(state, self.state.device), non_blocking=True)
        self.seen, self.filled = record.state[2], record.filled
        self._tell_twin(state)

    def _count_seen(self, items: int) -> None:
        for state in (self.state, self.twin.state):
            state[2] += items
        self.seen += items

    def _tell_twin(self, state: Tensor) -> None:
        self.twin.tasks.copy_(self.tasks)
        self.twin.labels.copy_(self.labels)
        self.twin.state.copy_(state)

    def _note_old(self, slots: Tensor) -> None:
        """Adds to the record the contents of slots that are about to be overwritten."""
        if self._record is not None:
            of_steps = {f"extra/{name}" for name in self.extras.by_steps}
            by_plans = {name: tensor for name, tensor in self._by_slot().items() if name not in of_steps}
            self._record.overwritten.append((slots, {name: tensor[slots] for name, tensor in by_plans.items()}))

    def _by_slot(self) -> dict[str, Tensor]:
        """The tensors that have a row for each slot."""
        own = {"images": self.images, "labels": self.labels, "tasks": self.tasks, "indices": self.indices}
        return own | {f"extra/{name}": tensor for name, tensor in self.extras.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint must contain."""
        return self._by_slot() | {"state": self.state}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies what :meth:`tensors` returned. Raises ValueError for another shape."""
        for name, own in ReplayMemory.tensors(self).items():
            if name not in tensors:
                raise ValueError(f"memory.{name} is missing; wanted the state of a memory that keeps it")
            if own.shape != tensors[name].shape:
                raise ValueError(f"memory.{name} has shape {tuple(tensors[name].shape)}; wanted {tuple(own.shape)}")
            own.copy_(tensors[name])
        self.seed, _, self.seen = tensors["state"].tolist()
        self.filled = int((tensors["labels"] >= 0).sum())
        self._tell_twin(tensors["state"])


def highest(slots: Tensor, scores: Tensor, count: int) -> Tensor:
    """The ``count`` candidates, int64 [S], with the highest scores, float [S], in the candidates'
    order; of equal scores the first is taken (MIR, ASER).
    """
    chosen = torch.sort(scores, descending=True, stable=True).indices[:count]
    return slots[chosen.sort().values]
