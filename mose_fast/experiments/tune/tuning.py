"""Tunes the settings of a method: rounds of trials, and what they leave.

A study can be killed at any moment; the same call continues it to the same trials.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mose_fast.experiments.cells import CellRecord, CellState
from mose_fast.experiments.experiment import Experiment, with_fingerprints
from mose_fast.experiments.folder import SweepFolder, first_difference
from mose_fast.experiments.forecast import Forecast, duration
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

#: What a study evaluates on unless it is told another share.
_VALIDATION = {"evaluate_on": "validation", "stream.validation": 0.1}


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
    return _Tuning(cell.config, axes, seeds, trials, SweepFolder(out), place, say).carry_out(dry_run=dry_run)


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
        cells = [[self._cell(number, seed, {}) for seed in seeds] for number in self.numbers]
        super().__init__([cell for trial in cells for cell in trial], folder, place, say)
        self.identity = {
            "space": {name: axis.described() for name, axis in axes.items()},
            "seeds": list(seeds),
            "settings": dotted(base.to_dict()),
            "method files": dict(method_files(find_method(base.method))),
        }
        self._check_stored()
        #: Of each trial, by seed.
        self.runs = [[CellRecord(cell) for cell in trial] for trial in cells]
        self.records = {record.cell.name: record for records in self.runs for record in records}
        self.defaults = {name: self.identity["settings"][name] for name in axes}

    def _check_stored(self) -> None:
        """Refuses a folder that holds another study, or a sweep."""
        if not self.stored:
            return
        if "study" not in self.stored:
            raise RunError(f"{self.folder.path} holds a sweep, and no study; choose another --out")
        for what, wanted in json.loads(json.dumps(self.identity)).items():
            found = self.stored["study"].get(what, {})
            if found != wanted:
                named = isinstance(found, dict)
                differing = first_difference(found, wanted) if named else f"{found} there and {wanted} here"
                raise RunError(
                    f"the study in {self.folder.path} has other {what} ({differing}); continue it with the same, or"
                    " choose another --out"
                )

    def described(self) -> dict[str, Any]:
        return {"cells": {}, "together": self.together, "study": self.identity}

    def _cell(self, number: int, seed: int, params: Mapping[str, Any]) -> Cell:
        config = dataclasses.replace(with_changes(self.base, params), seed=seed)
        return Cell(f"trial-{number:03d}_seed-{seed}", config, {**params, "seed": seed})

    def plan(self) -> Forecast:
        forecast = super().plan()
        # Trials that run at the same time are chosen together, by what earlier rounds found.
        self.together = self.stored.get("together") or max(1, self.layout.runs // len(self.seeds))
        (a_run,) = {cost.seconds for cost in forecast.costs.values()}
        self.say(
            f"{len(self.numbers)} trials of {len(self.seeds)} seeds in {self.folder.path}, each run {duration(a_run)}"
            f" with the method's own settings: at most about {duration(forecast.seconds)} with {self.layout.runs} runs"
            " at a time"
        )
        for name, axis in self.axes.items():
            self.say(f"  {name}: {axis}, by itself {shown(self.defaults[name])}")
        return forecast

    def compute(self) -> None:
        self.study = Study(self.folder.path / "study.sqlite", self.axes, self.defaults)
        for start in range(0, len(self.numbers), self.together):
            self._round(start)

    def conclude(self) -> Tuned:
        trials = self.study.trials[: len(self.numbers)]
        rows: dict[int, list[dict[str, Any]]] = {}
        for trial in trials:
            for record in self.runs[trial.number] if trial.state.name == "COMPLETE" else []:
                # A trial that had ended before this call has not been read yet.
                row = record.row or read_run(self.folder.run(record.cell.name))[0]
                rows.setdefault(trial.number, []).append({**row, "folder": record.cell.name})
        return conclude(trials, rows, self.base, self.seeds, self.folder, self.say)

    def _round(self, start: int) -> None:
        """Runs the trials of a round that have not ended yet."""
        numbers = self.numbers[start : start + self.together]
        while len(self.study.trials) < numbers.stop:
            self.study.ask(known=start)
        self.earlier, self.trials = start, []
        for trial in self.study.trials[start : numbers.stop]:
            if trial.state.is_finished():
                for record in self.runs[trial.number]:
                    record.state = CellState.DROPPED
                continue
            try:
                self.trials.append(self._prepared(trial))
            except ConfigError as error:  # values that do not go together
                self.study.tell(trial, [], None, pruned=False)
                self.display.say(f"trial {trial.number}: failed: {error}")
        self.run_cells([record for running in self.trials for record in running.records])
        for running in self.trials:
            self._judge(running)
            accuracies = [record.row["acc"] for record in running.records if record.state is CellState.DONE]
            complete = running.stopped is None and len(accuracies) == len(self.seeds)
            result = sum(accuracies) / len(accuracies) if complete else None
            self.study.tell(running.trial, running.values, result, pruned=running.stopped is not None)
            found = f"ACC {100 * result:.1f}" if complete else "failed"
            found = found if running.stopped is None else f"stopped after task {running.stopped + 1}"
            values = ", ".join(f"{name.rpartition('.')[2]} {shown(v)}" for name, v in running.trial.params.items())
            self.display.say(f"trial {running.trial.number}: {found} ({values})")

    def _prepared(self, trial: FrozenTrial) -> _Trial:
        """A trial with its runs, of which finished ones are found."""
        for record, seed in zip(self.runs[trial.number], self.seeds, strict=True):
            record.cell = self._cell(trial.number, seed, trial.params)
            self.find_done(record)
            write_atomically(self.folder.config(record.cell.name), record.cell.config.to_json())
        return _Trial(trial, self.runs[trial.number])

    def on_event(self, record: CellRecord, event: Event) -> None:
        super().on_event(record, event)
        if "view" in event or event["event"] in ("task", "done"):
            self._judge(next(running for running in self.trials if record in running.records))

    def _judge(self, running: _Trial) -> None:
        """Compares a trial with earlier ones, as far as its runs have come, and stops them if it is
        hopeless. The first task after which it is does not depend on when this is called.
        """
        if running.stopped is not None:
            return
        after = list(zip(*map(self._after_tasks, running.records), strict=False))
        running.values = [float(np.mean(values)) for values in after]
        running.stopped = self.study.hopeless(running.trial.params, [*map(max, after)], self.earlier)
        if running.stopped is not None:
            running.values = running.values[: running.stopped + 1]
            for record in running.records:
                self.drop(record)

    def _after_tasks(self, record: CellRecord) -> list[float]:
        """Mean accuracy of a run on the tasks seen after each task, as far as it has come."""
        file = RunFolder(self.folder.run(record.cell.name)).accuracy
        view = (record.row["classifier"], record.row["expert"]) if record.row else record.progress.get("view")
        if view is None or not file.is_file():
            return []
        after: dict[int, list[float]] = defaultdict(list)
        with file.open(encoding="utf-8", newline="") as rows:
            for row in csv.DictReader(rows):
                if (row["classifier"], row["expert"]) == view:
                    after[int(row["after_task"])].append(float(row["accuracy"]))
        return [float(np.mean(after[task])) for task in sorted(after)]
