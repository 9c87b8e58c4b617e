"""What a sweep and a study of ``mose-fast tune`` have in common: many runs in one folder, under one
lock, on the engine of one place, each until it is done or given up.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

import torch

from mose_fast import streams
from mose_fast.device import available_bytes
from mose_fast.experiments.cells import CellRecord, CellState, Failure
from mose_fast.experiments.display import Display
from mose_fast.experiments.engine import Engine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import Forecast, cost_key, duration, estimated_cost, measured_costs, stored_costs
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.place import Layout, Place
from mose_fast.experiments.protocol import Event, how_it_died
from mose_fast.experiments.step_cost import Cost
from mose_fast.methods import check_room, find_method
from mose_fast.runs.files import RunError, RunFolder, checkpoint_files, write_atomically
from mose_fast.runs.lock import FolderLock
from mose_fast.runs.store import RunDamaged, Store
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.signals import StopRequest, stop_request

# A run whose process is killed this often without a new checkpoint in between is given up.
_DEATHS = 3

# Lines of a failed run's log that are shown.
_LOG_LINES = 15


def with_fingerprints(cells: Sequence[Cell], place: Place) -> list[Cell]:
    """The cells with the fingerprint of their data. Loads each stream once, downloading it if
    needed. ConfigError if a run does not fit into the memory of this machine, or its method needs
    task boundaries and the stream has none.
    """
    found = list(cells)
    for settings, evaluate_on in {(cell.config.stream, cell.config.evaluate_on) for cell in cells}:
        stream = streams.create(settings, evaluate_on=evaluate_on)
        known = dataclasses.replace(settings, fingerprint=stream.fingerprint)
        for i, config in enumerate(cell.config for cell in cells):
            if (config.stream, config.evaluate_on) != (settings, evaluate_on):
                continue
            if stream.no_boundaries and config.train_on == "stream":
                find_method(config.method).check_boundaries(config, stream.no_boundaries)
            # The machines of a cluster may have more memory than this one.
            if place.engine == "local":
                check_room(config, stream.image_size, stream.classes)
            found[i] = dataclasses.replace(cells[i], config=dataclasses.replace(config, stream=known))
    return found


class Experiment:
    """Many runs in one folder. A subclass sets :attr:`records` and says what it plans and runs.

    Attributes:
        stored: The plan that an earlier call has left in the folder; empty if there is none.
        measured: Costs that this call or an earlier one measured, by :func:`.forecast.cost_key`.
    """

    #: What works in the folder, for messages.
    kind: ClassVar[str] = "sweep"
    #: Project of Weights & Biases that the runs log to.
    wandb: str | None = None
    #: Seconds for measuring the first steps of runs; None: of every kind of run.
    measure_for: float | None = None

    records: dict[str, CellRecord]
    # While it is carried out.
    engine: Engine
    forecast: Forecast
    store: Store
    display: Display
    stop: StopRequest

    def __init__(self, cells: Sequence[Cell], folder: SweepFolder, place: Place, say: Callable[[str], None]) -> None:
        self.folder, self.say, self.chosen = folder, say, place.workers is not None
        self.stored = stored = folder.stored_plan()
        # Numbers of workers and threads are kept: another number of threads would change the last
        # digits of the remaining results.
        if place.workers is None and stored.get("workers") and place.engine == stored.get("engine"):
            place = dataclasses.replace(place, workers=stored["workers"])
        self.layout = Layout.of(cells, place)
        self.continued = stored.get("workers") == self.layout.runs and self.layout.device == "cpu"
        if self.continued:
            self.layout = dataclasses.replace(self.layout, most_threads=stored["threads"])
        earlier = stored["measured"] if stored.get("threads") == self.layout.threads else {}
        self.measured = {key: Cost(**cost) for key, cost in earlier.items()}
        self._logs: Path | None = None
        self._lock: int | None = None

    def begin(self) -> None:
        """What comes before there is an engine; RunError if a folder holds another run."""

    def plan(self) -> Forecast:
        """The forecast of what remains; ConfigError if it does not fit into the memory. Where
        nobody has chosen the number of runs at the same time, it becomes what fits.
        """
        costs = self._costs()
        if any(cost.source == "estimated" for cost in costs.values()):
            self.change_layout()  # the engine may still measure
        forecast = self._forecast(costs)
        if self.layout.place.engine == "local":
            too_large = forecast.bytes > forecast.available and forecast.fitting >= 1
            if too_large and not self.chosen and not self.layout.gpus:
                self.change_layout(runs=min(self.layout.runs, forecast.fitting))
                forecast = self._forecast(costs)
            forecast.check_memory()
            self._check_gpus(costs)
        return forecast

    def described(self) -> dict[str, Any]:
        """What ``sweep.json`` has beside the layout and the measured costs."""
        raise NotImplementedError

    def compute(self) -> None:
        """Runs what remains, by :meth:`run_cells`."""
        raise NotImplementedError

    def conclude(self) -> Any:
        """What :meth:`carry_out` returns; the folder is still locked."""
        raise NotImplementedError

    def carry_out(self, *, dry_run: bool = False) -> Any:
        """Makes the plan and runs it. A dry run ends with the forecast and writes nothing."""
        with ExitStack() as stack:
            if not dry_run:
                self.folder.create()
                lock = FolderLock(self.folder.path, self.kind)
                stack.callback(lock.release)
                self.folder.tidy(record.cell for record in self.records.values())
                self._logs, self._lock = self.folder.logs, lock.descriptor
            self.begin()
            self.engine = self._engine(self._logs, self._lock)
            stack.callback(lambda: self.engine.close())
            self.forecast = self.plan()
            if dry_run:
                return None
            plan = {
                "workers": self.layout.runs if self.layout.device == "cpu" else None,
                "threads": self.layout.threads,
                "engine": self.layout.place.engine,
                **self.described(),
                # Who continues need not measure again.
                "measured": {key: dataclasses.asdict(cost) for key, cost in self.measured.items()},
            }
            write_atomically(self.folder.plan, json.dumps(plan, indent=1) + "\n")
            self.store = Store(self.folder.path)
            self.display = Display(self.records, self.forecast)
            with closing(self.display), stop_request() as self.stop:
                self.compute()
            return self.conclude()

    def _engine(self, logs: Path | None, lock: int | None) -> Engine:
        return self.layout.engine(self.folder.path, logs, lock)

    def change_layout(self, **changes: Any) -> None:
        """Changes the layout, and closes the engine for one that has it."""
        self.engine.close()
        self.layout = dataclasses.replace(self.layout, **changes)
        self.engine = self._engine(self._logs, self._lock)

    def in_state(self, state: CellState) -> list[CellRecord]:
        return [record for record in self.records.values() if record.state is state]

    def known(self) -> dict[str, Cost]:
        """The costs that are known with these numbers of threads, by :func:`cost_key`."""
        return {**self.measured, **stored_costs(self.folder.path, self.layout.threads)}

    def missing(self, known: Mapping[str, Cost]) -> dict[str, RunConfig]:
        """A run of each key among the waiting ones that is not known."""
        waiting = {cost_key(record.cell.config): record.cell.config for record in self.in_state(CellState.WAITING)}
        return {key: config for key, config in waiting.items() if key not in known}

    def _costs(self) -> dict[str, Cost]:
        """Costs of the waiting cells by name, from the table of runs or measured."""
        known = self.known()
        if missing := self.missing(known):
            some = "one setting" if len(missing) == 1 else f"{len(missing)} settings"
            most = "" if self.measure_for is None else f", for at most {duration(self.measure_for)}"
            self.say(f"measuring the first steps of runs ({some}{most}) ...")
            found = measured_costs(missing, self.engine, self.measure_for)
            self.measured |= found
            known |= found
            if others := [key for key in missing if key not in found]:
                self.say(
                    f"measured {len(found)} of {len(missing)} settings, some of each method first; the others are"
                    " estimated from the most similar ones by the methods' relative costs (mose-fast list methods)"
                )
                known |= {key: estimated_cost(key, known) for key in others}
        waiting = (record.cell for record in self.in_state(CellState.WAITING))
        return {cell.name: known[cost_key(cell.config)] for cell in waiting}

    def _forecast(self, costs: Mapping[str, Cost]) -> Forecast:
        cells = [record.cell for record in self.records.values()]
        return Forecast(cells, costs, self.layout.runs, self.layout.threads, available_bytes())

    def _check_gpus(self, costs: Mapping[str, Cost]) -> None:
        needed = max((cost.bytes_device or 0 for cost in costs.values()), default=0)
        if not self.layout.gpus or not needed:
            return
        total = torch.cuda.get_device_properties(0).total_memory
        per_gpu = self.layout.runs // len(self.layout.gpus)
        if per_gpu * needed > total:
            raise ConfigError(
                f"per_gpu is {per_gpu}, which needs {per_gpu * needed / 1e9:.1f} GB on a GPU of {total / 1e9:.1f}"
                f" GB; wanted at most {total // needed}"
            )

    def find_done(self, record: CellRecord) -> None:
        """Finds out whether a run has finished in an earlier call, or its folder is damaged.
        RunError if the folder holds another run.
        """
        try:
            record.row = self.folder.finished(record.cell)
        except RunDamaged as error:
            self._fail(record, f"{error}; it is left as it is. Delete the folder to run it again", log="")
        if record.row is not None:
            record.state = CellState.DONE

    def run_cells(self, records: Sequence[CellRecord]) -> None:
        """Runs those that wait until each is done or given up; Interrupted if a signal stops them.

        A run whose process is killed continues from its last checkpoint. A run that ends with an
        error is tried once more: from its checkpoint, or from its start if it had continued from
        one.
        """
        self.queue = deque(record for record in records if record.state is CellState.WAITING)
        self.stopping = False
        self.unsaved: list[dict[str, Any]] = []
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
                    self.on_event(record, event)
            self.display.draw()
        if self.unsaved:
            self.store.add(*self.unsaved)
        if any(record.state is CellState.WAITING for record in records):
            self.stop.check()

    def drop(self, record: CellRecord) -> None:
        """Stops a cell that is no longer wanted, or does not start it."""
        if record.state is CellState.RUNNING:
            self.engine.stop(record.cell.name)
        if record.state in (CellState.RUNNING, CellState.WAITING):
            record.state = CellState.DROPPED
        self.queue = deque(waiting for waiting in self.queue if waiting is not record)

    def on_event(self, record: CellRecord, event: Event) -> None:
        """Takes an event (:mod:`.protocol`) of a running cell."""
        match event["event"]:
            case "progress":
                record.progress = {**record.progress, **event}
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
                self._try_again(record, "a signal ended its process; it continues from its checkpoint")

    def on_done(self) -> None:
        """Comes after each run that has finished."""

    def _running(self) -> bool:
        return any(record.state is CellState.RUNNING for record in self.records.values())

    def _start(self, record: CellRecord) -> None:
        name = record.cell.name
        files = RunFolder(self.folder.run(name))
        record.resumed = files.config.is_file() and not record.from_start
        record.checkpoints, record.progress, record.task = self._checkpoints(record), {}, None
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

    def _on_done(self, record: CellRecord) -> None:
        try:
            # Refuses one of another version of its method, edited while the sweep ran.
            row = self.folder.finished(record.cell)
            if row is None:
                raise RunDamaged(f"there are no results in {self.folder.run(record.cell.name)}")
        except RunError as error:
            self._give_up(record, str(error))
            return
        record.state, record.row, record.seconds = CellState.DONE, row, row["seconds_total"]
        self.display.finished(record)
        self.unsaved.append(row)
        try:
            self.store.add(*self.unsaved)
            self.unsaved.clear()
        except RunError as error:
            self.display.say(f"warning: {error}")  # the run folder holds everything, and the row is tried again
        self.on_done()

    def _on_death(self, record: CellRecord, signal: int | None) -> None:
        how = f"its process {how_it_died(signal)}"
        record.deaths = 1 if self._checkpoints(record) != record.checkpoints else record.deaths + 1
        if record.deaths >= _DEATHS:
            times = f"{_DEATHS} times without getting further"
            self._give_up(record, f"{how} {times}; does it have enough memory?")
        else:
            self._try_again(record, f"{how}; it continues from its last checkpoint")
            self.queue.rotate()  # it comes first

    def _on_error(self, record: CellRecord, error: str) -> None:
        record.errors += 1
        if record.errors > 1 or self.stopping:
            self._give_up(record, error)
            return
        record.from_start = record.resumed
        self._try_again(record, f"{error}; it is tried once more{', from its start' if record.from_start else ''}")

    def _try_again(self, record: CellRecord, told: str) -> None:
        self.display.say(f"{record.cell.name}: {told}")
        record.state = CellState.WAITING
        self.queue.append(record)

    def _give_up(self, record: CellRecord, reason: str) -> None:
        log = self.folder.log(record.cell.name)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        self.display.say(str(self._fail(record, reason, "\n".join(lines[-_LOG_LINES:]))))

    def _fail(self, record: CellRecord, reason: str, log: str) -> Failure:
        name = record.cell.name
        command = (
            f"OMP_NUM_THREADS={self.layout.threads} mose-fast run --config {shlex.quote(str(self.folder.config(name)))}"
            f" --out {shlex.quote(str(self.folder.run(name)))} --overwrite"
        )
        record.state, record.failure = CellState.FAILED, Failure(name, reason, log, command)
        return record.failure
