"""The state of each cell of a sweep."""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass

from mose_fast.sweep.folder import SweepFolder
from mose_fast.sweep.grid import Cell

__all__ = ["Attempt", "CellRecord", "CellState", "Failure"]

# Lines of a failed run's log that are shown.
_LOG_LINES = 15


class CellState(enum.Enum):
    """What a cell is doing."""

    #: It will be started, for the first time or again, in this sweep or when it is continued.
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    #: It was given up.
    FAILED = enum.auto()


@dataclass
class Attempt:
    """One start of a cell's run, and how far it is.

    Attributes:
        resumed: Whether the run continues an earlier one.
        checkpoints: Names of the checkpoints that there were at its start.
        batch: Number of batches trained on.
        batches: Number of batches in all.
        task: Last task that has ended, from 0.
        tasks: Number of tasks.
        accuracy: Mean accuracy over the tasks seen, in [0, 1].
    """

    resumed: bool = False
    checkpoints: tuple[str, ...] = ()
    batch: int = 0
    batches: int = 0
    task: int | None = None
    tasks: int = 0
    accuracy: float | None = None

    @property
    def share(self) -> float:
        """Share of its batches that the run has trained on."""
        return self.batch / self.batches if self.batches else 0.0


@dataclass(frozen=True)
class Failure:
    """Why a cell could not be finished.

    Attributes:
        name: The cell's name.
        reason: A sentence.
        log: The end of the cell's log; empty if it never ran.
        command: The command that runs the cell alone.
    """

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
        cell: The cell.
        state: What it is doing.
        attempt: Its last start by this sweep.
        from_start: Whether the next attempt ignores the checkpoints.
        deaths: How often its process was killed since there was a new checkpoint.
        errors: How often its run ended with an error.
        seconds: What its run took; None unless this sweep finished it.
        failure: Why it was given up.
    """

    cell: Cell
    state: CellState = CellState.WAITING
    attempt: Attempt | None = None
    from_start: bool = False
    deaths: int = 0
    errors: int = 0
    seconds: float | None = None
    failure: Failure | None = None

    def give_up(self, reason: str, folder: SweepFolder, threads: int, *, show_log: bool = True) -> Failure:
        """Marks the cell as failed.

        Args:
            reason: A sentence.
            folder: The sweep's folder.
            threads: Number of CPU threads of each run.
            show_log: Whether the end of the cell's log belongs to the failure.
        """
        name = self.cell.name
        log: list[str] = []
        if show_log and folder.log(name).is_file():
            log = folder.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        command = (
            f"OMP_NUM_THREADS={threads} mose-fast run --config {shlex.quote(str(folder.config(name)))}"
            f" --out {shlex.quote(str(folder.run(name)))} --overwrite"
        )
        self.state, self.failure = CellState.FAILED, Failure(name, reason, "\n".join(log), command)
        return self.failure
