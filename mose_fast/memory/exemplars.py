"""A memory of exemplars: equally many images of every class, chosen when the class's task ends
(docs/specification/baselines.md section 0.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.device import upload
from mose_fast.memory.replay import MemoryRecord, ReplayMemory
from mose_fast.memory.task_buffer import BufferRecord, TaskBuffer
from mose_fast.ops.draws import Purpose, permutation, random_words

#: How the exemplars of a class are chosen.
SELECTIONS = {
    "first": "the first that came",
    "random": "at random",
    "herding": "the mean of their directions follows the class's, as in LUCIR's repository",
    "greedy": "each brings the mean of their features nearest to the class's, as in BiC's repository",
}

#: The selections that look at the features of all images of the task.
HERDINGS = ("herding", "greedy")

# After as many steps LUCIR's repository gives up a class in which herding finds no further image.
_HERDING_STEPS = 1000


class ExemplarRecord(NamedTuple):
    """What :meth:`ExemplarMemory.restore` needs."""

    slots: MemoryRecord
    held: int
    most: int
    buffer: BufferRecord


def positions_in_group(groups: Tensor) -> Tensor:
    """The number of earlier items with the same entry in ``groups`` int64 [N], by item."""
    order = torch.argsort(groups, stable=True)
    sizes = torch.bincount(groups)
    positions = torch.empty_like(groups)
    positions[order] = torch.arange(len(groups), device=groups.device) - (sizes.cumsum(0) - sizes)[groups[order]]
    return positions


def herding_ranks(features: Tensor, labels: Tensor, count: int, selection: str = "herding") -> Tensor:
    """The order in which herding chooses ``count`` images of each class: each is the one that draws
    the sum of those chosen nearest to as many times the class's mean (Rebuffi et al., iCaRL, CVPR
    2017).

    ``herding`` compares directions and may choose an image again, which then counts once more in
    the sum and is no further exemplar; a class has no more than 1,000 choices. ``greedy`` compares
    features and chooses each image once.

    ``features`` are float [N, D], ``labels`` int64 [N]. Returns int64 [N]: the number of images of
    its class that were chosen before it; ``count`` if it is not chosen.
    """
    again = selection == "herding"
    features = features.double()
    classes, numbers, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    # One row for each class, in which its images have their places; places left over are closed.
    places = positions_in_group(numbers)
    vectors = features.new_zeros(len(classes), int(sizes.max()), features.shape[1])
    vectors[numbers, places] = F.normalize(features, dim=1) if again else features
    closed = torch.arange(vectors.shape[1], device=labels.device) >= sizes[:, None]
    means = vectors.sum(1) / sizes[:, None]
    lengths = vectors.square().sum(2)
    ranks = torch.full_like(closed, count, dtype=torch.int64)
    wanted, row, found = means.clone(), torch.arange(len(classes), device=labels.device), torch.zeros_like(sizes)
    for _ in range(_HERDING_STEPS if again else count):
        scores = 2 * torch.einsum("cnd,cd->cn", vectors, wanted) - lengths
        chosen = scores.masked_fill(closed, -torch.inf).argmax(1)
        further = (ranks[row, chosen] == count) & ~closed[row, chosen] & (found < count)
        ranks[row, chosen] = torch.where(further, found, ranks[row, chosen])
        found += further
        if bool((found == sizes.clamp(max=count)).all()):
            break
        if not again:
            closed[row, chosen] = True
        wanted += means - vectors[row, chosen]
    return ranks[numbers, places]


class ExemplarMemory(ReplayMemory):
    """A memory that is filled when a task ends, from a buffer of the task's images: a class has M /
    (classes seen) slots, and loses some as further classes come.

    Until then the images of the current task are in the buffer, so :meth:`draw` gives rows of
    earlier tasks only; :meth:`draw_all` gives rows of all classes. A class keeps its exemplars in
    the order in which they were chosen and loses the last ones first. The buffer has no image that
    could not become an exemplar, unless ``whole``. All decisions are made on the host.

    Args:
        selection: One of :data:`SELECTIONS`.
        validation: Share of a class's slots that is held out for validation, behind all others,
            where no draw reaches them; at least one slot if it is not 0 and the class has two.
        whole: Whether the buffer keeps every image of the task, which the selections of
            :data:`HERDINGS` do in any case unless ``within``.
        within: Whether the images of the buffer take slots of the memory: old classes give them up
            when a new one comes, not when its task ends.

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
        whole: bool = False,
        within: bool = False,
        classes: int,
        **how: Any,
    ) -> None:
        super().__init__(capacity, image_size, **how)
        self.selection, self.validation, self.classes = selection, validation, classes
        self.whole, self.within = (whole or selection in HERDINGS) and not within, within
        self.buffer = TaskBuffer(image_size, self.images.device)
        self.held = self._most = 0

    @property
    def most(self) -> int:
        """The most images that slots and buffer have held together after a batch."""
        return self._most

    @property
    def drawable(self) -> int:
        return self.filled - self.held

    @property
    def held_slots(self) -> slice:
        """The slots whose samples are held out."""
        return slice(self.drawable, self.filled)

    def quota(self, number: int, classes: int) -> tuple[int, int]:
        """The slots of a class, for training and held out; ``number`` classes came before it."""
        slots = self.capacity // classes + (number < self.capacity % classes)
        held = max(1, int(self.validation * slots)) if self.validation and slots > 1 else 0
        return slots - held, held

    def insert(
        self, x: Tensor, y: Tensor, task: int, index: Tensor, *, known: Sequence[int], classes: Tensor, held_out: Tensor
    ) -> Tensor:
        """Adds a batch to the buffer of the current task; no sample has a slot yet, so the result
        is -1 everywhere. ``known``: the classes seen, and those that are known to come in this
        task, in order. On the host: ``classes``, the labels, and ``held_out``, bool [B].
        """
        priorities = torch.arange(self.seen, self.seen + len(x))
        if self.selection != "first":
            high, low, *_ = random_words(self.seed, self.seen, len(x), Purpose.POLICY)
            priorities = (high << 31) | (low >> 1)
        self.buffer.append(images=x, labels=y, indices=index, classes=classes, held_out=held_out, priorities=priorities)
        self._count_seen(len(x))
        if not self.whole:
            self._trim(known)
        self._most = max(self._most, self.filled + self.buffer.filled)
        return torch.full_like(y, -1)

    def draw_all(self, count: int, known: Sequence[int]) -> Tensor:
        """Draws at most ``count`` samples uniformly without replacement from what would be the
        exemplars if the task ended now with the ``known`` classes, in order, but for those that are
        held out. Returns int64 for :meth:`gather`: slots, and M plus the number of an image in the
        buffer.
        """
        samples, held = self._exemplars(known, self.buffer.priorities)
        samples = samples[~held]
        samples = torch.where(samples < self.filled, samples, samples - self.filled + self.capacity)
        drawn = samples[permutation(self.seed, int(self.twin.state[1]), len(samples), Purpose.DRAW)][:count]
        for state in (self.state, self.twin.state):
            state[1] += 1
        return upload(drawn, self.images.device)

    @property
    def slots_end(self) -> int:
        return self.capacity + self.buffer.filled if self.buffer.filled else self.filled

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        if not self.buffer.filled:
            return super().gather(slots)
        inside, places = slots < self.capacity, (slots - self.capacity).clamp(min=0)
        images, labels = super().gather(torch.where(inside, slots, 0))
        images = torch.where(inside[:, None, None, None], images, self.buffer.images[places])
        return images, torch.where(inside, labels, self.buffer.labels[places])

    def rebuild(self, seen: Sequence[int], task: int, features: Tensor | None = None) -> None:
        """Ends a task: every class seen, in order of appearance, gets its share of the slots, and
        the buffer is emptied. ``features`` float [buffer.filled, D] are those of the buffer's
        images, for :data:`HERDINGS`; the host waits for them.
        """
        ranks = self.buffer.priorities
        trained = ~self.buffer.held_out
        if self.selection in HERDINGS and bool(trained.any()):
            # Images that are held out stay what they were: the first ones.
            ranks, chosen = torch.zeros_like(ranks), features[upload(trained, features.device)].cpu()
            most = max(self.quota(number, len(seen))[0] for number in range(len(seen)))
            ranks[trained] = herding_ranks(chosen, self.buffer.classes[trained], most, self.selection)
        samples, held = self._exemplars(seen, ranks)
        self._fill(samples, task)
        self.held = int(held.sum())
        self.buffer.clear()

    def _exemplars(self, known: Sequence[int], ranks: Tensor) -> tuple[Tensor, Tensor]:
        """The samples that the known classes have slots for, class by class in the order of choice,
        those that are held out last: int64 [n], numbers in [slots; buffer], and bool [n], whether
        each is held out; on the host. Of the buffer, lower ``ranks`` are chosen before higher ones.
        """
        before, buffer = self.filled, self.buffer
        number, quotas = torch.zeros(self.classes, dtype=torch.int64), torch.zeros(self.classes, 2, dtype=torch.int64)
        shares = [self.quota(position, len(known)) for position in range(len(known))]
        number[list(known)], quotas[list(known)] = torch.arange(len(known)), torch.tensor(shares)
        # Samples of earlier tasks come first, in the order in which they were chosen.
        order = torch.cat([torch.arange(before), before + torch.argsort(ranks, stable=True)])
        labels = torch.cat([self.twin.labels[:before], buffer.classes])[order]
        held = torch.cat([torch.arange(before) >= self.drawable, buffer.held_out])[order]
        groups = held * self.classes + number[labels]
        kept = (positions_in_group(groups) < quotas[labels, held.long()]).nonzero().flatten()
        kept = kept[torch.argsort(groups[kept], stable=True)]
        return order[kept], held[kept]

    def _trim(self, known: Sequence[int]) -> None:
        """Removes images, and ``within`` old exemplars, that have no slot now."""
        samples, held = self._exemplars(known, self.buffer.priorities)
        old = samples < self.filled
        waiting = (samples[~old] - self.filled).sort().values
        if self.within and int(old.sum()) < self.filled:
            self._fill(samples[old], -1)
            self.held = int(held[old].sum())
        self.buffer.keep(waiting)

    def _fill(self, samples: Tensor, task: int) -> None:
        """Writes samples, int64 [n] on the host, numbers in [slots; buffer], to the first slots."""
        before, now, buffer = self.filled, len(samples), self.buffer
        self._note_old(torch.arange(max(before, now), device=self.images.device))
        on_host = [(self.twin.labels, buffer.classes), (self.twin.tasks, torch.full_like(buffer.classes, task))]
        tasks = torch.full_like(buffer.labels, task)
        on_device = [(self.labels, buffer.labels), (self.indices, buffer.indices), (self.tasks, tasks)]
        on_device.append((self.images, buffer.images))
        for places, pairs in ((samples, on_host), (upload(samples, self.images.device), on_device)):
            for own, new in pairs:
                own[:now] = torch.cat([own[:before], new])[places]
                if own is not self.images:
                    own[now:before] = -1
        self.filled = now

    # Undoing and state

    @contextmanager
    def record(self) -> Iterator[ExemplarRecord]:
        held, most, buffer = self.held, self._most, self.buffer.record()
        with super().record() as slots:
            yield ExemplarRecord(slots, held, most, buffer)

    def restore(self, record: ExemplarRecord) -> None:
        super().restore(record.slots)
        self.held, self._most = record.held, record.most
        self.buffer.restore(record.buffer)

    def tensors(self) -> dict[str, Tensor]:
        own = {"held": torch.tensor(self.held), "most": torch.tensor(self._most)}
        return super().tensors() | own | {f"buffer/{name}": rows for name, rows in self.buffer.tensors().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        super().load(tensors)
        self.held, self._most = int(tensors["held"]), int(tensors["most"])
        self.buffer.load({name.removeprefix("buffer/"): rows for name, rows in tensors.items() if "buffer/" in name})
