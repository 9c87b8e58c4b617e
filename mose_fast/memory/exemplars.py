"""A memory of exemplars: equally many images of every class, chosen when the class's task ends
(docs/specification/baselines.md section 0.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.memory.replay import MemoryRecord, ReplayMemory
from mose_fast.memory.task_buffer import BufferRecord, TaskBuffer
from mose_fast.ops.draws import Purpose, permutation

__all__ = ["SELECTIONS", "ExemplarMemory", "herding_ranks", "positions_in_group"]

#: How the exemplars of a class are chosen.
SELECTIONS = {
    "first": "the first that came",
    "random": "at random",
    "herding": "so that the mean of their features follows the class's",
}


class ExemplarRecord(NamedTuple):
    """What :meth:`ExemplarMemory.restore` needs."""

    slots: MemoryRecord
    held: int
    buffer: BufferRecord


def positions_in_group(groups: Tensor) -> Tensor:
    """The number of earlier items with the same entry in ``groups`` int64 [N], by item."""
    order = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups)
    positions = torch.empty_like(groups)
    positions[order] = torch.arange(len(groups), device=groups.device) - (sizes.cumsum(0) - sizes)[groups[order]]
    return positions


def herding_ranks(features: Tensor, labels: Tensor, count: int) -> Tensor:
    """The order in which herding chooses the images of each class: each is the one that draws the
    sum of those chosen nearest to as many times the class's mean (Rebuffi et al., iCaRL, CVPR
    2017, in the form of LUCIR's repository).

    Args:
        features: float [N, D].
        labels: int64 [N].
        count: Number of choices in each class.

    Returns:
        int64 [N]: the number of choices of its class before it; ``count`` if it is not chosen.
    """
    directions = F.normalize(features.double(), dim=1)
    classes, numbers, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    # One row for each class, in which its images have their places; places left over are taken.
    places = positions_in_group(numbers)
    vectors = directions.new_zeros(len(classes), int(sizes.max()), directions.shape[1])
    vectors[numbers, places] = directions
    taken = torch.arange(vectors.shape[1], device=labels.device) >= sizes[:, None]
    means = vectors.sum(1) / sizes[:, None]
    ranks, wanted, row = torch.full_like(taken, count, dtype=torch.int64), means.clone(), torch.arange(len(classes))
    for rank in range(min(count, vectors.shape[1])):
        scores = torch.einsum("cnd,cd->cn", vectors, wanted)
        chosen = scores.masked_fill(taken, -torch.inf).argmax(1)
        # Of a class without further images, one that was chosen before.
        ranks[row, chosen] = torch.where(taken[row, chosen], ranks[row, chosen], rank)
        taken[row, chosen] = True
        wanted += means - vectors[row, chosen]
    return ranks[numbers, places]


class ExemplarMemory(ReplayMemory):
    """A memory that is filled when a task ends, from a buffer of the task's images: a class has
    M / (classes seen) slots, and loses some as further classes come.

    Until then the images of the current task are in the buffer alone, so :meth:`draw` gives rows of
    earlier tasks only. A class keeps its exemplars in the order in which they were chosen and loses
    the last ones first. A share of each class's slots may be held out for validation: these samples
    lie behind all others, where :meth:`draw` does not reach them.

    Args:
        capacity: Slots M.
        image_size: (H, W) of the images.
        selection: One of :data:`SELECTIONS`.
        validation: Share of a class's slots that is held out; at least one slot if it is not 0 and
            the class has two.
        classes: Number of classes K of the stream.
        seed: The run's seed.
        device: Device of the slots and the buffer.

    Attributes:
        buffer: The images of the current task.
        held: Number of slots with samples that are held out.
    """

    def __init__(
        self,
        capacity: int,
        image_size: tuple[int, int],
        *,
        selection: str = "first",
        validation: float = 0.0,
        classes: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(capacity, image_size, seed=seed, device=device)
        self.selection, self.validation, self.classes = selection, validation, classes
        self.buffer = TaskBuffer(image_size, self.images.device)
        self.held = 0

    @property
    def drawable(self) -> int:
        return self.filled - self.held

    @property
    def held_slots(self) -> slice:
        """The slots whose samples are held out."""
        return slice(self.drawable, self.filled)

    def quota(self, number: int, classes: int) -> tuple[int, int]:
        """The slots of a class: for training, and held out.

        Args:
            number: Number of classes seen before it.
            classes: Number of classes seen.
        """
        slots = self.capacity // classes + (number < self.capacity % classes)
        held = max(1, int(self.validation * slots)) if self.validation and slots > 1 else 0
        return slots - held, held

    def insert(self, x: Tensor, y: Tensor, task: int, index: Tensor, held_out: Tensor | None = None) -> Tensor:
        """Adds a batch to the buffer of the current task; no sample has a slot yet, so the result
        is -1 everywhere.

        Args:
            x, y, task, index: See :meth:`ReplayMemory.insert`.
            held_out: bool [B], the images to hold out; None: none.
        """
        held_out = torch.zeros_like(y, dtype=torch.bool) if held_out is None else held_out
        self.buffer.append(images=x, labels=y, indices=index, held_out=held_out)
        self.state[2] += len(x)
        if self.twin is not None:
            self.twin.state[2] += len(x)
        self.seen += len(x)
        return torch.full_like(y, -1)

    def rebuild(self, seen: Sequence[int], task: int, features: Tensor | None = None) -> None:
        """Ends a task: every class gets its share of the slots, and the buffer is emptied.

        On a card this waits for the card.

        Args:
            seen: All classes seen, in order of appearance.
            task: The task of the images in the buffer.
            features: float [buffer.filled, D] of the images in the buffer, for ``herding``.
        """
        before, device = self.filled, self.images.device
        number, quotas = torch.zeros(self.classes, dtype=torch.int64), torch.zeros(self.classes, 2, dtype=torch.int64)
        for position, c in enumerate(seen):
            number[c], quotas[c] = position, torch.tensor(self.quota(position, len(seen)))
        # Samples of earlier tasks come first, in the order in which they were chosen.
        choice = self._choice(int(quotas.max()), features)
        order = torch.cat([torch.arange(before, device=device), before + choice])
        labels = torch.cat([self.labels[:before], self.buffer.labels])[order]
        held = torch.cat([torch.arange(before, device=device) >= self.drawable, self.buffer.held_out])[order]
        groups = held * self.classes + number.to(device)[labels]
        kept = positions_in_group(groups) < quotas.to(device)[labels, held.long()]
        kept = kept.nonzero().flatten()
        kept = kept[torch.argsort(groups[kept], stable=True)]
        self._fill(order[kept], task)
        self.held = int(held[kept].sum())
        self.buffer.clear()

    def _choice(self, count: int, features: Tensor | None) -> Tensor:
        """The images of the buffer in the order in which they are chosen, int64 [buffer.filled]; of
        each class at most ``count`` will be.
        """
        filled, device = self.buffer.filled, self.images.device
        if self.selection == "random":
            return permutation(self.seed, self.seen, filled, Purpose.POLICY, device)
        if self.selection == "herding" and filled:
            return torch.argsort(herding_ranks(features, self.buffer.labels, count), stable=True)
        return torch.arange(filled, device=device)

    def _fill(self, order: Tensor, task: int) -> None:
        """Writes samples into the first slots: int64 [n], numbers in [slots; buffer]."""
        before, now, buffer = self.filled, len(order), self.buffer
        self._note_old(torch.arange(max(before, now), device=order.device))
        own = {"images": self.images, "labels": self.labels, "indices": self.indices, "tasks": self.tasks}
        new = {name: tensor for name, tensor in buffer.tensors().items() if name in own}
        new["tasks"] = torch.full_like(buffer.labels, task)
        for name, tensor in own.items():
            tensor[:now] = torch.cat([tensor[:before], new[name]])[order]
        for tensor in (self.labels, self.indices, self.tasks):
            tensor[now:before] = -1
        if self.twin is not None:
            self.twin.tasks.copy_(self.tasks)
        self.filled = now

    # Undoing and state

    @contextmanager
    def record(self) -> Iterator[ExemplarRecord]:
        held, buffer = self.held, self.buffer.record()
        with super().record() as slots:
            yield ExemplarRecord(slots, held, buffer)

    def restore(self, record: ExemplarRecord) -> None:
        super().restore(record.slots)
        self.held = record.held
        self.buffer.restore(record.buffer)

    def tensors(self) -> dict[str, Tensor]:
        own = {"held": torch.tensor(self.held)}
        return super().tensors() | own | {f"buffer/{name}": rows for name, rows in self.buffer.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        super().load(tensors)
        self.held = int(tensors["held"])
        self.buffer.load({name.removeprefix("buffer/"): rows for name, rows in tensors.items() if "buffer/" in name})
