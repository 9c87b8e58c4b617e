"""What a study chooses: the same trials, however often it is interrupted; and which it stops."""

import math
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.forecast import cost_key
from mose_fast.experiments.place import Place
from mose_fast.experiments.step_cost import Cost
from mose_fast.experiments.tune.space import Axis
from mose_fast.experiments.tune.study import Study
from mose_fast.experiments.tune.tuning import _Tuning
from mose_fast.learner.named_settings import all_settings, with_changes
from mose_fast.runs.files import RunError
from mose_fast.settings.knob import Search

KNOWN = all_settings("er")
AXES = {
    "options.lr": Axis(KNOWN["options.lr"], Search(1e-4, 0.1, True)),
    "options.buffer_batch": Axis(KNOWN["options.buffer_batch"], Search(4, 32)),
    "options.augment": Axis(KNOWN["options.augment"], choices=("ocm", "none")),
}
DEFAULTS = {"options.lr": 1e-3, "options.buffer_batch": 10, "options.augment": "ocm"}


def result(params):
    """An accuracy that is best at a learning rate of 0.02 without augmentation."""
    return 0.9 - 0.1 * abs(math.log10(params["options.lr"] / 0.02)) - 0.1 * (params["options.augment"] == "ocm")


def search(path, trials, together=1, reopen=()):
    """Runs a study of made-up accuracies; opens it anew after the asks and tells in ``reopen``."""
    study, events = Study(path, AXES, DEFAULTS), 0

    def event():
        nonlocal study, events
        events += 1
        if events in reopen:
            study = Study(path, AXES, DEFAULTS)

    for start in range(0, trials, together):
        numbers = range(start, min(start + together, trials))
        while len(study.trials) < numbers.stop:
            study.ask(known=start)
            event()
        for number in numbers:
            trial = study.trials[number]
            if trial.state.is_finished():
                continue
            values = [1.0, result(trial.params) + 0.1, result(trial.params)]
            stopped = study.hopeless(trial.params, values, start)
            value = None if number == 3 or stopped is not None else values[-1]  # the fourth fails
            study.tell(trial, values if stopped is None else values[: stopped + 1], value, pruned=stopped is not None)
            event()
    return [(t.params, t.state.name, t.value, t.intermediate_values) for t in study.trials]


@pytest.mark.slow
@pytest.mark.parametrize(("together", "trials"), [(1, 9), (3, 12)])
def test_an_interrupted_study_has_the_same_trials(tmp_path, together, trials):
    whole = search(tmp_path / "a", trials, together)
    assert search(tmp_path / "b", trials, together, reopen=(1, 2, 5, 8, 12, 13, 14, 17, 22)) == whole
    assert {state for _, state, _, _ in whole} == {"COMPLETE", "PRUNED", "FAIL"}
    assert len({str(params) for params, *_ in whole}) == trials


def test_more_trials_continue_as_if_there_had_been_as_many_from_the_start(tmp_path):
    whole = search(tmp_path / "a", 7, together=3)
    assert search(tmp_path / "b", 5, together=3) == whole[:5]
    assert search(tmp_path / "b", 7, together=3) == whole


def test_the_first_trial_has_the_methods_own_settings_where_the_space_holds_them(tmp_path):
    assert search(tmp_path / "a", 1)[0][0] == DEFAULTS
    axes = AXES | {"options.lr": Axis(KNOWN["options.lr"], Search(0.01, 0.1, True))}
    study = Study(tmp_path / "b", axes, DEFAULTS)
    assert 0.01 <= study.ask(known=0).params["options.lr"] <= 0.1


def test_a_file_that_cannot_be_used_is_named_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "study.sqlite"
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, timeout=0))  # it waits five seconds
    study = Study(path, AXES, DEFAULTS)
    trial = study.ask(known=0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        uses = (
            lambda: Study(path, AXES, DEFAULTS),
            lambda: study.trials,
            lambda: study.ask(known=0),
            lambda: study.tell(trial, [0.5], 0.5, pruned=False),
        )
        for use in uses:
            with pytest.raises(
                RunError, match=rf"^cannot use .* {path}: database is locked; end the program that holds"
            ):
                use()
    study.tell(trial, [0.5], 0.5, pruned=False)
    assert [t.value for t in study.trials] == [0.5]
    path.write_text("no database at all")
    with pytest.raises(RunError, match=rf"^cannot use .* {path}: file is not a database; move it away, then run"):
        Study(path, AXES, DEFAULTS)


@pytest.mark.slow
def test_it_finds_what_is_good(tmp_path):
    trials = search(tmp_path / "a", 16)
    best = max((value, params["options.lr"], params["options.augment"]) for params, state, value, _ in trials if value)
    assert best[0] > 0.85 and best[2] == "none"
    late = [params["options.augment"] for params, *_ in trials[8:]]
    assert late.count("none") > len(late) / 2


def test_a_trial_is_stopped_after_the_first_task_that_shows_it_worse_than_the_median(tmp_path):
    """Accuracies fall from task to task, so the best one so far says nothing."""
    study = Study(tmp_path / "a", AXES, DEFAULTS)
    for final in (0.6, 0.7, 0.8, 0.9):
        study.tell(study.ask(known=0), [1.0, 0.5, final + 0.05, final], final, pruned=False)
    assert study.hopeless(DEFAULTS, [0.2, 0.1], 4) is None  # the first half of the tasks stops nothing
    assert study.hopeless(DEFAULTS, [1.0, 0.5, 0.81, 0.76], 4) is None
    assert study.hopeless(DEFAULTS, [1.0, 0.5, 0.79], 4) == 2
    assert study.hopeless(DEFAULTS, [1.0, 0.5, 0.79, 0.9], 4) == 2
    assert study.hopeless(DEFAULTS, [1.0, 0.5, 0.81, 0.5], 4) == 3
    assert study.hopeless(DEFAULTS, [1.0, 0.1, 0.1, 0.1], 3) is None  # of too few to compare with
    assert study.hopeless(DEFAULTS, [], 4) is None


def test_the_sampler_takes_a_stopped_trial_to_change_as_the_others_did(tmp_path):
    study = Study(tmp_path / "a", AXES, DEFAULTS)
    for values, pruned in (([1.0, 0.8, 0.6], False), ([0.9, 0.5, 0.5], False), ([0.4, 0.3], True), ([0.9], False)):
        failed = len(values) == 1
        study.tell(study.ask(known=0), values, None if pruned or failed else values[-1], pruned=pruned)
    expected = [study._expected(trial, 4) for trial in study.trials]
    assert expected == pytest.approx([0.6, 0.5, 0.3 - (0.2 + 0.0) / 2, 0.5])


class TwoTasksOfThree:
    """An engine whose runs have poor accuracies in two tasks and go on until they are stopped."""

    def __init__(self):
        self.waiting, self.running = [], []

    def free(self):
        return 2 - len(self.running)

    def start(self, command):
        out = Path(command["out"])
        out.mkdir()
        (out / "accuracy.csv").write_text(
            "classifier,expert,after_task,accuracy\nncm,1,0,0.4\nncm,1,1,0.2\nncm,1,1,0.3\nlinear,1,1,0.9\n"
        )
        self.running.append(command["cell"])
        self.waiting.append({"event": "progress", "batch": 0, "batches": 9, "view": ("ncm", "1")})
        self.waiting.append({"event": "task", "task": 1, "tasks": 3, "what": "task", "accuracy": 0.25})
        self.waiting[-2:] = [{**event, "cell": command["cell"]} for event in self.waiting[-2:]]

    def events(self, timeout):
        assert self.waiting, "the runs are not stopped"
        found, self.waiting = self.waiting, []
        return found

    def stop(self, cell):
        self.running.remove(cell)

    def close(self):
        pass


def test_runs_of_a_hopeless_trial_are_stopped(tmp_path, monkeypatch):
    folder, engine, told = SweepFolder(tmp_path / "s"), TwoTasksOfThree(), []
    folder.create()
    settings = {"method": "er", "memory": 64, "device": "cpu", "stream.tasks": 3}
    base = with_changes(None, {**settings, "stream.validation": 0.1, "evaluate_on": "validation"})
    earlier = Study(folder.path / "study.sqlite", AXES, DEFAULTS)
    for final in (0.6, 0.7, 0.8, 0.9):
        earlier.tell(earlier.ask(known=0), [1.0, 0.8, final], final, pruned=False)
    monkeypatch.setattr(_Tuning, "_engine", lambda self, logs, lock: engine)
    monkeypatch.setattr(_Tuning, "conclude", lambda self: self.study.trials[4])
    monkeypatch.setattr(
        "mose_fast.experiments.experiment.measured_costs", lambda *_: {cost_key(base): Cost(1.0, 1, None)}
    )
    trial = _Tuning(base, AXES, (0, 1), 5, folder, Place(workers=1), told.append).carry_out()
    assert engine.running == [] and trial.state.name == "PRUNED"
    assert trial.intermediate_values == {0: 0.4, 1: 0.25}
