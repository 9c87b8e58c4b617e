"""A stream: images, labels by head index, tasks, and the order in which batches arrive."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mose_fast.device import upload
from mose_fast.streams.draws import StreamError, draw_order
from mose_fast.streams.image_files import ImageFiles
from mose_fast.streams.kinds import Kind


@dataclass(frozen=True)
class Normalisation:
    """Turns images in [0, 1] into network input: ``(image - mean) / std`` per colour channel."""

    name: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


#: Normalisations by name. ``cifar10`` is what the released code uses for CIFAR-100 as well
#: (docs/specification/mose.md section 3), ``cifar100`` and ``digits`` are the statistics of their
#: own training images, ``mnist`` those of the 28x28 training images before padding.
NORMALISATIONS: dict[str, Normalisation] = {
    n.name: n
    for n in (
        Normalisation("cifar10", (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
        Normalisation("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        Normalisation("tiny-imagenet", (0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821)),
        Normalisation("mnist", (0.1307,) * 3, (0.3081,) * 3),
        Normalisation("digits", (0.3051,) * 3, (0.3238,) * 3),
        Normalisation("half", (0.5,) * 3, (0.5,) * 3),
    )
}

# Second word of the generator's key. Orders within a task use task * 2**32 + epoch, far below it,
# so that no seed makes the order of classes and the order of images one draw.
CLASS_ORDER = 2**63

# Held-out images of a class: this and the position of its label among the sorted ones.
HELD_OUT = 2**63 + 2**62


def fingerprint(arrays: Iterable[np.ndarray], names: Sequence[str]) -> str:
    """16 hex digits (of a SHA-256) that change with any pixel, any label, their order, types and
    shapes, and the names of the classes.
    """
    digest = hashlib.sha256("\n".join(names).encode())
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()[:16]


class HeldOut(NamedTuple):
    """Training images that are held out for validation, never trained on, never in the memory: a
    ``share`` of each class's, drawn from ``seed``; ``rows`` int64 [n], which of the data set's
    training images they are, in data order.
    """

    share: float
    seed: int
    rows: Tensor


@dataclass(frozen=True, eq=False)
class Stream:
    """A class-incremental image stream.

    Labels are *head indices*: positions in the class order, so index i is the i-th class that the
    learner meets and a task's classes are neighbours.

    A run evaluates after each *part* of a stream. The parts of a stream with task boundaries are
    its tasks; those of a stream without are equally many batches each, and the learner does not
    notice where one ends.

    Attributes:
        x_train, y_train: Training images, uint8 [N, H, W, 3], and the head index of each, int64.
            The images are a tensor, or stay in their files.
        x_test, y_test: The same of what the learner is evaluated on: the test images, or the
            held-out training images where :attr:`split` is ``validation``.
        tasks: The head indices of each task's classes; a stream without task boundaries is one
            task.
        class_order: ``class_order[head index]`` is the label in the data set.
        class_names: Readable names, by head index.
        mirror_safe: Whether a mirrored image keeps its label (digits do not).
        batch: Incoming images a step.
        fingerprint: See :func:`fingerprint`; of the data from which the stream was made, whatever
            its tasks, class order and limits. Empty: computed from the stream's own images.
        arrival: For a stream recorded from batches, each task's batches as int64 indices into
            ``x_train``; None: each pass over a task is shuffled.
        split: What ``x_test`` holds: ``test`` or ``validation``.
        kind: The settings by which :mod:`mose_fast.streams.kinds` made the stream; None: ``tasks``.
        order: For a stream without task boundaries: gives the order in which the training images
            arrive, int64 [N], for the seed of a run. None: there are boundaries.
        points: Parts of a stream without task boundaries, after which a run evaluates.
    """

    name: str
    x_train: Tensor | ImageFiles
    y_train: Tensor
    x_test: Tensor | ImageFiles
    y_test: Tensor
    tasks: tuple[tuple[int, ...], ...]
    class_order: tuple[int, ...]
    class_names: tuple[str, ...]
    normalisation: Normalisation
    mirror_safe: bool
    batch: int
    arrival: tuple[tuple[Tensor, ...], ...] | None = None
    fingerprint: str = ""
    split: str = "test"
    held_out: HeldOut | None = None
    kind: Kind | None = None
    order: Callable[[int], np.ndarray] | None = None
    points: int = 0

    def __post_init__(self) -> None:
        if not self.fingerprint:
            arrays = [tensor.cpu().numpy() for tensor in (self.x_train, self.y_train, self.x_test, self.y_test)]
            object.__setattr__(self, "fingerprint", fingerprint(arrays, self.class_names))

    @property
    def classes(self) -> int:
        """Number of classes of all tasks."""
        return len(self.class_order)

    @property
    def has_boundaries(self) -> bool:
        """Whether the learner is told where tasks begin and end."""
        return self.order is None

    @property
    def no_boundaries(self) -> str:
        """Why the learner meets no boundary between tasks, to end a sentence; may be empty."""
        if not self.has_boundaries:
            return f"a stream of kind {self.kind.kind!r} has none"
        return "the stream has one" if len(self.tasks) == 1 else ""

    @property
    def parts(self) -> int:
        """Number of parts, after each of which a run evaluates."""
        return len(self.tasks) if self.has_boundaries else self.points

    def task_of(self, part: int) -> int:
        """The task that a part belongs to."""
        return part if self.has_boundaries else 0

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.x_train.shape[1], self.x_train.shape[2]

    @property
    def spec(self) -> dict[str, Any]:
        """The stream's keywords for :func:`mose_fast.methods.create_learner`."""
        return {
            "classes": self.classes,
            "image_size": self.image_size,
            "mean": self.normalisation.mean,
            "std": self.normalisation.std,
            "mirror_safe": self.mirror_safe,
        }

    def as_one_task(self) -> Stream:
        """The same images as one task of all classes, shuffled together."""
        return dataclasses.replace(self, tasks=(tuple(range(self.classes)),), arrival=None, order=None)

    def train_rows(self, task: int) -> Tensor:
        """Indices into ``x_train`` of a task, in data order: int64 [n], or IndexError."""
        return self._rows[0][self._existing(task)]

    def test_rows(self, task: int) -> Tensor:
        """Indices into ``x_test`` of a task, in data order: int64 [n], or IndexError."""
        return self._rows[1][self._existing(task)]

    def test_images(self, rows: Tensor, size: int) -> Iterator[Tensor]:
        """Images of ``x_test``, int64 rows [n] on the host, at most ``size`` at a time and on the
        device of the images. Those that are left out, see :class:`ImageFiles`, do not come.
        """
        if isinstance(self.x_test, ImageFiles):
            return (images for images, _ in self.x_test.ahead(rows.split(size)) if len(images))
        return (self.x_test[part] for part in upload(rows, self.x_test.device).split(size))

    def tested(self, rows: Tensor) -> Tensor:
        """The rows of those images that came from :meth:`test_images`. Raises StreamError if none
        did.
        """
        return self.x_test.readable(rows) if isinstance(self.x_test, ImageFiles) else rows

    @property
    def skipped(self) -> list[str]:
        """The files, by their paths in the folder, whose images were left out so far, sorted."""
        parts = (images for images in (self.x_train, self.x_test) if isinstance(images, ImageFiles))
        return sorted({file for images in parts for file in images.skipped})

    def batches(self, part: int, *, seed: int, epoch: int = 0) -> list[Tensor]:
        """The batches of a part in the order of their arrival, as int64 indices into ``x_train``;
        the last of a task, and of a stream without task boundaries, may be smaller.

        Images of a task are shuffled by (seed, task, epoch) alone, so that any batch can be found
        again after a restart. A stream recorded from batches keeps its own in every epoch, and one
        without task boundaries comes once. IndexError: there is no such part; StreamError: the seed
        does not fit into 64 bits.
        """
        if self.order is not None:
            first, last = self._ends(part)
            order = torch.from_numpy(self.order(seed))
            return list(order[first * self.batch : last * self.batch].split(self.batch))
        rows = self.train_rows(part)
        if self.arrival is not None:
            return list(self.arrival[part])
        order = draw_order(len(rows), seed, part * 2**32 + epoch)
        return list(rows[torch.from_numpy(order)].split(self.batch))

    def count_batches(self, part: int) -> int:
        """How many batches :meth:`batches` gives, without drawing their order."""
        if not self.has_boundaries:
            first, last = self._ends(part)
            return last - first
        rows = len(self.train_rows(part))
        return -(-rows // self.batch) if self.arrival is None else len(self.arrival[part])

    def task_batches(self, task: int) -> int:
        """How many batches the parts of a task have together."""
        return sum(self.count_batches(part) for part in range(self.parts) if self.task_of(part) == task)

    def count_images(self, part: int, batches: int | None = None) -> int:
        """How many images the first batches of a pass over a part hold; None: all of them."""
        batches = self.count_batches(part) if batches is None else batches
        if self.arrival is not None:
            return sum(map(len, self.arrival[part][:batches]))
        images = (
            len(self.train_rows(part)) if self.has_boundaries else len(self.x_train) - self._ends(part)[0] * self.batch
        )
        return min(batches * self.batch, images)

    def to(self, device: torch.device) -> Stream:
        """The stream with its images on a device; labels stay on the host, where they are read."""
        return dataclasses.replace(self, x_train=self.x_train.to(device), x_test=self.x_test.to(device))

    def original_label(self, y: Tensor | int) -> Tensor | int:
        """The data set's label of a head index, for an int or an integer tensor of any shape.
        Raises StreamError if a head index is outside the classes.
        """
        if not isinstance(y, Tensor):
            if not 0 <= y < self.classes:
                raise StreamError(f"head index is {y}; wanted 0 to {self.classes - 1}")
            return self.class_order[y]
        if y.numel() and (int(y.min()) < 0 or int(y.max()) >= self.classes):
            raise StreamError(
                f"head indices reach from {int(y.min())} to {int(y.max())}; wanted 0 to {self.classes - 1}"
            )
        return torch.tensor(self.class_order, dtype=torch.int64, device=y.device)[y.long()]

    @property
    def summary(self) -> str:
        """A line for the user: kind, parts, classes and images."""
        height, width = self.image_size
        kind = "" if self.kind is None or self.kind.kind == "tasks" else f", {self.kind}"
        split = f"{len(self.tasks)} tasks" if self.has_boundaries else f"{self.parts} parts without task boundaries"
        return (
            f"{self.name}{kind}: {split}, {self.classes} classes, {len(self.x_train)} training and "
            f"{len(self.x_test)} {self.split} images of {height}x{width}"
        )

    def describe(self) -> str:
        """A table for the user: image counts and the data set's labels of every task."""
        train, test = (torch.bincount(y, minlength=self.classes).tolist() for y in (self.y_train, self.y_test))
        labels = [f"{label} ({train[h]}, {test[h]})" for h, label in enumerate(self.class_order)]
        order = "batches as they arrived"
        if self.arrival is None:
            order = f"batches of {self.batch}" + (", shuffled within a task" if self.has_boundaries else "")
        lines = [
            self.summary,
            f"normalisation {self.normalisation.name}, mirroring {'keeps' if self.mirror_safe else 'changes'} labels, "
            + order,
        ]
        if not self.has_boundaries:
            lines.append(f"{'part':>4} {'train':>7} {'steps':>7}")
            for part in range(self.parts):
                lines.append(f"{part:>4} {self.count_images(part):>7} {self.count_batches(part):>7}")
            return "\n".join([*lines, f"label (train, {self.split}): {', '.join(labels)}"])
        wide = max(7, len(self.split))
        lines.append(f"{'task':>4} {'train':>7} {self.split:>{wide}} {'steps':>7}  label (train, {self.split})")
        for t, heads in enumerate(self.tasks):
            trained, tested = (sum(counts[h] for h in heads) for counts in (train, test))
            told = ", ".join(labels[h] for h in heads)
            lines.append(f"{t:>4} {trained:>7} {tested:>{wide}} {self.count_batches(t):>7}  {told}")
        return "\n".join(lines)

    def _ends(self, part: int) -> tuple[int, int]:
        """Batches of a stream without task boundaries before a part, and at its end."""
        if not 0 <= part < self.points:
            raise IndexError(f"part is {part}; {self.name} has parts 0 to {self.points - 1}")
        batches = -(-len(self.x_train) // self.batch)
        return part * batches // self.points, (part + 1) * batches // self.points

    @cached_property
    def _rows(self) -> list[list[Tensor]]:
        heads = [torch.tensor(classes) for classes in self.tasks]
        return [[torch.isin(y, own).nonzero().flatten() for own in heads] for y in (self.y_train, self.y_test)]

    def _existing(self, task: int) -> int:
        if not 0 <= task < len(self.tasks):
            raise IndexError(f"task is {task}; {self.name} has tasks 0 to {len(self.tasks) - 1}")
        return task
