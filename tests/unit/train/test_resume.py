"""Runs that are killed and resumed end bit by bit where an unbroken run ends."""

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch

from mose_fast import _dali
from mose_fast.runs.checkpoint import latest
from mose_fast.runs.files import LOCK
from mose_fast.settings.run import RunConfig
from mose_fast.train import Listener, resume, run
from tests.unit.train.small import TWO_TASKS

# Steps are small, but wider than one channel: with one, all memory
# formats are the same.
SETTINGS = {**TWO_TASKS, "width": 4, "checkpoint_every": 3}
BATCHES = 12
VARIANTS = {
    "plain": {},
    "two epochs": {"epochs": 2},
    # Twelve batches fill the memory, then two passes of three batches each rehearse it.
    "final memory": {"train_on": "final_memory", "epochs": 2},
    "bf16": {"precision": "bf16"},
    "paper": {"preset": "paper"},
    "dali": {"feed": "dali"},
}
# Steps of the kills are random, but the same in every run of the tests.
RANDOM_STEPS = sorted(random.Random(0).sample(range(2, BATCHES + 1), 3))

# Children are forked from a server that has imported everything and computed nothing: quick, and
# without a parent's threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["mose_fast.train", "pytest", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure", "sklearn.datasets"]
)


def die(*ignored):
    os.kill(os.getpid(), signal.SIGKILL)


class Calls:
    """Passes calls on to a function and kills the process at one of them."""

    def __init__(self, function, number, counts=lambda *args: True):
        self.function, self.left, self.counts = function, number, counts

    def __call__(self, *args):
        if self.counts(*args):
            self.left -= 1
            if self.left == 0:
                die()
        return self.function(*args)


def is_checkpoint(source, target):
    return Path(target).name.startswith("step-")


def is_results(source, target):
    return Path(target).name == "results.json"


def child(out, variant, kill):
    """Runs or resumes in ``out``; ``kill`` names what kills this process, and at the how manieth
    time.
    """
    torch.set_num_threads(1)
    listener = Listener()
    if kill is not None:
        what, number = kill
        if what == "batch":
            listener.on_batch = Calls(lambda batch, losses: None, number, lambda batch, losses: True)
        elif what == "evaluation":
            listener.on_step = Calls(lambda: None, number)
        else:
            os.replace = Calls(os.replace, number, {"checkpoint": is_checkpoint, "results": is_results}[what])
    if (out / "config.json").exists():
        resume(out, listeners=[listener])
    else:
        run(RunConfig.create(**SETTINGS | VARIANTS[variant]), out=out, listeners=[listener])


def in_child(out, variant, kill=None):
    process = CONTEXT.Process(target=child, args=(out, variant, kill))
    process.start()
    process.join(120)
    assert process.exitcode == (0 if kill is None else -signal.SIGKILL)


def outcome(out):
    """All that must not depend on where a run was broken off.

    Nor on the commit, which may change while a developer tests.
    """
    results = json.loads((out / "results.json").read_text())
    for name in ("seconds", "resumed", "peak_memory_bytes", "commit"):
        del results[name]
    return results, (out / "accuracy.csv").read_bytes()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A function from a variant to the outcome of its unbroken run."""
    known = {}

    def result(variant):
        if variant not in known:
            out = tmp_path_factory.mktemp("unbroken") / "run"
            in_child(out, variant)
            known[variant] = outcome(out)
        return known[variant]

    return result


def check(out, variant, unbroken, resumed):
    in_child(out, variant)
    expected, got = unbroken(variant), outcome(out)
    assert got[0]["weights_sha256"] == expected[0]["weights_sha256"]
    assert got[0]["accuracy"] == expected[0]["accuracy"]
    assert got == expected
    assert json.loads((out / "results.json").read_text())["resumed"] == resumed
    assert not list(out.rglob(".*"))


@pytest.mark.parametrize("step", [1, *RANDOM_STEPS])
def test_killed_at_a_random_step(tmp_path, unbroken, step):
    out = tmp_path / "run"
    in_child(out, "plain", ("batch", step))
    # The kill comes before the checkpoint of the same batch.
    saved = step > 3
    assert (latest(out / "checkpoints") is not None) == saved
    check(out, "plain", unbroken, int(saved))


def test_killed_twice(tmp_path, unbroken):
    out = tmp_path / "run"
    in_child(out, "plain", ("batch", 5))
    in_child(out, "plain", ("batch", 7))
    check(out, "plain", unbroken, 2)


@pytest.mark.parametrize("call", [2, 5])
def test_killed_during_evaluation(tmp_path, unbroken, call):
    """A step for the memory, then two for a task's 360 test images; the fifth step is in the last
    task.
    """
    out = tmp_path / "run"
    in_child(out, "plain", ("evaluation", call))
    assert (out / "accuracy.csv").exists() == (call == 5)
    check(out, "plain", unbroken, 1)


@pytest.mark.parametrize(("file", "number"), [("checkpoint", 1), ("checkpoint", 4), ("results", 1)])
def test_killed_between_writing_a_file_and_its_renaming(tmp_path, unbroken, file, number):
    out = tmp_path / "run"
    in_child(out, "plain", (file, number))
    # Checkpoints: batches 3 and 6, the end of task 0, batch 9.
    assert len([path for path in out.rglob(".*") if path.name != LOCK]) == 1
    assert not (out / "results.json").exists()
    check(out, "plain", unbroken, int((file, number) != ("checkpoint", 1)))


@pytest.mark.parametrize(
    ("variant", "step"),
    [
        ("two epochs", 23),
        ("final memory", 17),
        ("bf16", 8),
        ("paper", 10),
        pytest.param("dali", 8, marks=pytest.mark.skipif(_dali.obstacle() is not None, reason="DALI is not installed")),
    ],
)
def test_variants(tmp_path, unbroken, variant, step):
    out = tmp_path / "run"
    in_child(out, variant, ("batch", step))
    check(out, variant, unbroken, 1)
    assert unbroken(variant)[0]["weights_sha256"] != unbroken("plain")[0]["weights_sha256"]
