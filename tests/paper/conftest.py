"""A stream of 8x8 digits whose runs take a fraction of a second, and an engine that computes in
this process.
"""

import dataclasses
import os
import signal
import threading
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from mose_fast.sweep import scheduler
from mose_fast.sweep.measure import Cost
from mose_fast.sweep.worker import run_cell

PAPER = Path(__file__).resolve().parents[3] / "shared" / "paper" / "mose_cvpr2024.tex"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    """Arguments of a trial: width 8, 20 images for each of two tasks."""
    return ["--stream", str(digits), "--tasks", "2", "--width", "8", "--limit-per-task", "20", "--device", "cpu"]


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
        stop = threading.Event()
        if self.interrupt_in == len(self.started):
            os.kill(os.getpid(), signal.SIGINT)
            stop.set()
        if (Path(command["out"]) / "config.json").is_file():
            self.resumed.append(cell)
        self.started.append(cell)
        with open(command["log"], "w") as log, redirect_stderr(log):
            run_cell(command, lambda event: found.append({**event, "cell": cell}), stop, [])
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
