"""The pipeline from batches to losses, of runs and of benchmarks: it plans batches ahead, takes
their steps in order and reads their losses late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mose_fast.device import upload
from mose_fast.methods import Learner, Prepared
from mose_fast.runs.clock import Clock
from mose_fast.streams import Stream
from mose_fast.streams.image_files import ImageFiles
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.ring import Ring


class Batch(NamedTuple):
    """A batch that is not planned yet: the run's position before it, which :class:`Taken` contains
    again, and what :meth:`mose_fast.train.ring.Ring.put` takes.
    """

    position: dict[str, int]
    content: Callable[[], dict[str, Any] | None] | Tensor


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


class Pipeline:
    """Takes the steps of a learner with a ``ring`` of planned batches, ``captured`` steps if its
    losses are read late (else None), a ``reader`` of losses and a clock.

    On a GPU, all calls must have the same current stream, which must not be the default one; see
    :func:`mose_fast.device.own_stream`. The phases of ``clock`` are ``train`` and ``capture``.
    """

    def __init__(self, learner: Learner, clock: Clock | None = None) -> None:
        self.learner = learner
        self.clock = Clock() if clock is None else clock
        # On a GPU, eager steps are taken in the same way, so that both give the same bits.
        self.captured = (
            CapturedSteps(learner, capture=learner.stepping.name == "captured") if learner.reads_losses_late else None
        )
        self.ring = Ring(learner)
        self.reader = LossReader(learner)
        self._planned: deque[dict[str, int]] = deque()

    def run(self, batches: Iterable[Batch]) -> Iterator[tuple[Taken, dict[str, float] | None]]:
        """Learns from batches in order, while the result is iterated; yields each step once its
        losses have arrived, with these by name, or None if nothing was trained. Only these batches
        are planned, so that no plan is left at the end.
        """
        self.ring.synchronise()
        coming = iter(batches)
        while True:
            with self.clock.timed("train"):
                while not self.ring.full and (batch := next(coming, None)) is not None:
                    self.ring.put(batch.content)
                    self._planned.append(batch.position)
                if not len(self.ring):
                    break
                self._take(self.ring.take(), self._planned.popleft())
            yield from self.drain()
        yield from self.drain(wait=True)

    def drain(self, *, wait: bool = False) -> Iterator[tuple[Taken, dict[str, float] | None]]:
        """Yields the steps whose losses have arrived and that were not yielded yet; with ``wait``,
        all steps that were taken. Waiting counts as training.
        """
        arriving = self.reader.drain(wait=wait)
        while True:
            with self.clock.timed("train"):
                arrived = next(arriving, None)
            if arrived is None:
                return
            yield arrived

    def stop(self) -> None:
        """Undoes all plans without a taken step. Call it if :meth:`run` is left before its end."""
        self.ring.roll_back()
        self._planned.clear()

    def undo(self, taken: Taken) -> bool:
        """Undoes the step that was yielded last and everything after it. Returns whether the model
        is restored, too; see :meth:`mose_fast.methods.Prepared.undo`.
        """
        self.stop()
        for later in reversed(self.reader.drop()):
            self.ring.undo(later.prepared)
        return self.ring.undo(taken.prepared)

    def close(self) -> None:
        self.ring.close()

    def _take(self, prepared: Prepared, position: dict[str, int]) -> None:
        captured = self.captured
        if captured is None:
            self.reader.add(Taken(prepared, position), prepared.take())
            return
        replays, retries = captured.replays, captured.retries
        losses = prepared.take(captured)
        self.clock.move(captured.seconds, "train", "capture")
        captured.seconds = 0.0
        self.reader.add(Taken(prepared, position, captured.replays - replays, captured.retries - retries), losses)


def incoming(
    stream: Stream, task: int, batches: Sequence[Tensor], *, train: bool = True, store: bool = True
) -> list[Callable[[], dict[str, Any] | None]]:
    """The contents of a stream's batches, in the form that :class:`Batch` takes: rows int64 on the
    host; the images may be on a GPU. ``train``, ``store``: as :meth:`Learner.prepare` has them.
    Contents of images in files are decoded ahead, and must be taken in order.
    """
    if not batches:
        return []
    if isinstance(stream.x_train, ImageFiles):
        coming = stream.x_train.ahead(batches)

        def decoded() -> dict[str, Any] | None:
            x, rows = next(coming)
            if not len(rows):
                return None
            return {"x": x, "y": stream.y_train[rows], "task": task, "index": rows, "train": train, "store": store}

        return [decoded] * len(batches)
    # The images' numbers go to the images' device in one transfer; a transfer for each batch would
    # wait for the GPU each time.
    numbers = upload(torch.cat(list(batches)), stream.x_train.device).split([len(rows) for rows in batches])

    def arguments(rows: Tensor, there: Tensor) -> dict[str, Any]:
        x, y = stream.x_train[there], stream.y_train[rows]
        return {"x": x, "y": y, "task": task, "index": there, "train": train, "store": store}

    return [partial(arguments, rows, there) for rows, there in zip(batches, numbers, strict=True)]


def resident(stream: Stream, device: torch.device) -> Stream:
    """The stream with its images on the GPU, if they leave half of the free memory to the run;
    images in files stay there.
    """
    if device.type != "cuda" or isinstance(stream.x_train, ImageFiles):
        return stream
    size = stream.x_train.nbytes + stream.x_test.nbytes
    return stream.to(device) if 2 * size <= torch.cuda.mem_get_info(device)[0] else stream
