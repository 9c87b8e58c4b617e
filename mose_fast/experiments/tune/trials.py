"""Runs the trials of a round: a trial is one run for each seed, and hopeless ones are stopped."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mose_fast.experiments.cells import CellRecord
from mose_fast.experiments.dispatch import CellLoop
from mose_fast.experiments.experiment import Experiment
from mose_fast.experiments.protocol import Event
from mose_fast.experiments.tune.study import Study
from mose_fast.runs.files import RunFolder

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["RunningTrial", "TrialLoop"]


@dataclass
class RunningTrial:
    """A trial and its runs.

    Attributes:
        trial: The trial as the study has it.
        records: Its runs, one for each seed.
        stopped: The task after which it was found to be hopeless; None: it was not.
        values: Accuracy on the tasks seen after each task, mean over the seeds, as far as all runs
            have come; no further than ``stopped``.
    """

    trial: FrozenTrial
    records: Sequence[CellRecord]
    stopped: int | None = None
    values: list[float] = field(default_factory=list)


class TrialLoop(CellLoop):
    """The loop of a sweep, which also compares trials with earlier ones after every task.

    Args:
        experiment: The study's runs.
        trials: The trials of the round.
        study: The study.
        known: Number of earlier trials to compare with.
    """

    def __init__(self, experiment: Experiment, trials: Sequence[RunningTrial], study: Study, known: int) -> None:
        super().__init__(experiment, {r.cell.name: r for running in trials for r in running.records})
        self.trials, self.study, self.known = trials, study, known
        self.views: dict[str, list[str]] = {}

    def judge(self, running: RunningTrial) -> None:
        """Compares a trial, as far as its runs have come, and stops them if it is hopeless.

        The first task after which it is hopeless does not depend on when this is called.
        """
        if running.stopped is not None:
            return
        by_seed = [self._after_tasks(record.cell.name) for record in running.records]
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

    def _after_tasks(self, name: str) -> list[float]:
        """Mean accuracy of a run on the tasks seen after each task, as far as it has come."""
        files = RunFolder(self.folder.run(name))
        if name not in self.views and files.results.is_file():
            resolved = json.loads(files.results.read_text(encoding="utf-8"))["resolved"]
            self.views[name] = [resolved["classifier"], resolved["expert"]]
        if name not in self.views or not files.accuracy.is_file():
            return []
        after: dict[int, list[float]] = {}
        with files.accuracy.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if [row["classifier"], row["expert"]] == self.views[name]:
                    after.setdefault(int(row["after_task"]), []).append(float(row["accuracy"]))
        return [float(np.mean(after[task])) for task in sorted(after)]
