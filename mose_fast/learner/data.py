"""The data plane of a learner: what it knows of its stream."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mose_fast.device import upload
from mose_fast.memory import MemoryRecord, ReplayMemory
from mose_fast.nn import check_image_size
from mose_fast.settings.knob import MASKED, is_masked, plain
from mose_fast.settings.run import ConfigError, shown

#: (H, W) of images, where nothing else is said: CIFAR's.
IMAGE_SIZE = (32, 32)

# What a checkpoint holds beside the memory.
_VALUES = ("task", "first_task", "task_classes", "task_batches", "task_start", "seen", "current", "steps", "ended")


def check_stream(
    *, classes: Any, image_size: Any = IMAGE_SIZE, mean: Any = (0, 0, 0), std: Any = (1, 1, 1), mirror_safe: Any = True
) -> dict[str, Any]:
    """The description of a stream in plain numbers, by name; ConfigError if it is not as
    :class:`mose_fast.methods.Learner` wants it.
    """

    def numbers_in(value: Any) -> list[Any]:
        try:
            return [plain(number) for number in value]
        except TypeError:  # no numbers in a row
            return []

    def integer(value: Any, low: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31

    found = {"classes": plain(classes), "image_size": tuple(numbers_in(image_size)), "mirror_safe": plain(mirror_safe)}
    if not integer(found["classes"], 2):
        raise ConfigError(f"classes is {shown(classes)}; wanted an integer of at least 2 (and below 2**31)")
    if len(found["image_size"]) != 2 or not all(integer(side, 1) for side in found["image_size"]):
        raise ConfigError(f"image_size is {shown(image_size)}; wanted height and width in pixels, for example (32, 32)")
    for name, value in (("mean", mean), ("std", std)):
        try:
            numbers = [float(number) for number in numbers_in(value)]
        except (TypeError, ValueError, OverflowError):
            numbers = []
        if len(numbers) != 3 or not all(map(math.isfinite, numbers)) or (name == "std" and min(numbers) <= 0):
            above = " above 0" if name == "std" else ""
            raise ConfigError(
                f"{name} is {shown(value)}; wanted three numbers{above}, one for each channel of images in [0, 1]"
            )
        found[name] = tuple(numbers)
    if not isinstance(found["mirror_safe"], bool):
        raise ConfigError(f"mirror_safe is {shown(mirror_safe)}; wanted True or False")
    check_image_size(*found["image_size"])
    return found


def plain_tensor(values: Any, what: str) -> Tensor:
    """Numbers as a tensor; ValueError if they are masked."""
    if is_masked(values):
        raise ValueError(f"{what} is {MASKED}")
    return torch.as_tensor(values)


def class_mask(count: int, device: torch.device, classes: Iterable[int]) -> Tensor:
    """bool [count] on a device, True for some classes."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(classes)] = True
    return upload(mask, device)


class DataRecord(NamedTuple):
    """The data plane before a batch: its plain values, the number of the next step, what undoes
    changes of the memory, and copies of the tensors that plans write.
    """

    values: dict[str, Any]
    sequence: int
    memory: MemoryRecord
    kept: list[Tensor]


class DataPlane:
    """The replay memory, the tasks and classes seen so far, and the number of the next step. It
    never sees the network, so that it can run ahead of training.

    Attributes:
        memory: The replay memory.
        task: The current task; None before the first.
        first_task: The first task.
        task_classes: All labels of the current task, if they are known beforehand.
        task_batches: Batches of the current task, repeated ones counted again, if they are known
            beforehand; the training loop sets it when the task begins.
        task_start: Number of the current task's first step.
        seen: All labels seen so far, in order of appearance.
        current: The labels of the current task seen so far, in order of appearance.
        incoming: The labels of the batch that came last; it is no state.
        steps: Training steps taken.
        ahead: Steps that are planned and not yet taken.
        ended: Whether the current task was ended already.
        own: Plain values of the method's own, by name; they belong to the state like the others.
        kept: Gives the tensors of the method's own that plans write (:meth:`Learner.keep`).
    """

    def __init__(
        self, memory: ReplayMemory, *, classes: int, image_size: tuple[int, int], device: torch.device
    ) -> None:
        self.memory = memory
        self._classes, self._image_size, self._device = classes, image_size, device
        self.task: int | None = None
        self.first_task: int | None = None
        self.task_classes: list[int] | None = None
        self.task_batches: int | None = None
        self.seen: list[int] = []
        self.current: list[int] = []
        self.incoming: list[int] = []
        self.task_start = self.steps = self.ahead = 0
        self.ended = True
        self.own: dict[str, Any] = {}
        self.kept: Callable[[], list[Tensor]] = list

    @property
    def sequence(self) -> int:
        """Number of the step that is planned next, from 0; it decides the step's random views."""
        return self.steps + self.ahead

    @property
    def task_step(self) -> int:
        """Number within the current task of the step that is planned next, from 1."""
        return self.sequence - self.task_start + 1

    def begin_task(self, task: int, classes: list[int] | None) -> None:
        """See :meth:`mose_fast.methods.Learner.begin_task`."""
        self.task = task
        self.first_task = task if self.first_task is None else self.first_task
        self.task_classes = classes
        self.task_batches, self.task_start = None, self.sequence
        self.current = []
        self.ended = False

    def receive(self, x: Tensor, y: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Registers the labels of a :meth:`check_batch`; returns it on the device, with ``index``,
        or positions counted from 0.
        """
        if index is None:
            index = torch.arange(self.memory.seen, self.memory.seen + len(x))
        self.incoming = y.tolist()
        for label in self.incoming:
            if label not in self.seen:
                self.seen.append(label)
            if label not in self.current:
                self.current.append(label)
        return upload(x, self._device), upload(y, self._device), upload(index, self._device).to(torch.int64)

    def current_classes(self, which: str) -> list[int]:
        """The classes of the current task by an option ``current_classes``: ``seen``: those that
        came so far; ``task``: all of them, ConfigError if they are unknown.
        """
        if which == "seen":
            return self.current
        if self.task_classes is None:
            raise ConfigError(
                "options.current_classes is 'task', but the task's classes are unknown; "
                "wanted begin_task(task, classes=...) before its first batch, or current_classes 'seen'"
            )
        return self.task_classes

    def known_classes(self, which: str) -> list[int]:
        """All classes seen; with ``task`` also those of the current task that are still to come."""
        return [*self.seen, *(c for c in self.current_classes(which) if c not in self.seen)]

    # State

    def values(self) -> dict[str, Any]:
        """The plain values that a checkpoint must contain."""
        return {name: copy.copy(getattr(self, name)) for name in _VALUES} | self.own

    def load(self, values: dict[str, Any], memory: dict[str, Tensor]) -> None:
        """Restores the results of :meth:`values` and ``memory.tensors()``."""
        self.memory.load(memory)
        self._set(values)
        self.ahead = 0

    @contextmanager
    def record(self) -> Iterator[DataRecord]:
        """A context that records what :meth:`undo` needs to undo the batch that comes inside."""
        kept = [tensor.detach().clone() for tensor in self.kept()]
        values, sequence = self.values(), self.sequence
        with self.memory.record() as memory:
            yield DataRecord(values, sequence, memory, kept)

    def undo(self, record: DataRecord) -> None:
        """Undoes a batch, its step counted as not taken; undo the newest first."""
        steps = min(self.steps, record.sequence)
        self._set(record.values | {"steps": steps})
        self.ahead = record.sequence - steps
        self.memory.restore(record.memory)
        for tensor, old in zip(self.kept(), record.kept, strict=True):
            tensor.detach().copy_(old)

    def _set(self, values: dict[str, Any]) -> None:
        for name in _VALUES:
            setattr(self, name, copy.copy(values[name]))
        self.own = {name: value for name, value in values.items() if name not in _VALUES}

    # Checks

    def check_images(self, x: Tensor | np.ndarray) -> Tensor:
        """Images as a tensor; ValueError unless they are uint8 [N, H, W, 3]."""
        x = plain_tensor(x, "x")
        if x.dtype != torch.uint8:
            nan = x.is_floating_point() and bool(x.isnan().any())
            raise ValueError(
                f"x has dtype {x.dtype}{' and holds NaN' if nan else ''}; wanted raw images in uint8, 0 to 255"
            )
        height, width = self._image_size
        if x.ndim != 4 or tuple(x.shape[1:]) != (height, width, 3):
            hint = " (channels come last)" if x.ndim == 4 and x.shape[1] == 3 else ""
            raise ValueError(f"x has shape {list(x.shape)}; wanted [N, {height}, {width}, 3]{hint}")
        return x

    def check_batch(self, x: Tensor | np.ndarray, y: Tensor | np.ndarray | Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch as tensors: images, and labels int64 [B]; ValueError if one is unusable."""
        x, y = self.check_images(x), plain_tensor(y, "y")
        if len(x) == 0:
            raise ValueError("x is an empty batch; wanted at least one image")
        if y.ndim != 1 or len(y) != len(x):
            raise ValueError(f"y has shape {list(y.shape)} for {len(x)} images; wanted [{len(x)}]")
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y has dtype {y.dtype}; wanted integers")
        y = y.to(torch.int64)
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self._classes:
            raise ValueError(
                f"y holds {low if low < 0 else high}; wanted labels of 0 to {self._classes - 1}, since classes is"
                f" {self._classes}"
            )
        return x, y
