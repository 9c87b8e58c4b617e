"""A study: Optuna chooses the trials and when to stop one.

What it chooses is a function of the trial's number and the trials of earlier rounds alone, so that
a study that is killed continues to the same trials.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from mose_fast.experiments.tune.space import Axis
from mose_fast.runs.files import RunError
from mose_fast.settings.run import ConfigError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# Trials at random before the sampler models the others; trials before the pruner compares.
_RANDOM_TRIALS = 5
_COMPARED_TRIALS = 4


def import_optuna() -> Any:
    """Optuna; ConfigError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "tuning needs Optuna, which is not installed; first: pip install 'mose-fast[tune]'"
        ) from error
    optuna.logging.set_verbosity(logging.ERROR)  # it warns that an optional package is missing
    return optuna


class Study:
    """The trials of a study, kept in an SQLite file of Optuna's; RunError if it cannot be used.

    Args:
        defaults: The values that the method's settings have by themselves; the first trial's,
            where the space contains them.
    """

    def __init__(self, path: Path, axes: Mapping[str, Axis], defaults: Mapping[str, Any]) -> None:
        self.optuna = import_optuna()
        self.path, self.axes, self.defaults = path, axes, defaults
        self.distributions = {name: self._distribution(axis) for name, axis in axes.items()}
        # A URL could not hold every path.
        connect = {"creator": partial(sqlite3.connect, path, check_same_thread=False)}
        with self._file():
            self.record = self.optuna.create_study(
                storage=self.optuna.storages.RDBStorage(f"sqlite:///{path.name}", connect),
                study_name="mose-fast",
                direction="maximize",
                load_if_exists=True,
            )

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials so far, by number."""
        with self._file():
            return self.record.get_trials()

    @contextmanager
    def _file(self) -> Iterator[None]:
        """Names the file in the errors of using it."""
        from sqlalchemy.exc import SQLAlchemyError  # of Optuna's

        try:
            yield
        except (SQLAlchemyError, self.optuna.exceptions.StorageInternalError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            advice = {"locked": "end the program that holds it", "full": "free some space"}
            found = (what for word, what in advice.items() if word in str(cause))
            raise RunError(
                f"cannot use the file of the study's trials, {self.path}: {cause};"
                f" {next(found, 'move it away')}, then run the same command again, or choose another --out"
            ) from error

    def ask(self, known: int) -> FrozenTrial:
        """Chooses and records the next trial. ``known``: the number of earlier trials whose values
        count; later ones count as running.
        """
        number = len(self.trials)
        if number == 0 and all(axis.holds(self.defaults[name]) for name, axis in self.axes.items()):
            params = {name: self.defaults[name] for name in self.axes}
        else:
            params = self._sampled(number, known)
        # With its values at once: Optuna's own ask writes one after the other.
        with self._file():
            self.record.add_trial(self._trial(params))
        return self.trials[number]

    def hopeless(self, params: Mapping[str, Any], values: Sequence[float], known: int) -> int | None:
        """The first task after which the pruner stops a trial with these values; None: it does not.

        In the first half of the tasks it stops none: there, accuracies tell little of the final
        ones. After two tasks, one that has forgotten everything still has the half.

        Args:
            values: Accuracy after each of its tasks so far, of its best seed: a trial with some bad
                luck is not hopeless.
            known: Number of earlier trials to compare with.
        """
        complete = self._complete(known)
        if not complete:
            return None
        patience = len(complete[0].intermediate_values) // 2
        pruner = self.optuna.pruners.MedianPruner(_COMPARED_TRIALS, patience)
        study = self.optuna.create_study(direction="maximize")
        study.add_trials(self.trials[:known])
        # One value at a time: the pruner compares the best value so far, which is nearly always the
        # one after the first task.
        stopped = (task for task, v in enumerate(values) if pruner.prune(study, self._trial(params, {task: v})))
        return next(stopped, None)

    def tell(self, trial: FrozenTrial, values: Sequence[float], result: float | None, *, pruned: bool) -> None:
        """Records how a trial ended: its accuracy after each task, as far as it came, and the final
        one, None if it failed or was stopped.
        """
        states = self.optuna.trial.TrialState
        with self._file():
            running = self.optuna.trial.Trial(self.record, trial._trial_id)
            for task, value in enumerate(values):
                running.report(value, task)
            if result is not None:
                self.record.tell(trial.number, result)
            else:
                self.record.tell(trial.number, state=states.PRUNED if pruned else states.FAIL)

    def _sampled(self, number: int, known: int) -> dict[str, Any]:
        # A sampler of its own for each trial, so that what it draws depends on nothing else. It
        # models the values by a Gaussian process: in a dozen noisy trials it finds more than TPE.
        study = self.optuna.create_study(direction="maximize")
        study.sampler = self.optuna.samplers.GPSampler(n_startup_trials=_RANDOM_TRIALS, seed=number)
        study.add_trials([self._trial(t.params, value=self._expected(t, known)) for t in self.trials[:known]])
        study.add_trials([self._trial(trial.params) for trial in self.trials[known:]])
        return study.ask(self.distributions).params

    def _complete(self, known: int) -> list[FrozenTrial]:
        return [t for t in self.trials[:known] if t.state is self.optuna.trial.TrialState.COMPLETE]

    def _expected(self, trial: FrozenTrial, known: int) -> float:
        """The final accuracy that the sampler takes a trial to have, since it knows no stopped and
        failed ones. Of a stopped one: as if it had changed from there on as the complete ones did;
        of a failed one: the worst.
        """
        complete, states = self._complete(known), self.optuna.trial.TrialState
        if trial.state is states.COMPLETE or not complete:
            return trial.value or 0.0
        if trial.state is not states.PRUNED:
            return min(other.value for other in complete)
        last = trial.last_step
        return trial.intermediate_values[last] + mean(t.value - t.intermediate_values[last] for t in complete)

    def _trial(
        self, params: Mapping[str, Any], values: Mapping[int, float] | None = None, value: float | None = None
    ) -> FrozenTrial:
        """A trial with these values after some tasks; running, unless it has a final one."""
        states = self.optuna.trial.TrialState
        return self.optuna.trial.create_trial(
            state=states.RUNNING if value is None else states.COMPLETE,
            value=value,
            params=dict(params),
            distributions=self.distributions,
            intermediate_values=dict(values or {}),
        )

    def _distribution(self, axis: Axis) -> Any:
        kinds = self.optuna.distributions
        if axis.search is None:
            return kinds.CategoricalDistribution(axis.choices)
        low, high, log, _ = axis.search
        if axis.setting.type == "int":
            step = 1 if log else axis.setting.multiple
            return kinds.IntDistribution(low, high, log=log, step=step)
        return kinds.FloatDistribution(low, high, log=log)
