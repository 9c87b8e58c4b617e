"""Tunes the settings of a method: rounds of trials, and what they leave.

A study can be killed at any moment; the same call continues it to the same trials.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mose_fast.experiments.cells import CellRecord, CellState
from mose_fast.experiments.dispatch import CellLoop
from mose_fast.experiments.experiment import Experiment, with_fingerprints
from mose_fast.experiments.folder import SweepFolder, first_difference
from mose_fast.experiments.forecast import Forecast, cost_key, duration, measured_costs
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.place import Place
from mose_fast.experiments.protocol import Event
from mose_fast.experiments.tune.outcome import Tuned, check_writable, conclude
from mose_fast.experiments.tune.space import Axis, check_values, declared_space, read_space
from mose_fast.experiments.tune.study import Study, import_optuna
from mose_fast.learner.named_settings import dotted, with_absolute_paths, with_changes
from mose_fast.learner.registry import check_unchanged, method_files
from mose_fast.methods import find_method
from mose_fast.output import guarded_output
from mose_fast.runs.files import RunError, RunFolder, write_atomically
from mose_fast.runs.store import read_run
from mose_fast.settings.knob import plain, whole_number
from mose_fast.settings.run import ConfigError, RunConfig, shown

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

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
        trials: Number of trials in all, those of an earlier call included.
        space: A ``.toml`` or ``.json`` file with a table ``space``; None: the ranges that the
            method's settings declare.
        dry_run: Stop after the forecast and write nothing.

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
        study.dry_run()
        return None
    with study.locked() as lock:
        return study.run(lock)


class _Tuning(Experiment):
    """A study in progress."""

    kind = "study"

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
        self.base, self.axes, self.seeds, self.numbers = base, axes, seeds, range(trials)
        cells = [self._cell(number, seed, {}) for number in self.numbers for seed in seeds]
        super().__init__(cells, folder, place, say)
        self._check_stored()
        self.records = {cell.name: CellRecord(cell) for cell in cells}
        #: Trials that run at the same time. They are chosen together, by what earlier rounds found.
        self.together = self.stored.get("together") or max(1, self.layout.runs // len(seeds))
        values = dotted(base.to_dict())
        self.defaults = {name: values[name] for name in axes}

    def _described(self) -> dict[str, Any]:
        """What must be the same where a study is continued."""
        return {
            "space": {name: axis.described() for name, axis in self.axes.items()},
            "seeds": list(self.seeds),
            "settings": dotted(self.base.to_dict()),
            "method files": dict(method_files(find_method(self.base.method))),
        }

    def _check_stored(self) -> None:
        """Refuses a folder that holds another study, or a sweep."""
        if not self.stored:
            return
        if "study" not in self.stored:
            raise RunError(f"{self.folder.path} holds a sweep, and no study; choose another --out")
        for what, wanted in json.loads(json.dumps(self._described())).items():
            found = self.stored["study"].get(what, {})
            if found != wanted:
                named = isinstance(found, dict)
                differing = first_difference(found, wanted) if named else f"{found} there and {wanted} here"
                raise RunError(
                    f"the study in {self.folder.path} has other {what} ({differing}); continue it with the same, or"
                    " choose another --out"
                )

    def described(self) -> dict[str, Any]:
        return {"cells": {}, "together": self.together, "study": self._described()}

    def _cell(self, number: int, seed: int, params: Mapping[str, Any]) -> Cell:
        config = dataclasses.replace(with_changes(self.base, params), seed=seed)
        return Cell(_name(number, seed), config, {**params, "seed": seed})

    def plan(self) -> Forecast:
        key = cost_key(self.base)
        if key not in self.measured:
            self.say("measuring the first steps of a run ...")
            self.measured |= measured_costs({key: self.base}, self.engine)
        forecast = self.forecast_of(dict.fromkeys(self.records, self.measured[key]))
        if self.layout.place.engine == "local":
            forecast.check_memory()
        self.say(
            f"{len(self.numbers)} trials of {len(self.seeds)} seeds in {self.folder.path}, each run"
            f" {duration(self.measured[key].seconds)} with the method's own settings: at most about"
            f" {duration(forecast.seconds)} with {self.layout.runs} runs at a time"
        )
        for name, axis in self.axes.items():
            self.say(f"  {name}: {_shown(axis)}, by itself {shown(self.defaults[name])}")
        return forecast

    def run(self, lock: int) -> Tuned:
        """Runs the rounds, and draws the conclusions."""
        with self.running(lock):
            study = Study(self.folder.path / _STUDY, self.axes, self.defaults, seed=0)
            for start in range(0, len(self.numbers), self.together):
                self._round(study, start)
        trials = study.trials[: len(self.numbers)]
        return conclude(trials, self._rows_of, self.base, self.seeds, self.folder, self.say)

    def _rows_of(self, number: int) -> list[dict[str, Any]]:
        """The rows of the store of a trial's finished runs, by seed."""
        found = []
        for name in (_name(number, seed) for seed in self.seeds):
            # A trial that had ended before this call has not been read yet.
            row = self.records[name].row or read_run(self.folder.run(name))[0]
            found.append({**row, "folder": name})
        return found

    def _round(self, study: Study, start: int) -> None:
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
                self.display.say(f"trial {trial.number}: failed: {error}")
        loop = _TrialLoop(self, trials, study, start)
        if not loop.run():
            self.stop.check()
        for running in trials:
            loop.judge(running)
            accuracies = [record.row["acc"] for record in running.records if record.state is CellState.DONE]
            complete = running.stopped is None and len(accuracies) == len(self.seeds)
            result = sum(accuracies) / len(accuracies) if complete else None
            study.tell(running.trial, running.values, result, pruned=running.stopped is not None)
            found = f"ACC {100 * result:.1f}" if complete else "failed"
            found = found if running.stopped is None else f"stopped after task {running.stopped + 1}"
            values = ", ".join(f"{name.rpartition('.')[2]} {shown(v)}" for name, v in running.trial.params.items())
            self.display.say(f"trial {running.trial.number}: {found} ({values})")

    def _prepared(self, trial: Any) -> _Trial:
        """A trial with its runs, of which finished ones are found."""
        records = []
        for seed in self.seeds:
            cell = self._cell(trial.number, seed, trial.params)
            record = self.records[cell.name]
            record.cell = cell
            record.find_done(self.folder, self.layout.threads)
            write_atomically(self.folder.config(cell.name), cell.config.to_json())
            records.append(record)
        return _Trial(trial, records)


@dataclass
class _Trial:
    """A trial and its runs.

    Attributes:
        stopped: The task after which it was found to be hopeless; None: it was not.
        values: Accuracy on the tasks seen after each task, mean over the seeds, as far as all runs
            have come; no further than ``stopped``.
    """

    trial: FrozenTrial
    records: Sequence[CellRecord]
    stopped: int | None = None
    values: list[float] = field(default_factory=list)


class _TrialLoop(CellLoop):
    """The loop of a sweep, which also compares trials with earlier ones after every task.

    Args:
        known: Number of earlier trials to compare with.
    """

    def __init__(self, experiment: Experiment, trials: Sequence[_Trial], study: Study, known: int) -> None:
        super().__init__(experiment, {r.cell.name: r for running in trials for r in running.records})
        self.trials, self.study, self.known = trials, study, known
        self.views: dict[str, list[str]] = {}

    def judge(self, running: _Trial) -> None:
        """Compares a trial, as far as its runs have come, and stops them if it is hopeless.

        The first task after which it is hopeless does not depend on when this is called.
        """
        if running.stopped is not None:
            return
        by_seed = [self._after_tasks(record) for record in running.records]
        after = list(zip(*by_seed, strict=False))
        running.values = [float(np.mean(values)) for values in after]
        running.stopped = self.study.hopeless(running.trial.params, [*map(max, after)], self.known)
        if running.stopped is not None:
            running.values = running.values[: running.stopped + 1]
            for record in running.records:
                self.drop(record.cell.name)

    def _on_event(self, record: CellRecord, event: Event) -> None:
        super()._on_event(record, event)
        if "view" in event:
            self.views[record.cell.name] = event["view"]
        if "view" in event or event["event"] in ("task", "done"):
            self.judge(next(running for running in self.trials if record in running.records))

    def _after_tasks(self, record: CellRecord) -> list[float]:
        """Mean accuracy of a run on the tasks seen after each task, as far as it has come."""
        file = RunFolder(self.folder.run(record.cell.name)).accuracy
        if record.row is not None:
            self.views[record.cell.name] = [record.row["classifier"], record.row["expert"]]
        view = self.views.get(record.cell.name)
        if view is None or not file.is_file():
            return []
        after: dict[int, list[float]] = {}
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                if [row["classifier"], row["expert"]] == view:
                    after.setdefault(int(row["after_task"]), []).append(float(row["accuracy"]))
        return [float(np.mean(after[task])) for task in sorted(after)]


def _name(number: int, seed: int) -> str:
    """Name of a run's folder."""
    return f"trial-{number:03d}_seed-{seed}"


def _shown(axis: Axis) -> str:
    if axis.search is None:
        return " | ".join(map(str, axis.choices))
    return f"{axis.search.low:g} to {axis.search.high:g}{', logarithmic' if axis.search.log else ''}"
