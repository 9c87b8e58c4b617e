"""One small finished run, copies of it that pass for runs of other settings, and an engine that
makes them.
"""

import dataclasses
import json
import os
import shutil

import pytest
import torch

from mose_fast.experiments import sweep as scheduler
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.step_cost import Cost
from mose_fast.settings.run import RunConfig
from mose_fast.train import run

SETTINGS = {"stream": {"name": "digits", "limit_per_task": 20}, "width": 1, "memory": 64, "device": "cpu"}


@pytest.fixture(autouse=True)
def always_one_thread(one_thread, monkeypatch):
    """Of every test here, and of every run that a sweep starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def settings():
    return SETTINGS


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A run folder; not to be written to."""
    out = tmp_path_factory.mktemp("finished") / "run"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run(RunConfig.create(**SETTINGS), out=out)
    torch.set_num_threads(before)
    return out


@pytest.fixture
def pretend(finished_run):
    """A function that makes ``out`` look like the finished run of ``config``."""

    def copy(out, config):
        out.mkdir(parents=True, exist_ok=True)
        for name in ("results.json", "accuracy.csv"):
            shutil.copy(finished_run / name, out)
        results = json.loads((out / "results.json").read_text())
        results |= {"config": config.to_dict(), "seed": config.seed}
        (out / "results.json").write_text(json.dumps(results))
        (out / "config.json").write_text(config.to_json())

    return copy


class PretendEngine:
    """Ends each command at once, as ``script`` says: a list by cell of what its attempts come to,
    ``done`` when it is used up.
    """

    def __init__(self, pretend, script=None, cost=None):
        self.pretend, self.script = pretend, script or {}
        self.cost = cost or Cost(60.0, 10**9, None)
        self.commands, self.waiting, self.ending, self.stopped, self.closed = [], [], [], False, False

    def free(self):
        return 2 - len(self.waiting) - len(self.ending)

    def start(self, command):
        self.commands.append(command)
        self.waiting.append(command)

    def events(self, timeout):
        if self.ending:
            return [self.ending.pop()]
        command = self.waiting.pop(0)
        cell = command["cell"]
        if command["do"] == "measure":
            return [
                {"event": "measured", "cell": cell, "cost": dataclasses.asdict(self.cost)},
                {"event": "done", "cell": cell},
            ]
        outcome = self.script.get(cell, [])
        what = outcome.pop(0) if outcome else {"event": "done"}
        if callable(what):
            what = what(command)
        config = RunConfig.load(command["config"])
        out = SweepFolder(os.path.dirname(command["out"])).run(cell)
        if what["event"] == "done":
            self.pretend(out, config)
        else:
            out.mkdir(exist_ok=True)
            (out / "config.json").write_text(config.to_json())
        self.ending.append({**what, "cell": cell})
        return [{"event": "progress", "cell": cell, "batch": 1, "batches": 2}]

    def stop(self, cell=None):
        self.stopped = True

    def close(self):
        self.closed = True

    @property
    def runs(self):
        return [command for command in self.commands if command["do"] == "run"]


@pytest.fixture
def engine(pretend, monkeypatch):
    """A function that puts a pretended engine in the place of the real one."""

    def make(script=None, cost=None):
        made = PretendEngine(pretend, script, cost)
        monkeypatch.setattr(scheduler._Sweep, "_engine", lambda self, logs, lock: made)
        return made

    return make
