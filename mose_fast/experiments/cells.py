"""The state of each cell of a sweep."""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass
from typing import Any

from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.protocol import Event
from mose_fast.runs.store import RunDamaged

__all__ = ["CellRecord", "CellState", "Failure"]

# Lines of a failed run's log that are shown.
_LOG_LINES = 15


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
        resumed: Whether its last start continued an earlier run.
        checkpoints: Names of the checkpoints that there were at its last start.
        progress: Last event ``progress`` since then.
        task: Last event ``task`` since then.
        from_start: Whether the next start ignores the checkpoints.
        deaths: How often its process was killed since there was a new checkpoint.
        row: The row of the store of its finished run.
        seconds: What its run took; None unless this sweep finished it.
    """

    cell: Cell
    state: CellState = CellState.WAITING
    resumed: bool = False
    checkpoints: tuple[str, ...] = ()
    progress: Event | None = None
    task: Event | None = None
    from_start: bool = False
    deaths: int = 0
    errors: int = 0
    row: dict[str, Any] | None = None
    seconds: float | None = None
    failure: Failure | None = None

    @property
    def share(self) -> float:
        """Share of its batches that the run has trained on, in [0, 1]."""
        return self.progress["batch"] / max(self.progress["batches"], 1) if self.progress else 0.0

    def find_done(self, folder: SweepFolder, threads: int) -> None:
        """Finds out whether the run has finished in an earlier call, or its folder is damaged.

        Raises:
            RunError: The folder holds another run.
        """
        try:
            self.row = folder.finished(self.cell)
        except RunDamaged as error:
            reason = f"{error}; it is left as it is. Delete the folder to run it again"
            self.give_up(reason, folder, threads, show_log=False)
        if self.row is not None:
            self.state = CellState.DONE

    def give_up(self, reason: str, folder: SweepFolder, threads: int, *, show_log: bool = True) -> Failure:
        """Marks the cell as failed."""
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
