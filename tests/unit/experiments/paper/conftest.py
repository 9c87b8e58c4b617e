"""A stream of 8x8 digits whose runs take a fraction of a second, and an engine that computes in
this process.
"""

import copy
import dataclasses
import os
import signal
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mose_fast.experiments import sweep as scheduler
from mose_fast.experiments.step_cost import Cost
from mose_fast.experiments.worker import run_cell
from mose_fast.train import run
from tests.made_up import write_run
from tests.paths import SHARED

PAPER = SHARED / "paper" / "mose_cvpr2024.tex"


@pytest.fixture(autouse=True)
def always_one_thread(one_thread):
    """Of every test here."""


@pytest.fixture(scope="session")
def paper_text():
    """The paper's LaTeX; MOSE_FAST_TEST_PAPER names it where it does not lie beside the
    checkout.
    """
    path = Path(os.environ.get("MOSE_FAST_TEST_PAPER", PAPER))
    if not path.is_file():
        pytest.skip("no mose_cvpr2024.tex in MOSE_FAST_TEST_PAPER or beside the checkout")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """An .npz file of scikit-learn's digits in their own 8x8 pixels, ten classes."""
    data = load_digits()
    images = np.repeat((data.images * 255 / 16).round().astype(np.uint8)[..., None], 3, axis=3)
    test = np.arange(len(images)) % 9 == 0
    path = tmp_path_factory.mktemp("digits") / "digits8.npz"
    np.savez(path, x_train=images[~test], y_train=data.target[~test], x_test=images[test], y_test=data.target[test])
    return path


@pytest.fixture
def trial(digits):
    """Arguments of a trial: width 1, eight images for each of two tasks."""
    return ["--stream", str(digits), "--tasks", "2", "--width", "1", "--limit-per-task", "8", "--device", "cpu"]


class HereEngine:
    """Computes each run in this process when asked for events.

    Args:
        interrupt_in: Number of the run, from 0, in whose first batch Ctrl-C comes; None: never.
        break_in: Part of the names of cells that fail.
    """

    def __init__(self, interrupt_in=None, break_in=None):
        self.interrupt_in, self.break_in = interrupt_in, break_in
        self.waiting, self.started, self.resumed, self.measured = [], [], [], []

    def free(self):
        return 1 - len(self.waiting)

    def start(self, command):
        self.waiting.append(command)

    def events(self, timeout):
        if not self.waiting:
            return []
        command = self.waiting.pop()
        cell, found = command["cell"], []
        if command["do"] == "measure":
            self.measured.append(cell)
            cost = dataclasses.asdict(Cost(60.0, 10**6, None))
            return [{"event": "measured", "cell": cell, "cost": cost}, {"event": "done", "cell": cell}]
        if self.break_in is not None and self.break_in in cell:
            return [{"event": "failed", "cell": cell, "error": "broken on purpose"}]
        interrupted = self.interrupt_in == len(self.started)

        def emit(event):
            found.append({**event, "cell": cell})
            if interrupted and "view" not in event:
                # To the run, after its first batch, and to the sweep, when the run has ended.
                os.kill(os.getpid(), signal.SIGINT)

        if (Path(command["out"]) / "config.json").is_file():
            self.resumed.append(cell)
        self.started.append(cell)
        with open(command["log"], "w") as log, redirect_stderr(log):
            run_cell(command, emit)
        return found

    def stop(self):
        pass

    def close(self):
        pass


@pytest.fixture
def engine(monkeypatch):
    """A function that has sweeps compute in this process, and gives the engine."""

    def make(**how):
        made = HereEngine(**how)
        monkeypatch.setattr(scheduler._Sweep, "_engine", lambda self, logs, lock: made)
        return made

    return make


@pytest.fixture(scope="session")
def template():
    """The results of a real run; tests take copies."""
    return run(stream={"name": "digits", "limit_per_task": 4}, width=1, memory=64, device="cpu")


@pytest.fixture
def store(template):
    """A function that writes the folders of made-up runs of ten tasks.

    ``store(folder, cells, accuracy, seconds=...)``: ``accuracy(config, classifier, expert)`` gives
    the accuracy matrix, [10, 10] with zeros above the diagonal, of an expert from 1; on samples in
    the memory the accuracy is 1. The mean of the experts has the mean of their matrices.
    ``seconds(config)`` is the time of a run, a minute if it is not given.
    """

    def write(folder, cells, accuracy, seconds=lambda config: 60.0):
        for cell in cells:
            config, results = cell.config, copy.deepcopy(template)
            names = [str(e) for e in range(1, 1 + getattr(config.options, "experts", 1))]
            test = {}
            for classifier, mean in (("ncm", "mean_distance"), ("linear", "mean_logit")):
                test[classifier] = {name: np.array(accuracy(config, classifier, int(name))) for name in names}
                test[classifier][mean] = np.mean(list(test[classifier].values()), axis=0)
            stored = {classifier: {name: np.tri(10) for name in experts} for classifier, experts in test.items()}
            results["config"], results["resolved"]["expert"] = config.to_dict(), names[-1]
            results["seconds"]["total"] = seconds(config)
            results["untrained"]["acc"] = {c: dict.fromkeys(experts, 0.1) for c, experts in test.items()}
            after = [9] if config.train_on == "final_memory" else None
            write_run(folder.run(cell.name), results, test, stored, after)

    return write
