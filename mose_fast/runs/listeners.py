"""Listeners are notified of what happens in a run: their base class, and TensorBoard."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mose_fast.evaluate import TaskAccuracy
from mose_fast.methods import Learner
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream


class Listener:
    """Base class. Its methods do nothing; override those that you need."""

    def on_decode(self, done: int, images: int) -> None:
        """Before the start, if the data are image files that are not decoded yet: ``done`` of
        ``images`` are.
        """

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        """The run starts, or continues after ``batch`` of ``batches``."""

    def on_task_start(self, task: int) -> None:
        """The next batch is the first of a task, or of a part of a stream without tasks."""

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        """Batch number ``batch`` (from 1) is done; ``losses`` is None if nothing was trained.

        Raise :class:`mose_fast.train.Interrupted` to stop here as Ctrl-C does: the run writes a
        checkpoint and can be resumed.
        """

    def on_step(self) -> None:
        """A step is done that belongs to no batch of the stream: part of an evaluation, of the
        training before one (GDumb), or of a review (SCR). It may raise
        :class:`mose_fast.train.Interrupted`, too; the resumed run then repeats the end of the task.
        """

    def on_evaluation(self, batch: int, images: int, accuracy: dict[str, dict[str, float]]) -> None:
        """The accuracy at any time was measured, every ``evaluate_every`` batches and at task ends,
        after ``images`` arrived, each pass counted: in [0, 1] by classifier and expert.
        """

    def on_task_end(self, task: int, batch: int, accuracy: TaskAccuracy | None) -> None:
        """A task, or a part of a stream without tasks, is over; None: it was not evaluated."""

    def on_end(self, results: dict[str, Any]) -> None:
        """The run is over; its files are written."""

    def close(self) -> None:
        """The run is over or has failed."""


class Curves(Listener):
    """Base of listeners that log curves: losses every ``every`` batches, accuracies after every
    task and evaluation.
    """

    every = 10

    def log(self, values: dict[str, float], batch: int) -> None:
        """Logs values by name after a number of batches."""

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        self._boundaries = stream.has_boundaries

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        if losses is not None and batch % self.every == 0:
            self.log({f"loss/{name}": value for name, value in losses.items()}, batch)

    def on_evaluation(self, batch: int, images: int, accuracy: dict[str, dict[str, float]]) -> None:
        values = {f"anytime_accuracy_{c}/{e}": value for c, experts in accuracy.items() for e, value in experts.items()}
        self.log(values, batch)

    def on_task_end(self, task: int, batch: int, accuracy: TaskAccuracy | None) -> None:
        if accuracy is None:
            return
        values = {}
        for classifier, experts in accuracy.test.items():
            for expert, row in experts.items():
                values[f"accuracy_{classifier}/{expert}"] = sum(row) / len(row)
                if self._boundaries:
                    values[f"new_task_accuracy_{classifier}/{expert}"] = row[-1]
        self.log(values, batch)


class TensorBoard(Curves):
    """Writes TensorBoard events: losses every ``every`` batches, accuracies after every task.

    If events cannot be written (a full disk), there is one warning, and the run continues without
    them. PyTorch's ``SummaryWriter`` is not used, because its thread would show a traceback then.
    Of a run that continues, TensorBoard drops the events of batches that it repeats.
    """

    def __init__(self, folder: Path, every: int = 10) -> None:
        self.folder, self.every = folder, every
        self._writer: Any = None

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        # Imported here, because not every run needs it.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().on_start(config, stream, learner, batch, batches)
        with self._or_give_up():
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns() / 1e9:.9f}.{socket.gethostname()}.{os.getpid()}"
            # Unbuffered, so that nothing is left to fail when the file is closed.
            self._writer = RecordWriter((self.folder / name).open("xb", buffering=0))
        self._write(step=batch + 1, file_version="brain.Event:2")
        self._write(step=batch + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        if self._writer is not None:
            with self._or_give_up():
                self._writer.close()
            self._writer = None

    def log(self, values: dict[str, float], batch: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in values.items():
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
