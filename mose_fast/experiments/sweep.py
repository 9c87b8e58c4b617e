"""Plans and runs a sweep: skips finished cells, forecasts the rest, runs it, and returns the table.

A sweep can be killed at any moment; the same call continues it.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mose_fast import streams
from mose_fast.device import available_bytes
from mose_fast.experiments.cells import CellRecord, CellState, Failure
from mose_fast.experiments.dispatch import CellLoop
from mose_fast.experiments.display import Display
from mose_fast.experiments.engine import Engine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import (
    Forecast,
    cost_key,
    duration,
    estimated_cost,
    measured_costs,
    most_expensive,
    stored_costs,
)
from mose_fast.experiments.grid import Cell, Grid, axes_of
from mose_fast.experiments.place import Layout, Place
from mose_fast.experiments.step_cost import Cost
from mose_fast.learner.named_settings import dotted
from mose_fast.learner.registry import check_unchanged
from mose_fast.methods import check_room, find_method
from mose_fast.output import guarded_output
from mose_fast.runs.files import write_atomically
from mose_fast.runs.lock import FolderLock
from mose_fast.runs.store import RunDamaged, Store, read_store
from mose_fast.settings.knob import plain
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.signals import stop_request

if TYPE_CHECKING:
    import pandas

__all__ = ["Outcome", "run_grid", "run_sweep", "with_fingerprints"]


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep.

    Attributes:
        table: One row per finished cell, with the columns of
            :func:`mose_fast.runs.store.read_store`; None after a dry run.
        failures: Why cells have no result.
        folders: Name of the run folder by name of the cell as it was given: an earlier grid may
            have given it another name.
        forecast: What remained to be done before the sweep.
    """

    table: pandas.DataFrame | None
    failures: tuple[Failure, ...]
    folders: Mapping[str, str]
    forecast: Forecast


def run_sweep(
    grid: Mapping[str, Iterable[Any]],
    *,
    out: str | Path,
    workers: int | None = None,
    per_gpu: int | None = None,
    gpus: Sequence[str] | None = None,
    engine: str = "local",
    address: str = "auto",
    mps: bool = False,
    stream: str | Path | Mapping[str, Any] | StreamConfig | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> pandas.DataFrame:
    """Runs every combination of the values of some settings. Finished runs are not repeated, and an
    unfinished sweep is continued.

    Args:
        grid: Values by name, dotted or not: ``{"memory": [1000, 2000], "student": [2, 4], "seed":
            range(15)}``.
        out: The sweep's folder; each run gets a folder in it.
        workers: Number of runs at the same time on the CPU; None: as many as there are cores, cells
            and memory.
        per_gpu: Number of runs at the same time on each card, each a process; None: 1.
        gpus: Cards to use, named as in CUDA_VISIBLE_DEVICES; None: all.
        engine: ``local``, or ``ray`` for a cluster.
        address: Address of the Ray cluster.
        mps: Whether runs on one card compute at the same time, by CUDA's Multi-Process Service.
        stream: Stream of all runs: its name or its settings.
        options: Options of all runs that differ from the preset.
        **settings: Other fields of :class:`RunConfig`, for all runs.

    Returns:
        One row per finished run, ordered by folder. The columns are
        :data:`mose_fast.runs.store.COLUMNS`, and each name in the grid that is none of them.
        Failed cells are left out, with a warning that names them.

    Raises:
        ConfigError: A setting or a value is unusable; nothing has started.
        RunError: The folder is in use or cannot be written.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP ended the sweep; the same call continues it.
    """
    changes, stream = dict(settings), plain(stream)
    if isinstance(stream, str):
        changes["stream.name"] = stream
    elif stream is not None:
        given = dataclasses.asdict(stream) if isinstance(stream, StreamConfig) else stream
        changes |= {f"stream.{name}": value for name, value in given.items()}
    changes |= {f"options.{name}": value for name, value in (options or {}).items()}
    lists = {name: values if isinstance(values, str | Mapping) else list(values) for name, values in grid.items()}
    methods = lists.get("method") or [changes.get("method", RunConfig.method)]
    axes = axes_of(lists, methods, "grid")
    place = Place(workers, per_gpu, gpus, engine, address, mps)
    outcome = run_grid(Grid(axes, changes), out, place)
    if outcome.failures:
        warnings.warn("\n".join(map(str, outcome.failures)), stacklevel=2)
    table = outcome.table
    for name in lists:
        if name not in table and not isinstance(lists[name], Mapping):
            setting = next(axis for axis in axes if axis in (name, f"options.{name}"))
            table[name] = [dotted(json.loads(config))[setting] for config in table["config"]]
    return table


@guarded_output()
def run_grid(
    grid: Grid | Sequence[Cell],
    out: str | Path,
    place: Place | None = None,
    *,
    dry_run: bool = False,
    measure_for: float | None = None,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
    on_done: Callable[[Mapping[str, str]], None] = lambda folders: None,
) -> Outcome:
    """Plans and runs a sweep. An unfinished sweep is continued.

    Args:
        grid: All combinations of a grid, or the cells themselves, with different names.
        out: The sweep's folder.
        place: Where to compute.
        dry_run: Stop after the plan and write nothing.
        measure_for: Seconds for measuring the first steps of runs; what could not be measured then
            is estimated from the rest. None: every kind of run is measured.
        wandb: Project of Weights & Biases to log to; None: do not log there.
        say: Called with the plan and with each of the final lines.
        on_done: Called after each run that has finished, with :attr:`Outcome.folders`.

    Raises:
        ConfigError: A setting, a value or the place is unusable; nothing has started.
        RunError: The folder is in use, holds other runs, or cannot be written.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; unfinished runs have written a checkpoint.
    """
    folder, place = SweepFolder(out), place or Place()
    given = grid.cells() if isinstance(grid, Grid) else list(grid)
    for learner in {find_method(cell.config.method) for cell in given}:
        check_unchanged(learner)
    Layout.of(given, place)  # refuses what cannot compute here, before any data are loaded
    given = with_fingerprints(given, place)
    cells = folder.with_known_names(given)
    folders = {cell.name: found.name for cell, found in zip(given, cells, strict=True)}
    sweep = _Sweep(cells, folder, place, measure_for, say)
    if dry_run:
        with tempfile.TemporaryDirectory() as logs:
            forecast, engine = sweep.plan(Path(logs), None)
            engine.close()
        return Outcome(None, (), folders, forecast)
    folder.create()
    lock = FolderLock(folder.path, "sweep")
    try:
        folder.tidy(cells)
        table, failures, forecast = sweep.run(lock.descriptor, wandb, lambda: on_done(folders))
        return Outcome(table, failures, folders, forecast)
    finally:
        lock.release()


def with_fingerprints(cells: Sequence[Cell], place: Place) -> list[Cell]:
    """The cells with the fingerprint of their data. Loads each stream once, downloading it if
    needed.

    Raises:
        StreamError: There is no such stream.
        ConfigError: A run does not fit into the memory of this machine, or its method needs task
            boundaries and the stream has none.
    """
    data = {}
    configs = [cell.config for cell in cells]
    for settings, evaluate_on in {(config.stream, config.evaluate_on) for config in configs}:
        stream = streams.create(settings, evaluate_on=evaluate_on)
        data[settings, evaluate_on] = stream.fingerprint
        for config in configs:
            if (config.stream, config.evaluate_on) != (settings, evaluate_on):
                continue
            if stream.no_boundaries and config.train_on == "stream":
                find_method(config.method).check_boundaries(config, stream.no_boundaries)
            # The machines of a cluster may have more memory than this one.
            if place.engine == "local":
                check_room(config, stream.image_size, stream.classes)

    def with_fingerprint(config: RunConfig) -> RunConfig:
        stream = dataclasses.replace(config.stream, fingerprint=data[config.stream, config.evaluate_on])
        return dataclasses.replace(config, stream=stream)

    return [dataclasses.replace(cell, config=with_fingerprint(cell.config)) for cell in cells]


class _Sweep:
    """One sweep in progress."""

    def __init__(
        self,
        cells: Sequence[Cell],
        folder: SweepFolder,
        place: Place,
        measure_for: float | None,
        say: Callable[[str], None],
    ) -> None:
        self.cells, self.folder, self.measure_for, self.say = cells, folder, measure_for, say
        self.records = {cell.name: CellRecord(cell) for cell in cells}
        stored = folder.stored_plan()
        self.chosen = place.workers is not None
        # A sweep keeps its numbers of workers and threads: another number of threads would change
        # the last digits of the remaining results.
        if place.workers is None and stored.get("workers") and place.engine == stored.get("engine"):
            place = dataclasses.replace(place, workers=stored["workers"])
        self.layout = Layout.of(cells, place)
        self.continued = stored.get("workers") == self.layout.runs and self.layout.device == "cpu"
        if self.continued:
            self.layout = dataclasses.replace(self.layout, most_threads=stored["threads"])
        earlier = stored["measured"] if stored.get("threads") == self.layout.threads else {}
        self.measured = {key: Cost(**cost) for key, cost in earlier.items()}

    def _in_state(self, state: CellState) -> list[CellRecord]:
        return [record for record in self.records.values() if record.state is state]

    def _find_done(self) -> None:
        """Finds the finished cells, and those whose run folders are damaged.

        Raises:
            RunError: A cell's folder holds another run.
        """
        for record in self.records.values():
            try:
                found = self.folder.finished(record.cell)
            except RunDamaged as error:
                reason = f"{error}; it is left as it is. Delete the folder to run it again"
                record.give_up(reason, self.folder, self.layout.threads, show_log=False)
                continue
            if found is not None:
                record.state = CellState.DONE

    def plan(self, logs: Path, lock: int | None) -> tuple[Forecast, Engine]:
        """Finds what is done, forecasts the rest, says the plan, and makes the engine.

        Raises:
            ConfigError: The chosen number of runs at the same time does not fit into the memory.
        """
        self._find_done()
        engine = self._engine(logs, lock)
        try:
            engine = self._with_threads_that_help(engine, logs, lock)
            costs = self._costs(engine)
            if any(cost.source == "estimated" for cost in costs.values()):
                engine.close()  # it may still measure
                engine = self._engine(logs, lock)
            forecast = Forecast(self.cells, costs, self.layout.runs, self.layout.threads, available_bytes())
            if self.layout.place.engine == "local":
                too_large = forecast.bytes > forecast.available and forecast.fitting >= 1
                if too_large and not self.chosen and not self.layout.cards:
                    fewer = min(self.layout.runs, forecast.fitting)
                    self.layout = dataclasses.replace(self.layout, runs=fewer)
                    forecast = dataclasses.replace(forecast, runs=fewer, threads=self.layout.threads)
                    engine.close()
                    engine = self._engine(logs, lock)
                forecast.check_memory()
                self._check_cards(forecast)
            self.say(f"{len(self.cells)} runs in {self.folder.path}\n{forecast}")
        except BaseException:
            engine.close()
            raise
        return forecast, engine

    def _with_threads_that_help(self, engine: Engine, logs: Path, lock: int | None) -> Engine:
        """The engine, or one whose runs have one thread, if that is faster than several: where
        other programs use the cores, threads wait for each other most of the time.

        Measured at a sweep's start, with the most expensive of its settings.
        """
        several, missing = self.layout, self._unknown()[2]
        if self.continued or several.device != "cpu" or several.place.engine != "local" or several.threads == 1:
            return engine
        if not missing:
            return engine
        self.say(f"measuring the first steps of a run with {several.threads} threads and with one ...")
        key = most_expensive(missing)
        slower = measured_costs({key: missing[key]}, engine)
        engine.close()
        self.layout = dataclasses.replace(several, most_threads=1)
        engine = self._engine(logs, lock)
        try:
            faster = measured_costs({key: missing[key]}, engine)
        except BaseException:
            engine.close()
            raise
        times = slower[key].seconds / faster[key].seconds
        if times > 1:
            self.measured |= faster
            self.say(f"each run has one thread: here that is {times:.1f} times as fast as {several.threads}")
            return engine
        engine.close()
        self.layout, self.measured = several, self.measured | slower
        return self._engine(logs, lock)

    def _unknown(self) -> tuple[dict[str, Cost], dict[str, str], dict[str, RunConfig]]:
        """The known costs by :func:`cost_key`; those keys by waiting cell; and the configurations
        whose costs are not known.
        """
        known = {**self.measured, **stored_costs(self.folder.path, self.layout.threads)}
        needed = {record.cell.name: record.cell.config for record in self._in_state(CellState.WAITING)}
        keys = {name: cost_key(config) for name, config in needed.items()}
        return known, keys, {key: needed[name] for name, key in keys.items() if key not in known}

    def _costs(self, engine: Engine) -> dict[str, Cost]:
        """Costs of the waiting cells by name, from the table of runs or measured."""
        known, keys, missing = self._unknown()
        if missing:
            some = "one setting" if len(missing) == 1 else f"{len(missing)} settings"
            most = "" if self.measure_for is None else f", for at most {duration(self.measure_for)}"
            self.say(f"measuring the first steps of runs ({some}{most}) ...")
            found = measured_costs(missing, engine, self.measure_for)
            self.measured |= found
            known |= found
            if others := [key for key in missing if key not in found]:
                self.say(
                    f"measured {len(found)} of {len(missing)} settings, some of each method first; the others are"
                    " estimated from the most similar ones by the methods' relative costs (mose-fast list methods)"
                )
                known |= {key: estimated_cost(key, known) for key in others}
        return {name: known[key] for name, key in keys.items()}

    def _check_cards(self, forecast: Forecast) -> None:
        needed = max((cost.bytes_device or 0 for cost in forecast.costs.values()), default=0)
        if not self.layout.cards or not needed:
            return
        total = torch.cuda.get_device_properties(0).total_memory
        per_card = self.layout.runs // len(self.layout.cards)
        if per_card * needed > total:
            raise ConfigError(
                f"per_gpu is {per_card}, which needs {per_card * needed / 1e9:.1f} GB on a card of {total / 1e9:.1f}"
                f" GB; wanted at most {total // needed}"
            )

    def _engine(self, logs: Path, lock: int | None) -> Engine:
        return self.layout.engine(self.folder.path, logs, lock)

    def _write_plan(self) -> None:
        plan = {
            "workers": self.layout.runs if self.layout.device == "cpu" else None,
            "threads": self.layout.threads,
            "engine": self.layout.place.engine,
            "data": {cell.config.stream.name: cell.config.stream.fingerprint for cell in self.cells},
            "cells": {cell.name: cell.values for cell in self.cells},
            # A sweep that is continued need not measure again.
            "measured": {key: dataclasses.asdict(cost) for key, cost in self.measured.items()},
        }
        write_atomically(self.folder.plan, json.dumps(plan, indent=1) + "\n")
        for record in self._in_state(CellState.WAITING):
            write_atomically(self.folder.config(record.cell.name), record.cell.config.to_json())

    def run(
        self, lock: int, wandb: str | None, on_done: Callable[[], None]
    ) -> tuple[pandas.DataFrame, tuple[Failure, ...], Forecast]:
        """Runs the sweep; returns the table of its finished cells, why others failed, and what was
        to be done.

        Args:
            lock: File descriptor of the folder's lock.
            wandb: Project of Weights & Biases to log to; None: do not log there.
            on_done: Called after each run that has finished.
        """
        forecast, engine = self.plan(self.folder.logs, lock)
        try:
            self._write_plan()
            store = Store(self.folder.path)
            for name in sorted(record.cell.name for record in self._in_state(CellState.DONE)):
                store.add(self.folder.run(name))
            display = Display(self.records, forecast)
            try:
                with stop_request() as stop:
                    threads = self.layout.threads
                    loop = CellLoop(
                        self.records, self.folder, engine, threads, store, display, wandb, stop, on_done=on_done
                    )
                    ended = loop.run()
            finally:
                display.close()
        finally:
            engine.close()
        if not ended:
            stop.check()
        table = read_store(self.folder.path)
        table = table[table["folder"].isin(self.records)].reset_index(drop=True)
        self.say(display.summary())
        failures = tuple(record.failure for record in self._in_state(CellState.FAILED))
        for failure in failures:
            self.say(str(failure))
        return table, failures, forecast
