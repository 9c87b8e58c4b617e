"""What a sweep and a study of ``mose-fast tune`` have in common: many runs in one folder, under one
lock, on the engine of one place, with a forecast, a table and a display.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from mose_fast import streams
from mose_fast.device import available_bytes
from mose_fast.experiments.cells import CellRecord
from mose_fast.experiments.display import Display
from mose_fast.experiments.engine import Engine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import Forecast
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.place import Layout, Place
from mose_fast.experiments.step_cost import Cost
from mose_fast.methods import check_room, find_method
from mose_fast.runs.files import write_atomically
from mose_fast.runs.lock import FolderLock
from mose_fast.runs.store import Store
from mose_fast.settings.run import RunConfig
from mose_fast.signals import StopRequest, stop_request

__all__ = ["Experiment", "with_fingerprints"]


def with_fingerprints(cells: Sequence[Cell], place: Place) -> list[Cell]:
    """The cells with the fingerprint of their data. Loads each stream once, downloading it if
    needed.

    Raises:
        StreamError: There is no such stream.
        ConfigError: A run does not fit into the memory of this machine, or its method needs task
            boundaries and the stream has none.
    """
    data = {}
    for settings, evaluate_on in {(cell.config.stream, cell.config.evaluate_on) for cell in cells}:
        stream = streams.create(settings, evaluate_on=evaluate_on)
        data[settings, evaluate_on] = dataclasses.replace(settings, fingerprint=stream.fingerprint)
        for config in (cell.config for cell in cells):
            if (config.stream, config.evaluate_on) != (settings, evaluate_on):
                continue
            if stream.no_boundaries and config.train_on == "stream":
                find_method(config.method).check_boundaries(config, stream.no_boundaries)
            # The machines of a cluster may have more memory than this one.
            if place.engine == "local":
                check_room(config, stream.image_size, stream.classes)

    def known(config: RunConfig) -> RunConfig:
        return dataclasses.replace(config, stream=data[config.stream, config.evaluate_on])

    return [dataclasses.replace(cell, config=known(cell.config)) for cell in cells]


class Experiment:
    """Many runs in one folder. A subclass sets :attr:`records` and says what it plans.

    Args:
        cells: The runs, before their data are loaded.

    Attributes:
        stored: The plan that an earlier call has left in the folder; empty if there is none.
        measured: Costs that this call or an earlier one measured, by :func:`.forecast.cost_key`.

    Raises:
        ConfigError: The cells cannot compute there.
        RunError: The folder holds something else.
    """

    #: What works in the folder, for messages.
    kind: ClassVar[str] = "sweep"

    records: dict[str, CellRecord]
    # From planned() on.
    engine: Engine
    forecast: Forecast
    # From running() on.
    store: Store
    display: Display
    stop: StopRequest

    def __init__(self, cells: Sequence[Cell], folder: SweepFolder, place: Place, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
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

    def find_done(self) -> None:
        """Finds the runs that have finished already, before there is an engine.

        Raises:
            RunError: A folder holds another run.
        """

    def plan(self) -> Forecast:
        """Finds out how long what remains takes, and says it.

        Raises:
            ConfigError: The runs do not fit into the memory.
        """
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """What ``sweep.json`` has beside the layout and the measured costs."""
        raise NotImplementedError

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Makes the folder and holds its lock; gives the descriptor, which workers inherit.

        Raises:
            RunError: The folder is in use or cannot be written.
        """
        self.folder.create()
        lock = FolderLock(self.folder.path, self.kind)
        try:
            self.folder.tidy(record.cell for record in self.records.values())
            yield lock.descriptor
        finally:
            lock.release()

    def dry_run(self) -> None:
        """Makes the forecast, and writes nothing."""
        with tempfile.TemporaryDirectory() as logs, self.planned(Path(logs), None):
            pass

    @contextmanager
    def planned(self, logs: Path, lock: int | None) -> Iterator[None]:
        """Makes the engine, which is closed at the end, and the forecast."""
        self.find_done()
        self._logs, self._lock = logs, lock
        self.engine = self._engine(logs, lock)
        try:
            self.forecast = self.plan()
            yield
        finally:
            self.engine.close()

    @contextmanager
    def running(self, lock: int) -> Iterator[None]:
        """Makes and writes the plan; then runs can be started, and signals ask to stop."""
        with self.planned(self.folder.logs, lock):
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
                yield

    def change_layout(self, **changes: Any) -> None:
        """Changes the layout, and closes the engine for one that has it."""
        self.engine.close()
        self.layout = dataclasses.replace(self.layout, **changes)
        self.engine = self._engine(self._logs, self._lock)

    def forecast_of(self, costs: Mapping[str, Cost]) -> Forecast:
        """The forecast for some costs by name of the cell."""
        cells = [record.cell for record in self.records.values()]
        return Forecast(cells, costs, self.layout.runs, self.layout.threads, available_bytes())

    def _engine(self, logs: Path, lock: int | None) -> Engine:
        return self.layout.engine(self.folder.path, logs, lock)
