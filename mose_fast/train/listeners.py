"""Who is told what happens in a run: the base class with nothing to say, and TensorBoard."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mose_fast.config import RunConfig
from mose_fast.evaluate import TaskAccuracy
from mose_fast.methods import Learner
from mose_fast.streams import Stream

__all__ = ["Listener", "TensorBoard"]


class Listener:
    """Base class; every method may be overridden and does nothing here."""

    def on_decode(self, done: int, images: int) -> None:
        """Before the start: ``done`` of so many image files are decoded.

        Not called for data that are no image files, or kept decoded.
        """

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        """The run starts or continues.

        Args:
            config: Of the run.
            stream: Of the run.
            learner: Ready to observe.
            batch: Batches done already, more than 0 for a resumed run.
            batches: Batches in all.
        """

    def on_task_start(self, task: int) -> None:
        """A task's first batch comes next."""

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        """Batch number ``batch`` (from 1) is done; ``losses`` is None where nothing was trained.

        Raise :class:`mose_fast.train.Interrupted` to stop here as Ctrl-C does: the run writes a
        checkpoint and can be resumed.
        """

    def on_step(self) -> None:
        """A step is done that belongs to no batch of the stream: of an evaluation, of a training
        for it (GDumb), of a review (SCR).

        It may raise :class:`mose_fast.train.Interrupted`, as :meth:`on_batch` may; all that ends
        the task is then done again.
        """

    def on_task_end(self, task: int, batch: int, accuracy: TaskAccuracy | None) -> None:
        """A task is over and was evaluated, or not (None)."""

    def on_end(self, results: dict[str, Any]) -> None:
        """The run is over; its files are written."""

    def close(self) -> None:
        """The run is over or broke off."""


class TensorBoard(Listener):
    """Writes TensorBoard events: losses every ``every`` batches, accuracies after every task.

    Events are an extra: where they cannot be written (a full disk), one warning says so and the run
    goes on without them. So they are written here and not by PyTorch's ``SummaryWriter``, whose
    thread shows a traceback then.

    Args:
        folder: Of the event files.
        every: Batches between two points of the loss curves.
    """

    def __init__(self, folder: Path, every: int = 10) -> None:
        self.folder, self.every = folder, every
        self._writer: Any = None

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        # Not at the top: runs in Python need not wait for it.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._or_give_up():
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns() / 1e9:.9f}.{socket.gethostname()}.{os.getpid()}"
            # Unbuffered, so that nothing is left to fail when the file is closed.
            self._writer = RecordWriter((self.folder / name).open("xb", buffering=0))
        # What a killed run wrote beyond its last checkpoint is purged, since those batches are
        # repeated.
        self._write(step=batch + 1, file_version="brain.Event:2")
        self._write(step=batch + 1, session_log=SessionLog(status=SessionLog.START))

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        if losses is not None and batch % self.every == 0:
            for name, value in losses.items():
                self._add(f"loss/{name}", value, batch)

    def on_task_end(self, task: int, batch: int, accuracy: TaskAccuracy | None) -> None:
        if accuracy is None:
            return
        for classifier, experts in accuracy.test.items():
            for expert, row in experts.items():
                self._add(f"accuracy_{classifier}/{expert}", sum(row) / len(row), batch)
                self._add(f"new_task_accuracy_{classifier}/{expert}", row[-1], batch)

    def close(self) -> None:
        if self._writer is not None:
            with self._or_give_up():
                self._writer.close()
            self._writer = None

    def _add(self, name: str, value: float, batch: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step=batch, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is not None:
            with self._or_give_up():
                self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(AttributeError, OSError):
                self._writer.close()
            self._writer = None
            warnings.warn(
                f"cannot write TensorBoard events into {self.folder} ({error.strerror}); the run goes on without them",
                stacklevel=4,
            )
