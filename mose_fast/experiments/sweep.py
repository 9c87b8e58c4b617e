"""Plans and runs a sweep: skips finished cells, forecasts the rest, runs it, and returns the table.

A sweep can be killed at any moment; the same call continues it.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mose_fast.experiments.cells import CellRecord, CellState, Failure
from mose_fast.experiments.experiment import Experiment, with_fingerprints
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import Forecast, declared_cost, measured_costs
from mose_fast.experiments.grid import Cell, axes_of, grid_cells
from mose_fast.experiments.place import Place
from mose_fast.learner.named_settings import dotted
from mose_fast.learner.registry import check_unchanged
from mose_fast.methods import find_method
from mose_fast.output import guarded_output
from mose_fast.runs.files import write_atomically
from mose_fast.runs.store import read_store
from mose_fast.settings.knob import plain
from mose_fast.settings.run import RunConfig, StreamConfig

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Outcome:
    """The result of a sweep.

    Attributes:
        table: One row per finished cell, as of :func:`mose_fast.runs.store.read_store`; None after
            a dry run.
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
        per_gpu: Number of runs at the same time on each GPU, each a process; None: 1.
        gpus: GPUs to use, named as in CUDA_VISIBLE_DEVICES; None: all.
        engine: ``local``, or ``ray`` for a cluster.
        mps: Whether runs on one GPU compute at the same time, by CUDA's Multi-Process Service.
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
    outcome = run_grid(grid_cells(axes, changes), out, place)
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
    cells: Sequence[Cell],
    out: str | Path,
    place: Place | None = None,
    *,
    dry_run: bool = False,
    measure_for: float | None = None,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
    on_done: Callable[[Mapping[str, str]], None] = lambda folders: None,
) -> Outcome:
    """Plans and runs a sweep, or continues it; for what it raises see :func:`run_sweep`.

    Args:
        cells: The runs, with different names (:func:`.grid.grid_cells`).
        measure_for: Seconds for measuring the first steps of runs; what could not be measured then
            is estimated from the rest. None: every kind of run is measured.
        on_done: Called after each run that has finished, with :attr:`Outcome.folders`.
    """
    sweep = _Sweep(cells, SweepFolder(out), place or Place(), say)
    sweep.measure_for, sweep.wandb, sweep.on_done = measure_for, wandb, lambda: on_done(sweep.folders)
    table, failures = sweep.carry_out(dry_run=dry_run) or (None, ())
    return Outcome(table, failures, sweep.folders, sweep.forecast)


class _Sweep(Experiment):
    """One sweep in progress."""

    def __init__(self, cells: Sequence[Cell], folder: SweepFolder, place: Place, say: Callable[[str], None]) -> None:
        for learner in {find_method(cell.config.method) for cell in cells}:
            check_unchanged(learner)
        super().__init__(cells, folder, place, say)
        given = with_fingerprints(cells, place)
        found = folder.with_known_names(given)
        self.records = {cell.name: CellRecord(cell) for cell in found}
        self.folders = {cell.name: there.name for cell, there in zip(given, found, strict=True)}

    def begin(self) -> None:
        for record in self.records.values():
            self.find_done(record)

    def plan(self) -> Forecast:
        self._choose_threads()
        forecast = super().plan()
        self.say(f"{len(self.records)} runs in {self.folder.path}\n{forecast}")
        return forecast

    def _choose_threads(self) -> None:
        """Gives runs one thread if that is faster than several, measured at a sweep's start with
        its most expensive settings: beside other programs threads wait for each other.
        """
        several, missing = self.layout, self.missing(self.known())
        measured_here = several.device == "cpu" and several.place.engine == "local"
        if self.continued or not measured_here or several.threads == 1 or not missing:
            return
        self.say(f"measuring the first steps of a run with {several.threads} threads and with one ...")
        key = max(missing, key=declared_cost)
        slower = measured_costs({key: missing[key]}, self.engine)
        self.change_layout(most_threads=1)
        faster = measured_costs({key: missing[key]}, self.engine)
        times = slower[key].seconds / faster[key].seconds
        if times > 1:
            self.measured |= faster
            self.say(f"each run has one thread: here that is {times:.1f} times as fast as {several.threads}")
        else:
            self.measured |= slower
            self.change_layout(most_threads=several.most_threads)

    def described(self) -> dict[str, Any]:
        cells = [record.cell for record in self.records.values()]
        return {
            "data": {cell.config.stream.name: cell.config.stream.fingerprint for cell in cells},
            "cells": {cell.name: cell.values for cell in cells},
        }

    def compute(self) -> None:
        for record in self.in_state(CellState.WAITING):
            write_atomically(self.folder.config(record.cell.name), record.cell.config.to_json())
        done = sorted(self.in_state(CellState.DONE), key=lambda record: record.cell.name)
        self.store.add(*(record.row for record in done))
        self.run_cells(list(self.records.values()))

    def conclude(self) -> tuple[pandas.DataFrame, tuple[Failure, ...]]:
        """The table of the finished cells, and why others failed."""
        table = read_store(self.folder.path)
        table = table[table["folder"].isin(self.records)].reset_index(drop=True)
        self.say(self.display.summary())
        failures = tuple(record.failure for record in self.in_state(CellState.FAILED))
        for failure in failures:
            self.say(str(failure))
        return table, failures
