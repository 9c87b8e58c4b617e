"""Tunes the settings of a method: rounds of trials, and what they leave.

A study can be killed at any moment; the same call continues it to the same trials.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mose_fast.device import available_bytes
from mose_fast.experiments.cells import CellRecord, CellState
from mose_fast.experiments.display import Display
from mose_fast.experiments.engine import Engine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import Forecast, cost_key, duration, measured_costs
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.place import Layout, Place
from mose_fast.experiments.step_cost import Cost
from mose_fast.experiments.sweep import with_fingerprints
from mose_fast.experiments.tune.outcome import Tuned, check_writable, conclude
from mose_fast.experiments.tune.space import Axis, check_values, declared_space, read_space
from mose_fast.experiments.tune.study import Study, import_optuna
from mose_fast.experiments.tune.trials import RunningTrial, TrialLoop
from mose_fast.learner.named_settings import dotted, with_absolute_paths, with_changes
from mose_fast.learner.registry import check_unchanged, method_files
from mose_fast.methods import find_method
from mose_fast.output import guarded_output
from mose_fast.runs.files import RunError, write_atomically
from mose_fast.runs.lock import FolderLock
from mose_fast.runs.store import RunDamaged, Store, read_run
from mose_fast.settings.knob import plain, whole_number
from mose_fast.settings.run import ConfigError, RunConfig, shown
from mose_fast.signals import StopRequest, stop_request

__all__ = ["Tuned", "tune"]

#: What a study evaluates on unless it is told another share.
_VALIDATION = {"evaluate_on": "validation", "stream.validation": 0.1}

_STUDY = "study.sqlite"


@guarded_output()
def tune(
    method: str,
    *,
    trials: int,
    out: str | Path,
    space: str | Path | None = None,
    seeds: Sequence[int] = (0, 1),
    changes: Mapping[str, Any] | None = None,
    place: Place | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> Tuned | None:
    """Searches settings of a method on held-out training images, and writes ``best.toml``, the
    table of the trials and plots. An unfinished study is continued.

    Args:
        method: Name of the method.
        trials: Number of trials in all, those of an earlier call included.
        out: The study's folder; each run gets a folder in it.
        space: A ``.toml`` or ``.json`` file with a table ``space``; None: the ranges that the
            method's settings declare.
        seeds: Seeds of the runs of each trial.
        changes: Settings of all runs, by dotted name.
        place: Where to compute.
        dry_run: Stop after the forecast and write nothing.
        say: Called with the forecast, a line for each trial, and the conclusions.

    Returns:
        What was found; None after a dry run.

    Raises:
        ConfigError: A setting or the space is unusable, or Optuna is missing; nothing has started.
        RunError: The folder is in use, holds another study, or cannot be written.
        NothingTuned: No trial came to its end.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP ended the study; the same call continues it.
    """
    import_optuna()
    trials, seeds = whole_number("trials", trials), tuple(map(plain, seeds))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds are {list(seeds)}; wanted at least one, and each once")
    changes = {**_VALIDATION, **(changes or {}), "method": plain(method)}
    if "seed" in changes:
        raise ConfigError(f"seed is set to {changes['seed']!r} for all trials; wanted --seeds")
    if changes["evaluate_on"] != "validation":
        raise ConfigError(
            f"evaluate_on is {shown(changes['evaluate_on'])}, but settings are chosen on held-out training images;"
            " wanted 'validation'"
        )
    axes = declared_space(method) if space is None else read_space(space, method)
    base = with_absolute_paths(check_values(axes, changes))
    check_unchanged(find_method(base.method))
    check_writable(base)
    place = place or Place()
    (cell,) = with_fingerprints([Cell("base", base, {})], place)
    study = _Tuning(cell.config, axes, seeds, trials, SweepFolder(out), place, say)
    if dry_run:
        with tempfile.TemporaryDirectory() as logs:
            study.plan(Path(logs), None).close()
        return None
    study.folder.create()
    lock = FolderLock(study.folder.path, "study")
    try:
        return study.run(lock.descriptor)
    finally:
        lock.release()


class _Tuning:
    """A study in progress."""

    def __init__(
        self,
        base: RunConfig,
        axes: Mapping[str, Axis],
        seeds: tuple[int, ...],
        trials: int,
        folder: SweepFolder,
        place: Place,
        say: Callable[[str], None],
    ) -> None:
        self.base, self.axes, self.seeds, self.folder, self.say = base, axes, seeds, folder, say
        self.numbers = range(trials)
        stored = self._stored()
        # A study keeps its number of workers: another number of threads would change the last
        # digits of the remaining results.
        if place.workers is None and stored.get("workers"):
            place = dataclasses.replace(place, workers=stored["workers"])
        cells = [self._cell(number, seed, {}) for number in self.numbers for seed in seeds]
        self.records = {cell.name: CellRecord(cell) for cell in cells}
        self.layout = Layout.of(cells, place)
        #: Trials that run at the same time. They are chosen together, by what earlier rounds found.
        self.together = stored.get("together") or max(1, self.layout.runs // len(seeds))
        earlier = stored["measured"] if stored.get("threads") == self.layout.threads else {}
        self.measured = {key: Cost(**cost) for key, cost in earlier.items()}

    def _described(self) -> dict[str, Any]:
        """What must be the same where a study is continued."""
        return {
            "space": {name: axis.described() for name, axis in self.axes.items()},
            "seeds": list(self.seeds),
            "settings": dotted(self.base.to_dict()),
            "method files": dict(method_files(find_method(self.base.method))),
        }

    def _stored(self) -> dict[str, Any]:
        """The plan in the folder; empty if there is none.

        Raises:
            RunError: The folder holds another study, or a sweep.
        """
        stored = self.folder.stored_plan()
        if not stored:
            return {}
        if "study" not in stored:
            raise RunError(f"{self.folder.path} holds a sweep, and no study; choose another --out")
        there, here = stored["study"], json.loads(json.dumps(self._described()))
        for what, wanted in here.items():
            found = there.get(what, {})
            if found != wanted:
                raise RunError(
                    f"the study in {self.folder.path} has other {what} ({_difference(found, wanted)}); continue it with"
                    " the same, or choose another --out"
                )
        return stored

    def _cell(self, number: int, seed: int, params: Mapping[str, Any]) -> Cell:
        config = dataclasses.replace(with_changes(self.base, params), seed=seed)
        return Cell(_name(number, seed), config, {**params, "seed": seed})

    def plan(self, logs: Path, lock: int | None) -> Engine:
        """Forecasts the study, says so, and makes the engine.

        Raises:
            ConfigError: The runs do not fit into the memory.
        """
        engine = self.layout.engine(self.folder.path, logs, lock)
        try:
            key = cost_key(self.base)
            if key not in self.measured:
                self.say("measuring the first steps of a run ...")
                self.measured |= measured_costs({key: self.base}, engine)
            costs = dict.fromkeys(self.records, self.measured[key])
            cells = [record.cell for record in self.records.values()]
            self.forecast = Forecast(cells, costs, self.layout.runs, self.layout.threads, available_bytes())
            if self.layout.place.engine == "local":
                self.forecast.check_memory()
            self.say(
                f"{len(self.numbers)} trials of {len(self.seeds)} seeds in {self.folder.path}, each run"
                f" {duration(self.measured[key].seconds)} with the method's own settings: at most about"
                f" {duration(self.forecast.seconds)} with {self.layout.runs} runs at a time"
            )
            for name, axis in self.axes.items():
                self.say(f"  {name}: {_shown(axis)}, by itself {shown(self._defaults()[name])}")
        except BaseException:
            engine.close()
            raise
        return engine

    def _defaults(self) -> dict[str, Any]:
        return {name: dotted(self.base.to_dict())[name] for name in self.axes}

    def run(self, lock: int) -> Tuned:
        """Runs the rounds, and draws the conclusions."""
        engine = self.plan(self.folder.logs, lock)
        try:
            self._write_plan()
            study = Study(self.folder.path / _STUDY, self.axes, self._defaults(), seed=0)
            display = Display(self.records, self.forecast)
            store = Store(self.folder.path)
            try:
                with stop_request() as stop:
                    for start in range(0, len(self.numbers), self.together):
                        self._round(study, start, engine, store, display, stop)
            finally:
                display.close()
        finally:
            engine.close()
        return conclude(study.trials[: len(self.numbers)], self.base, self.seeds, self.folder, self.say)

    def _write_plan(self) -> None:
        plan = {
            "workers": self.layout.runs if self.layout.device == "cpu" else None,
            "threads": self.layout.threads,
            "engine": self.layout.place.engine,
            "cells": {},
            "measured": {key: dataclasses.asdict(cost) for key, cost in self.measured.items()},
            "together": self.together,
            "study": self._described(),
        }
        write_atomically(self.folder.plan, json.dumps(plan, indent=1) + "\n")

    def _round(
        self, study: Study, start: int, engine: Engine, store: Store, display: Display, stop: StopRequest
    ) -> None:
        """Runs the trials of a round that have not ended yet."""
        numbers = self.numbers[start : start + self.together]
        while len(study.trials) < numbers.stop:
            study.ask(known=start)
        trials = []
        for trial in study.trials[start : numbers.stop]:
            if trial.state.is_finished():
                for seed in self.seeds:
                    self.records[_name(trial.number, seed)].state = CellState.DROPPED
                continue
            try:
                trials.append(self._prepared(trial))
            except ConfigError as error:  # values that do not go together
                study.tell(trial, [], None, pruned=False)
                display.say(f"trial {trial.number}: failed: {error}")
        records = {record.cell.name: record for running in trials for record in running.records}
        loop = TrialLoop(
            records, self.folder, engine, self.layout.threads, store, display, None, stop, trials, study, start
        )
        if not loop.run():
            stop.check()
        for running in trials:
            loop.judge(running)
            accuracies = [
                read_run(self.folder.run(record.cell.name))[0]["acc"]
                for record in running.records
                if record.state is CellState.DONE
            ]
            complete = running.stopped is None and len(accuracies) == len(self.seeds)
            result = sum(accuracies) / len(accuracies) if complete else None
            study.tell(running.trial, running.values, result, pruned=running.stopped is not None)
            found = f"ACC {100 * result:.1f}" if complete else "failed"
            found = found if running.stopped is None else f"stopped after task {running.stopped + 1}"
            values = ", ".join(f"{name.rpartition('.')[2]} {shown(v)}" for name, v in running.trial.params.items())
            display.say(f"trial {running.trial.number}: {found} ({values})")

    def _prepared(self, trial: Any) -> RunningTrial:
        """A trial with its runs, of which finished ones are found."""
        records = []
        for seed in self.seeds:
            cell = self._cell(trial.number, seed, trial.params)
            record = self.records[cell.name]
            record.cell = cell
            try:
                record.state = CellState.WAITING if self.folder.finished(cell) is None else CellState.DONE
            except RunDamaged as error:
                record.give_up(str(error), self.folder, self.layout.threads, show_log=False)
            self.folder.tidy([cell])
            write_atomically(self.folder.config(cell.name), cell.config.to_json())
            records.append(record)
        return RunningTrial(trial, records)


def _name(number: int, seed: int) -> str:
    """Name of a run's folder."""
    return f"trial-{number:03d}_seed-{seed}"


def _difference(there: Any, here: Any) -> str:
    if not isinstance(there, dict):
        return f"{there} there and {here} here"
    name = next(name for name in {**there, **here} if there.get(name) != here.get(name))
    return f"{name} is {shown(there.get(name))} there and {shown(here.get(name))} here"


def _shown(axis: Axis) -> str:
    if axis.search is None:
        return " | ".join(map(str, axis.choices))
    return f"{axis.search.low:g} to {axis.search.high:g}{', logarithmic' if axis.search.log else ''}"
