"""The state of each cell of a sweep."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from mose_fast.experiments.grid import Cell
from mose_fast.experiments.protocol import Event


class CellState(enum.Enum):
    """What a cell is doing. A waiting one will be started (again); a failed one was given up, and a
    dropped one is no longer wanted.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    DROPPED = enum.auto()


@dataclass(frozen=True)
class Failure:
    """Why a cell could not be finished, with the end of its log, if it ever ran."""

    name: str
    reason: str
    log: str
    command: str

    def __str__(self) -> str:
        shown = "".join(f"\n    | {line}" for line in self.log.splitlines())
        return f"failed: {self.name}: {self.reason}{shown}\n    again: {self.command}"


@dataclass
class CellRecord:
    """What a sweep knows about one cell.

    Attributes:
        row: The row of the store of its finished run.
        seconds: What its run took; None unless this sweep finished it.
        progress: What the events ``progress`` since its last start said.
        task: The last event ``task`` since then.
        resumed: Whether that start continued an earlier run.
        checkpoints: Names of the checkpoints that there were then.
        from_start: Whether the next start ignores the checkpoints.
        deaths: How often its process was killed since there was a new checkpoint.
    """

    cell: Cell
    state: CellState = CellState.WAITING
    row: dict[str, Any] | None = None
    seconds: float | None = None
    failure: Failure | None = None
    progress: Event = field(default_factory=dict)
    task: Event | None = None
    resumed: bool = False
    checkpoints: tuple[str, ...] = ()
    from_start: bool = False
    deaths: int = 0
    errors: int = 0

    @property
    def share(self) -> float:
        """Share of its batches that the run has trained on, in [0, 1]."""
        return self.progress["batch"] / max(self.progress["batches"], 1) if self.progress else 0.0
