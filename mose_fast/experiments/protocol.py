"""The messages between a sweep and its worker processes: dictionaries, sent by a
:class:`multiprocessing.connection.Connection`, which is a worker's stdin.

A worker takes commands. ``do`` names the command:

- ``run``: begin or continue the run of ``cell`` with the file ``config``, in the run folder
  ``out``; append what it prints to the file ``log``. ``afresh``: ignore its checkpoints. ``wandb``:
  project of Weights & Biases or None.
- ``measure``: estimate what a run with the configuration ``config`` costs, for ``cell``.
- ``stop``: let the run of ``cell``, or every run where that is None, write a checkpoint and stop.

It sends events of a ``cell``. ``event`` names the kind:

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

from typing import Any

#: Kinds of the event that ends a command.
ENDS = frozenset({"done", "stopped", "failed", "died"})

Command = dict[str, Any]
Event = dict[str, Any]


def died(cell: str, signal: int | None = None) -> Event:
    """The event of a cell whose process ended without one."""
    return {"event": "died", "cell": cell, "signal": signal}


def how_it_died(signal: int | None) -> str:
    return "ended without a message" if signal is None else f"was killed by signal {signal}"
