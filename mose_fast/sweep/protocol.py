"""The messages between a sweep and its worker processes: JSON objects, one per line of a pipe.

A worker takes commands from its stdin and writes events to its stdout. Every command but ``stop``
is for one cell and is answered by events of that cell, of which exactly one, the last, has a kind
in :data:`ENDS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

__all__ = ["ENDS", "Command", "Event", "Reader", "died", "send"]

#: Kinds of the event that ends a command.
ENDS = frozenset({"done", "stopped", "failed", "died"})


class Command(TypedDict, total=False):
    """What a worker is told to do.

    Attributes:
        do: ``run``: begin or continue a run. ``measure``: estimate what a run costs. ``stop``: let
            every run write a checkpoint and stop.
        cell: Name of the cell, in ``run`` and ``measure``.
        config: Path of the run's configuration in ``run``, the configuration itself in ``measure``.
        out: Run folder, in ``run``.
        log: File that what the run prints is appended to, in ``run``.
        afresh: Begin from the start even if there is a checkpoint, in ``run``.
        wandb: Project of Weights & Biases or None, in ``run``.
    """

    do: Literal["run", "measure", "stop"]
    cell: str
    config: str | dict[str, Any]
    out: str
    log: str
    afresh: bool
    wandb: str | None


class Event(TypedDict, total=False):
    """What a worker reports.

    Attributes:
        event: ``progress``: a run has trained on ``batch`` of its ``batches``. ``task``: ``task``
            (from 0) of the run's ``tasks`` ended with the mean ``accuracy`` over the tasks seen, in
            [0, 1]. ``measured``: a run will take ``cost``, the fields of
            :class:`mose_fast.sweep.measure.Cost`. ``done``: the command succeeded. ``stopped``: the
            run wrote a checkpoint and stopped. ``failed``: an exception ended it; ``error`` is its
            message. ``died``: its process ended without an event, killed by ``signal`` or, where
            that is None, for an unknown reason.
        cell: Name of the cell.
    """

    event: Literal["progress", "task", "measured", "done", "stopped", "failed", "died"]
    cell: str
    batch: int
    batches: int
    task: int
    tasks: int
    accuracy: float
    cost: dict[str, Any]
    error: str
    signal: int | None


def died(cell: str, signal: int | None = None) -> Event:
    """The event of a cell whose process ended without one."""
    return {"event": "died", "cell": cell, "signal": signal}


def send(pipe: int, message: Mapping[str, Any]) -> None:
    """Writes a message to a pipe.

    Raises:
        BrokenPipeError: Nobody reads from it any more.
    """
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(pipe, data) :]


class Reader:
    """Reads messages from a pipe, as they arrive.

    Attributes:
        pipe: File descriptor.
        closed: Whether the other end is closed.
    """

    def __init__(self, pipe: int) -> None:
        self.pipe, self.closed, self._rest = pipe, False, b""

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived; waits until something arrives or the pipe is closed."""
        part = os.read(self.pipe, 65536)
        self.closed = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines]
