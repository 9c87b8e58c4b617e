"""Runs the cells of a sweep until each is done or given up: starts, restarts and records them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from mose_fast.experiments.cells import CellRecord, CellState
from mose_fast.experiments.experiment import Experiment
from mose_fast.experiments.protocol import Event, how_it_died
from mose_fast.runs.files import RunError, RunFolder, checkpoint_files
from mose_fast.runs.store import collect, read_run

__all__ = ["CellLoop"]

# A run whose process is killed this often without a new checkpoint in between is given up.
_DEATHS = 3


class CellLoop:
    """Runs the cells that wait.

    A run whose process is killed continues from its last checkpoint. A run that ends with an error
    is tried once more: from its checkpoint, or from its start if it had continued from one.

    Args:
        records: Records of the cells by name; brought up to date.
    """

    def __init__(
        self,
        experiment: Experiment,
        records: Mapping[str, CellRecord],
        wandb: str | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.records, self.wandb, self.on_done = records, wandb, on_done
        self.folder, self.threads = experiment.folder, experiment.layout.threads
        self.engine, self.store = experiment.engine, experiment.store
        self.display, self.stop = experiment.display, experiment.stop
        self.queue = deque(record for record in records.values() if record.state is CellState.WAITING)
        self.stopping = self.table_is_behind = False

    def run(self) -> bool:
        """Runs the cells; returns whether all have ended: False if a signal stopped them."""
        while self._running() or (self.queue and not self.stopping):
            if self.stop.is_set() and not self.stopping:
                self.stopping = True
                self.display.say("interrupted: the runs write their checkpoints")
                self.engine.stop()
            while self.queue and not self.stopping and self.engine.free() > 0:
                self._start(self.queue.popleft())
            for event in self.engine.events(0.2):
                record = self.records.get(event["cell"])
                if record is not None and record.state is CellState.RUNNING:
                    self._on_event(record, event)
            self.display.draw()
        if self.table_is_behind:
            collect(self.folder.path)
        return all(record.state not in (CellState.WAITING, CellState.RUNNING) for record in self.records.values())

    def drop(self, name: str) -> None:
        """Stops a cell that is no longer wanted, or does not start it."""
        record = self.records[name]
        if record.state is CellState.RUNNING:
            self.engine.stop(name)
        if record.state in (CellState.RUNNING, CellState.WAITING):
            record.state = CellState.DROPPED
        self.queue = deque(waiting for waiting in self.queue if waiting is not record)

    def _running(self) -> bool:
        return any(record.state is CellState.RUNNING for record in self.records.values())

    def _start(self, record: CellRecord) -> None:
        name = record.cell.name
        files = RunFolder(self.folder.run(name))
        record.resumed = files.config.is_file() and not record.from_start
        record.checkpoints, record.progress, record.task = self._checkpoints(record), None, None
        record.state = CellState.RUNNING
        self.engine.start(
            {
                "do": "run",
                "cell": name,
                "config": str(self.folder.config(name).absolute()),
                "out": str(files.path.absolute()),
                "log": str(self.folder.log(name).absolute()),
                "afresh": record.from_start,
                "wandb": self.wandb,
            }
        )
        record.from_start = False

    def _checkpoints(self, record: CellRecord) -> tuple[str, ...]:
        return tuple(path.name for path in checkpoint_files(RunFolder(self.folder.run(record.cell.name)).checkpoints))

    def _on_event(self, record: CellRecord, event: Event) -> None:
        match event["event"]:
            case "progress":
                record.progress = event
            case "task":
                record.task = event
            case "done":
                self._on_done(record)
            case "failed":
                self._on_error(record, event["error"])
            case _ if self.stopping:
                record.state = CellState.WAITING
            case "died":
                self._on_death(record, event["signal"])
            case "stopped":
                self.display.say(f"{record.cell.name}: a signal ended its process; it continues from its checkpoint")
                record.state = CellState.WAITING
                self.queue.append(record)

    def _on_done(self, record: CellRecord) -> None:
        run = self.folder.run(record.cell.name)
        try:
            row, results = read_run(run)
            self.folder.check_method(record.cell, results)  # which was edited while the sweep ran
        except RunError as error:
            self._give_up(record, str(error))
            return
        record.state, record.row, record.seconds = CellState.DONE, row, row["seconds_total"]
        self.display.finished(record)
        try:
            self.store.add(run)
        except RunError as error:
            # The run folder holds everything; the table is built again at the end.
            self.display.say(f"warning: {error}")
            self.table_is_behind = True
        self.on_done()

    def _on_death(self, record: CellRecord, signal: int | None) -> None:
        progressed = self._checkpoints(record) != record.checkpoints
        record.deaths = 1 if progressed else record.deaths + 1
        if record.deaths >= _DEATHS:
            times = f"{_DEATHS} times without getting further"
            self._give_up(record, f"its process {how_it_died(signal)} {times}; does it have enough memory?")
        else:
            self.display.say(
                f"{record.cell.name}: its process {how_it_died(signal)}; it continues from its last checkpoint"
            )
            record.state = CellState.WAITING
            self.queue.appendleft(record)

    def _on_error(self, record: CellRecord, error: str) -> None:
        record.errors += 1
        if record.errors > 1 or self.stopping:
            self._give_up(record, error)
            return
        record.from_start = record.resumed
        where = ", from its start" if record.from_start else ""
        self.display.say(f"{record.cell.name}: {error}; it is tried once more{where}")
        record.state = CellState.WAITING
        self.queue.append(record)

    def _give_up(self, record: CellRecord, reason: str) -> None:
        self.display.say(str(record.give_up(reason, self.folder, self.threads)))
