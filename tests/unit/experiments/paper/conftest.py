"""A stream of 8x8 digits whose runs take a fraction of a second, and an engine that computes in
this process.
"""

import copy
import dataclasses
import json
import os
import signal
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mose_fast import evaluate
from mose_fast.experiments import sweep as scheduler
from mose_fast.experiments.step_cost import Cost
from mose_fast.experiments.worker import run_cell
from mose_fast.runs.results import accuracy_csv
from mose_fast.train import run
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
            config = cell.config
            results = copy.deepcopy(template)
            results["config"], results["seed"] = config.to_dict(), config.seed
            results["classes"], results["tasks"] = 20, [[2 * t, 2 * t + 1] for t in range(10)]
            after = [9] if config.train_on == "final_memory" else list(range(10))
            results["evaluated_after"] = after
            names = [str(e) for e in range(1, 1 + getattr(config.options, "experts", 1))]
            test, buffer = {}, {}
            for classifier, mean in (("ncm", "mean_distance"), ("linear", "mean_logit")):
                matrices = {name: np.array(accuracy(config, classifier, int(name)), float) for name in names}
                matrices[mean] = np.mean(list(matrices.values()), axis=0)
                ones = np.tri(10)
                test[classifier] = {e: [m[k, : k + 1].tolist() for k in after] for e, m in matrices.items()}
                buffer[classifier] = {e: [ones[k, : k + 1].tolist() for k in after] for e in matrices}
                found = {
                    "accuracy": lambda m: m.tolist(),
                    "buffer_accuracy": lambda m: np.tri(10).tolist(),
                    "bof": lambda m: evaluate.buffer_overfitting(np.ones(10), m[-1]).tolist(),
                    "new_task_accuracy": lambda m: evaluate.new_task_accuracy(m).tolist(),
                    "acc": evaluate.average_accuracy,
                    "af_paper": evaluate.forgetting_paper,
                    "af_released": evaluate.forgetting_released,
                    "bwt": evaluate.backward_transfer,
                    "average_anytime_accuracy": evaluate.average_anytime_accuracy,
                }
                for name, metric in found.items():
                    results[name][classifier] = {e: metric(m) for e, m in matrices.items()}
            results["seconds"]["total"] = seconds(config)
            results["untrained"]["acc"], results["resolved"]["expert"] = results["acc"], names[-1]
            path = folder.run(cell.name)
            path.mkdir(parents=True)
            (path / "results.json").write_text(json.dumps(results))
            (path / "config.json").write_text(json.dumps(results["config"]))
            (path / "accuracy.csv").write_text(accuracy_csv(test, buffer, after))

    return write
