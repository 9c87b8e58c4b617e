"""The messages between a sweep and its worker processes: JSON objects, one per line of a pipe.

A worker takes commands from its stdin. ``do`` names the command:

- ``run``: begin or continue the run of ``cell`` with the file ``config``, in the run folder
  ``out``; append what it prints to the file ``log``. ``afresh``: ignore its checkpoints. ``wandb``:
  project of Weights & Biases or None.
- ``measure``: estimate what a run with the configuration ``config`` costs, for ``cell``.
- ``stop``: let the run of ``cell``, or every run where that is None, write a checkpoint and stop.

It writes events of a ``cell`` to its stdout. ``event`` names the kind:

- ``progress``: the run has trained on ``batch`` of its ``batches``. The first one also has
  ``view``, the classifier and the expert of ``predict()``.
- ``task``: ``task`` (from 0) of the run's ``tasks`` has ended; ``accuracy`` is the mean over the
  tasks seen, in [0, 1]. ``what`` is ``task``, or ``part`` for a stream without task boundaries,
  whose accuracy is on the classes seen.
- ``measured``: ``cost`` holds the fields of :class:`mose_fast.experiments.step_cost.Cost`.

Exactly one event, the last, ends a command: ``done``; ``stopped``: the run wrote a checkpoint;
``failed``: an exception with the message ``error`` ended it, or its worker could not start;
``died``: its process ended without an event, killed by ``signal`` or, where that is None, for an
unknown reason.

A worker's first event has no cell: ``ready`` for commands.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["ENDS", "Command", "Event", "Reader", "died", "how_it_died", "send"]

#: Kinds of the event that ends a command.
ENDS = frozenset({"done", "stopped", "failed", "died"})

Command = dict[str, Any]
Event = dict[str, Any]


def died(cell: str, signal: int | None = None) -> Event:
    """The event of a cell whose process ended without one."""
    return {"event": "died", "cell": cell, "signal": signal}


def how_it_died(signal: int | None) -> str:
    """What is said of a process that ended without an event."""
    return "ended without a message" if signal is None else f"was killed by signal {signal}"


def send(pipe: int, message: Command | Event) -> None:
    """Writes a message to a pipe; BrokenPipeError if nobody reads from it any more."""
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(pipe, data) :]


class Reader:
    """Reads messages from a pipe, as they arrive."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.closed, self._rest = pipe, False, b""

    def read(self) -> list[Any]:
        """The messages that have arrived; waits until something arrives or the pipe is closed."""
        part = os.read(self.pipe, 65536)
        self.closed = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines]
