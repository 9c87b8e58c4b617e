"""Runs the cells of a grid until all are done: skips, resumes, retries, reports; survives its own
death.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import tempfile
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mose_fast import streams
from mose_fast.augment import choose_feed
from mose_fast.config import ConfigError, RunConfig, StreamConfig
from mose_fast.device import available_bytes
from mose_fast.methods import check_room, resolve_device
from mose_fast.output import guarded_output
from mose_fast.settings import dotted
from mose_fast.signals import StopRequest, stop_request
from mose_fast.sweep.display import Display, Running
from mose_fast.sweep.engine import Engine, LocalEngine, Slot
from mose_fast.sweep.forecast import Forecast, cost_key, measured_costs, stored_costs
from mose_fast.sweep.grid import Cell, Grid, axes_of
from mose_fast.sweep.measure import Cost
from mose_fast.sweep.ray_engine import RayEngine
from mose_fast.sweep.store import STORE, RunDamaged, Store, collect, read_run, read_store, setting_id
from mose_fast.threads import usable_cores
from mose_fast.train import RunError
from mose_fast.train.files import RunFolder, checkpoint_files, is_configuration, remove_leftovers, write_atomically
from mose_fast.train.lock import FolderLock

if TYPE_CHECKING:
    import pandas

__all__ = ["Failure", "Outcome", "Place", "SweepFolder", "run_grid", "run_sweep"]

# A run whose process is killed this often, without a new checkpoint in between, is given up.
_DEATHS = 3

# Lines of a failed run's log that are shown.
_LOG_LINES = 15

# Runs on one card, unless --per-gpu says otherwise.
_PER_GPU = 2


@dataclass(frozen=True)
class Failure:
    """A cell that could not be finished.

    Attributes:
        name: Of the cell.
        reason: Why not, in a sentence.
        log: The end of its log; empty where it never ran.
        command: That runs it again, alone.
    """

    name: str
    reason: str
    log: str
    command: str

    def __str__(self) -> str:
        shown = "".join(f"\n    | {line}" for line in self.log.splitlines())
        return f"failed: {self.name}: {self.reason}{shown}\n    again: {self.command}"


@dataclass(frozen=True)
class Outcome:
    """What a sweep has come to.

    Attributes:
        table: A row a finished cell, as :func:`mose_fast.sweep.store.read_store` gives it; None
        after a dry run.
        failures: Cells without a result.
        folders: Name of the run folder by name of the cell as it was given: an earlier grid may
            have named it otherwise.
    """

    table: pandas.DataFrame | None
    failures: tuple[Failure, ...]
    folders: Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """Where a sweep computes.

    Attributes:
        workers: Runs at a time on the CPU; with Ray, at most this many anywhere. None: what cores,
        memory and cluster allow.
        per_gpu: Runs at a time on each card; None: 2.
        gpus: Names of cards as in CUDA_VISIBLE_DEVICES; None: all.
        engine: ``local`` or ``ray``.
        address: Of the Ray cluster: ``HOST:PORT``, ``auto`` or ``local``.
    """

    workers: int | None = None
    per_gpu: int | None = None
    gpus: tuple[str, ...] | None = None
    engine: str = "local"
    address: str = "auto"

    def __post_init__(self) -> None:
        for name in ("workers", "per_gpu"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} is {value!r}; wanted an integer of at least 1")
        if self.engine not in ("local", "ray"):
            raise ConfigError(f"engine is {self.engine!r}; wanted 'local' or 'ray'")


class SweepFolder:
    """Names of what lies in a sweep's folder, beside the run folders.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.plan = self.path / "sweep.json"
        self.configs = self.path / "configs"
        self.logs = self.path / "logs"

    def run(self, name: str) -> Path:
        """Folder of a cell."""
        return self.path / name

    def config(self, name: str) -> Path:
        """Configuration of a cell, for ``mose-fast run --config``."""
        return self.configs / f"{name}.json"

    def log(self, name: str) -> Path:
        """What a cell has printed."""
        return self.logs / f"{name}.log"

    def create(self) -> None:
        """Makes the folders.

        Raises:
            RunError: They cannot be written.
        """
        try:
            for folder in (self.path, self.configs, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from error

    def tidy(self, cells: Iterable[Cell]) -> None:
        """Deletes what a killed sweep had half written. The caller holds the folder.

        Raises:
            RunError: The file of a cell's configuration is not ours, or nothing can be deleted.
        """
        for cell in cells:
            file = self.config(cell.name)
            if file.exists() and not is_configuration(file):
                raise RunError(
                    f"{file} is no configuration of a run, and would be replaced; choose another --out, or move it away"
                )
        try:
            remove_leftovers(self.path, [re.escape(self.plan.name), re.escape(STORE)])
            remove_leftovers(self.configs, [r".+\.json"])
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(f"cannot write into the sweep's folder {self.path}: {error.strerror}; choose another --out")

    def stored_plan(self) -> dict[str, Any]:
        """What the sweep in the folder noted about itself; empty where there is none."""
        try:
            plan = json.loads(self.plan.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(
                f"cannot read the plan {self.plan}: {error}; delete it to plan anew, the runs stay"
            ) from error
        if not isinstance(plan, dict) or not plan.keys() >= {"cells", "threads", "measured"}:
            raise RunError(
                f"{self.plan} is not the plan of a sweep, and would be replaced; choose another --out, or move it away"
            )
        return plan


def run_sweep(
    grid: Mapping[str, Iterable[Any]],
    *,
    out: str | Path,
    workers: int | None = None,
    per_gpu: int | None = None,
    gpus: Sequence[str] | None = None,
    engine: str = "local",
    address: str = "auto",
    stream: str | Mapping[str, Any] | StreamConfig | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> pandas.DataFrame:
    """Runs every combination of some settings' values; what is done already is not done again.

    Args:
        grid: Values by name, dotted or not: ``{"memory": [1000, 2000], "student": [2, 4], "seed":
        range(15)}``.
        out: Folder of the sweep; a run folder a cell below it.
        workers: Runs at a time on the CPU; None: as many as there are cores, cells and memory.
        per_gpu: Runs at a time on each card.
        gpus: Cards as in CUDA_VISIBLE_DEVICES; None: all.
        engine: ``local``, or ``ray`` for a cluster.
        address: Of the Ray cluster.
        stream: Of all runs: its name or its settings.
        options: Of all runs: what differs from the preset.
        **settings: Of all runs: the other fields of :class:`RunConfig`.

    Returns:
        A row a finished run, ordered by folder: the columns of
        :data:`mose_fast.sweep.store.COLUMNS`, and one for each name in the grid that is none of
        them. Failed cells are left out, with a warning that names them.

    Raises:
        ConfigError: A setting or a value is unusable; nothing has started.
        RunError: The folder is in use or cannot be written.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; the same call continues.
    """
    changes = dict(settings)
    if isinstance(stream, str):
        changes["stream.name"] = stream
    elif stream is not None:
        given = dataclasses.asdict(stream) if isinstance(stream, StreamConfig) else stream
        changes |= {f"stream.{name}": value for name, value in given.items()}
    changes |= {f"options.{name}": value for name, value in (options or {}).items()}
    lists = {name: values if isinstance(values, str | Mapping) else list(values) for name, values in grid.items()}
    methods = lists.get("method") or [changes.get("method", RunConfig.method)]
    axes = axes_of(lists, methods, "grid")
    place = Place(workers, per_gpu, None if gpus is None else tuple(gpus), engine, address)
    outcome = run_grid(Grid(axes, changes), out, place)
    if outcome.failures:
        warnings.warn("\n".join(map(str, outcome.failures)), stacklevel=2)
    table = outcome.table
    for name in lists:
        if name not in table and not isinstance(lists[name], Mapping):
            setting = next(axis for axis in axes if axis in (name, f"options.{name}"))
            table[name] = [_value(json.loads(config), setting) for config in table["config"]]
    return table


def run_grid(
    grid: Grid | Sequence[Cell],
    out: str | Path,
    place: Place | None = None,
    *,
    dry_run: bool = False,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Plans and runs a sweep, or goes on with it.

    Args:
        grid: What to run: all combinations of a grid, or the cells themselves, with different
        names.
        out: Folder of the sweep.
        place: Where to compute.
        dry_run: Stop after the plan; nothing is written.
        wandb: Project of Weights & Biases to log to; None: no.
        say: Takes the plan and the final lines.

    Raises:
        ConfigError: A setting, a value or the place is unusable; nothing has started.
        RunError: The folder is in use, holds other runs, or cannot be written.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; unfinished runs have written a checkpoint.
    """
    with guarded_output():
        return _run_grid(grid, out, place or Place(), dry_run, wandb, say)


def _run_grid(
    grid: Grid | Sequence[Cell],
    out: str | Path,
    place: Place,
    dry_run: bool,
    wandb: str | None,
    say: Callable[[str], None],
) -> Outcome:
    cells = grid.cells() if isinstance(grid, Grid) else list(grid)
    # Loads, and downloads, once, and refuses what does not exist.
    data = {}
    for settings in {cell.config.stream for cell in cells}:
        stream = streams.create(settings)
        data[settings] = stream.fingerprint
        # The machines of a cluster may have more.
        for config in (cell.config for cell in cells if cell.config.stream == settings and place.engine == "local"):
            check_room(config, stream.image_size)
    cells = [_on_data(cell, data[cell.config.stream]) for cell in cells]
    folder = SweepFolder(out)
    given, cells = cells, _with_known_names(cells, folder.path)
    folders = {cell.name: found.name for cell, found in zip(given, cells, strict=True)}
    planned = _Sweep(cells, folder, place, say)
    if dry_run:
        with tempfile.TemporaryDirectory() as logs:
            _, engine = planned.plan(Path(logs), None)
            engine.close()
        return Outcome(None, (), folders)
    folder.create()
    lock = FolderLock(folder.path, "sweep")
    try:
        folder.tidy(cells)
        table, failures = planned.run(lock.descriptor, wandb)
        return Outcome(table, failures, folders)
    finally:
        lock.release()


class _Sweep:
    """One sweep in progress."""

    def __init__(self, cells: Sequence[Cell], folder: SweepFolder, place: Place, say: Callable[[str], None]) -> None:
        self.cells, self.folder, self.say = cells, folder, say
        self.by_name = {cell.name: cell for cell in cells}
        self.failures: list[Failure] = []
        self.untold = False
        stored = folder.stored_plan()
        # Another number of threads would change the last digits of what is still to come.
        if place.workers is None and stored.get("workers") and place.engine == stored.get("engine"):
            place = dataclasses.replace(place, workers=stored["workers"])
            self.chosen = False
        else:
            self.chosen = place.workers is not None
        self.place = place
        self.device = _device(cells, place)
        self.cores = usable_cores()
        self.cards = _cards(place) if self.device == "cuda" and place.engine == "local" else []
        self.runs = self._runs()
        self.threads = max(1, self.cores // self.runs)
        earlier = stored["measured"] if stored.get("threads") == self.threads else {}
        self.measured = {key: Cost(**cost) for key, cost in earlier.items()}
        self.done: set[str] = set()
        #: Finished cells of versions that noted no fingerprint of the data.
        self.unknown_data = 0
        self.waiting: list[Cell] = []

    def _runs(self) -> int:
        place = self.place
        if self.device == "cuda" and place.engine == "local":
            if place.workers is not None:
                raise ConfigError(
                    f"workers is {place.workers}, which is for the CPU; wanted --per-gpu for runs on a card"
                )
            per_card = place.per_gpu or _PER_GPU
            # What is one switch for all runs of a process.
            shared = {
                "deterministic": {cell.config.deterministic for cell in self.cells},
                "precision tf32": {cell.config.precision == "tf32" for cell in self.cells},
            }
            for name, values in shared.items():
                if per_card > 1 and len(values) > 1:
                    raise ConfigError(
                        f"{name} is in the grid, and runs that share a process share it; wanted --per-gpu 1"
                    )
            return len(self.cards) * per_card
        if place.per_gpu is not None and self.device == "cpu":
            raise ConfigError(f"per_gpu is {place.per_gpu}, but the runs compute on the CPU; wanted --workers")
        if place.workers is not None and place.workers > self.cores and place.engine == "local":
            raise ConfigError(f"workers is {place.workers}; wanted at most {self.cores}, the number of cores here")
        return place.workers or min(self.cores, len(self.cells))

    def _find_done(self) -> set[str]:
        """Names of finished cells.

        Raises:
            RunError: A cell's folder holds another run.
        """
        done = set()
        for cell in self.cells:
            files = RunFolder(self.folder.run(cell.name))
            try:
                if not files.config.is_file():
                    if files.results.is_file():
                        raise RunDamaged(f"{files.path}: there is a {files.results.name}, but no {files.config.name}")
                    continue
                try:
                    found = RunConfig.load(files.config)
                except ConfigError as error:
                    raise RunDamaged(str(error)) from error
                if found != cell.config:
                    raise RunError(
                        f"{files.path} holds a run with other settings ({_first_difference(found, cell.config)}); "
                        "choose another --out, or delete that folder"
                    )
                data = found.stream.fingerprint
                if data not in (None, cell.config.stream.fingerprint):
                    raise RunError(
                        f"{files.path} holds a run on other data: the fingerprint of stream {found.stream.name!r} was"
                        f" {data} and is {cell.config.stream.fingerprint} now; put the earlier data back, or choose"
                        " another --out"
                    )
                if files.results.is_file():
                    self.unknown_data += data is None
                    read_run(files.path)
                    done.add(cell.name)
            except RunDamaged as error:
                reason = f"{error}; it is left as it is. Delete the folder to run it again"
                self.failures.append(self._failure(cell.name, reason, log=False))
        return done

    def plan(self, logs: Path, lock: int | None) -> tuple[Forecast, Engine]:
        """Looks what is done, forecasts the rest, says the plan, and makes the engine ready.

        Raises:
            ConfigError: More runs at a time are asked for than fit into the memory.
        """
        self.done = self._find_done()
        if self.unknown_data:
            self.say(
                f"caution: {self.unknown_data} finished run(s) here are of a version that noted no fingerprint of the"
                " data; whether these are still the same is not known"
            )
        given_up = {failure.name for failure in self.failures}
        self.waiting = [cell for cell in self.cells if cell.name not in self.done | given_up]
        engine = self._engine(logs, lock)
        try:
            costs = {**self.measured, **stored_costs(self.folder.path, self.threads)}
            needed = {cost_key(cell.config): cell.config for cell in self.waiting}
            missing = {key: config for key, config in needed.items() if key not in costs}
            if missing:
                some = "once" if len(missing) == 1 else f"{len(missing)} kinds of runs"
                self.say(f"measuring the first steps of runs ({some}) ...")
                found = measured_costs(missing, engine)
                self.measured |= found
                costs |= found
            by_name = {cell.name: costs[cost_key(cell.config)] for cell in self.waiting}
            forecast = Forecast(self.cells, by_name, self.runs, self.threads, available_bytes())
            if self.place.engine == "local":
                if not self.chosen and not self.cards and forecast.bytes > forecast.available and forecast.fitting >= 1:
                    self.runs = min(self.runs, forecast.fitting)
                    self.threads = max(1, self.cores // self.runs)
                    forecast = dataclasses.replace(forecast, runs=self.runs, threads=self.threads)
                    engine.close()
                    engine = self._engine(logs, lock)
                forecast.check_memory()
                self._check_cards(forecast)
            self.say(f"{len(self.cells)} runs in {self.folder.path}\n{forecast}")
        except BaseException:
            engine.close()
            raise
        return forecast, engine

    def _check_cards(self, forecast: Forecast) -> None:
        needed = max((cost.bytes_device or 0 for cost in forecast.costs.values()), default=0)
        if not self.cards or not needed:
            return
        total = torch.cuda.get_device_properties(0).total_memory
        per_card = self.runs // len(self.cards)
        if per_card * needed > total:
            raise ConfigError(
                f"per_gpu is {per_card}, which needs {per_card * needed / 1e9:.1f} GB on a card of {total / 1e9:.1f}"
                f" GB; wanted at most {total // needed}"
            )

    def _engine(self, logs: Path, lock: int | None) -> Engine:
        if self.place.engine == "ray":
            cards = 1 / (self.place.per_gpu or 1) if self.device == "cuda" else 0.0
            return RayEngine(self.place.address, self.place.workers, self.threads, cards, self.folder.path)
        if self.cards:
            return LocalEngine(
                [Slot(self.runs // len(self.cards), card) for card in self.cards], self.threads, logs, lock
            )
        return LocalEngine([Slot()] * self.runs, self.threads, logs, lock)

    def run(self, lock: int, wandb: str | None) -> tuple[pandas.DataFrame, tuple[Failure, ...]]:
        forecast, engine = self.plan(self.folder.logs, lock)
        try:
            plan = {
                "workers": self.runs if self.device == "cpu" else None,
                "threads": self.threads,
                "engine": self.place.engine,
                "data": {cell.config.stream.name: cell.config.stream.fingerprint for cell in self.cells},
                "cells": {cell.name: cell.values for cell in self.cells},
                # So that a sweep that goes on need not measure again.
                "measured": {key: dataclasses.asdict(cost) for key, cost in self.measured.items()},
            }
            write_atomically(self.folder.plan, json.dumps(plan, indent=1) + "\n")
            for cell in self.waiting:
                write_atomically(self.folder.config(cell.name), cell.config.to_json())
            store = Store(self.folder.path)
            for name in sorted(self.done):
                store.add(self.folder.run(name))
            display = Display(forecast)
            try:
                with stop_request() as stop:
                    finished = self._schedule(engine, store, display, wandb, stop)
            finally:
                display.close()
        finally:
            engine.close()
        if not finished:
            stop.check()
        table = read_store(self.folder.path)
        table = table[table["folder"].isin(self.by_name)].reset_index(drop=True)
        self.say(display.summary())
        for failure in self.failures:
            self.say(str(failure))
        return table, tuple(self.failures)

    def _failure(self, name: str, reason: str, *, log: bool = True) -> Failure:
        lines = []
        if log and self.folder.log(name).is_file():
            lines = self.folder.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        command = (
            f"OMP_NUM_THREADS={self.threads} mose-fast run --config {shlex.quote(str(self.folder.config(name)))} "
            f"--out {shlex.quote(str(self.folder.run(name)))} --overwrite"
        )
        return Failure(name, reason, "\n".join(lines), command)

    def _schedule(self, engine: Engine, store: Store, display: Display, wandb: str | None, stop: StopRequest) -> bool:
        """Runs what is waiting; returns whether all of it has come to an end, which it has not
        where a signal ends the sweep.
        """
        waiting = deque(self.waiting)
        deaths: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        resumed: dict[str, bool] = {}
        checkpoints: dict[str, list[str]] = {}
        afresh: set[str] = set()
        stopping = False
        for failure in self.failures:
            display.given_up(failure.name)

        def start(cell: Cell) -> None:
            files = RunFolder(self.folder.run(cell.name))
            from_start = cell.name in afresh
            afresh.discard(cell.name)
            resumed[cell.name] = files.config.is_file() and not from_start
            checkpoints[cell.name] = _names(files.checkpoints)
            display.running[cell.name] = Running()
            engine.start(
                {
                    "do": "run",
                    "cell": cell.name,
                    "config": str(self.folder.config(cell.name).absolute()),
                    "out": str(files.path.absolute()),
                    "log": str(self.folder.log(cell.name).absolute()),
                    "afresh": from_start,
                    "wandb": wandb,
                }
            )

        def give_up(name: str, reason: str) -> None:
            failure = self._failure(name, reason)
            self.failures.append(failure)
            display.given_up(name)
            display.say(str(failure))

        def on_end(name: str, event: Mapping[str, Any]) -> None:
            """A run that failed is tried once more: from its checkpoint, or afresh if that is where
            it came from.
            """
            del display.running[name]
            if event["event"] == "done":
                try:
                    row, _ = read_run(self.folder.run(name))
                except RunDamaged as error:
                    give_up(name, str(error))
                    return
                self.done.add(name)
                display.finished(name, row["seconds_total"], row["acc"])
                try:
                    store.add(self.folder.run(name))
                except RunError as error:
                    display.say(f"warning: {error}")  # the run folder has it all; the table is built again at the end
                    self.untold = True
            elif event["event"] == "died":
                if stopping:
                    return
                progressed = _names(RunFolder(self.folder.run(name)).checkpoints) != checkpoints[name]
                deaths[name] = 1 if progressed else deaths[name] + 1
                how = f"killed by signal {event['signal']}" if event["signal"] else "ended without a word"
                if deaths[name] >= _DEATHS:
                    give_up(
                        name,
                        f"its process was {how} {_DEATHS} times without getting further; does it have enough memory?",
                    )
                else:
                    display.say(f"{name}: its process was {how}; it goes on from its last checkpoint")
                    waiting.appendleft(self.by_name[name])
            elif event["event"] == "stopped":
                if not stopping:
                    display.say(f"{name}: a signal ended its process; it goes on from its checkpoint")
                    waiting.append(self.by_name[name])
            elif event["event"] == "failed":
                failed[name] += 1
                if failed[name] > 1 or stopping:
                    give_up(name, event["error"])
                    return
                if resumed[name]:
                    afresh.add(name)
                display.say(
                    f"{name}: {event['error']}; it is tried once more{', from its start' if resumed[name] else ''}"
                )
                waiting.append(self.by_name[name])

        while display.running or (waiting and not stopping):
            if stop.is_set() and not stopping:
                stopping = True
                display.say("interrupted: the runs write their checkpoints")
                engine.stop()
            while waiting and not stopping and engine.free() > 0:
                start(waiting.popleft())
            for event in engine.events(0.2):
                name = event["cell"]
                if name not in display.running:
                    continue
                if event["event"] == "progress":
                    display.running[name].batch, display.running[name].batches = event["batch"], event["batches"]
                elif event["event"] == "task":
                    run = display.running[name]
                    run.task, run.tasks, run.accuracy = event["task"], event["tasks"], event["accuracy"]
                else:
                    on_end(name, event)
            display.draw()
        if self.untold:
            collect(self.folder.path)
        return not stopping or len(self.done) + len(self.failures) == len(self.cells)


def _device(cells: Sequence[Cell], place: Place) -> str:
    """``cpu`` or ``cuda``, where all runs compute; refuses a feed that they cannot have there."""
    device = cells[0].config.device
    if device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r}; wanted cuda in a sweep, and --gpus to choose cards")
    if place.engine == "ray" and device == "cuda":
        return "cuda"  # of the cluster's machines; this one may have none
    found = resolve_device(device)
    choose_feed(cells[0].config.feed, found, None)
    return found.type


def _cards(place: Place) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    for card in place.gpus or ():
        if card not in names:
            raise ConfigError(f"gpus has {card!r}; wanted some of {', '.join(names)}")
    return list(place.gpus or names)


def _names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint_files(folder)]


def _on_data(cell: Cell, fingerprint: str) -> Cell:
    stream = dataclasses.replace(cell.config.stream, fingerprint=fingerprint)
    return dataclasses.replace(cell, config=dataclasses.replace(cell.config, stream=stream))


def _with_known_names(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """The cells, those that have a run folder already under its name.

    A cell's name depends on all of the grid; what it sets does not. So a larger grid finds what a
    smaller one has done.
    """
    there: dict[tuple[str, int], list[str]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with suppress(ConfigError):
            if (path / "config.json").is_file():
                there.setdefault(_key(RunConfig.load(path / "config.json")), []).append(path.name)
    taken = {name for cell in cells for name in there.get(_key(cell.config), [])}

    def name(cell: Cell) -> str:
        known = there.get(_key(cell.config), [])
        if known:
            return cell.name if cell.name in known else known[0]
        # Its name may be that of another cell's folder, where it counts cells of the same name.
        return f"{cell.name}_{setting_id(cell.config)}" if cell.name in taken else cell.name

    return [dataclasses.replace(cell, name=name(cell)) for cell in cells]


def _key(config: RunConfig) -> tuple[str, int]:
    return setting_id(config), config.seed


def _first_difference(found: RunConfig, wanted: RunConfig) -> str:
    a, b = dotted(found.to_dict()), dotted(wanted.to_dict())
    name = next(name for name in {**a, **b} if a.get(name) != b.get(name) and name != "stream.fingerprint")
    return f"{name} is {a.get(name)!r} there and {b.get(name)!r} here"


def _value(config: Mapping[str, Any], setting: str) -> Any:
    owner, _, name = setting.rpartition(".")
    return (config[owner] if owner else config)[name]
