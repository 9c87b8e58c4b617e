"""Runs, exports and sweeps that are killed at random points end, once they go on, in the results of
unbroken ones.

Points are counted: batches, steps of evaluations, every file that is opened, renamed, made or
deleted below the folder, and every word from a sweep's workers. MOSE_FAST_KILL_POINTS says how many
are tried; the points are drawn from a seed.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time

import psutil
import pytest
import torch

from mose_fast.app.cli import main
from mose_fast.experiments.engine import LocalEngine
from mose_fast.export import CARD
from mose_fast.runs.files import LOCK
from mose_fast.runs.progress import Progress
from mose_fast.runs.store import read_store

POINTS = int(os.environ.get("MOSE_FAST_KILL_POINTS", "12"))
# Few in sweeps, whose workers import torch each time.
NUMBERS = {"run": POINTS - POINTS // 4 - POINTS // 8, "export": POINTS // 4, "sweep": POINTS // 8}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
DRAWN = random.Random(11)
CASES = {kind: [(DRAWN.random(), SIGNALS[i % 3]) for i in range(number)] for kind, number in NUMBERS.items()}

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "mose_fast.train",
        "mose_fast.export",
        "mose_fast.experiments.sweep",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "matplotlib.figure",
    ]
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Points:
    """Counts what happens in this process, and sends it a signal before one of these things.

    Args:
        folder: Only files below it count.
        at: Number of the point, from 1; None: count alone.
        number: Of the signal.
    """

    def __init__(self, folder, at, number):
        self.folder, self.at, self.number, self.passed = str(folder), at, number, 0
        sys.addaudithook(self.on_audit)
        for owner, name in ((Progress, "on_batch"), (Progress, "on_step"), (LocalEngine, "events")):
            setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, function):
        def call(*arguments, **settings):
            found = function(*arguments, **settings)
            for _ in found if function.__name__ == "events" else [None]:
                self.on_point()
            return found

        return call

    def on_audit(self, event, arguments):
        if event in ("os.rename", "os.remove", "os.mkdir", "os.chmod") or (
            event == "open" and (arguments[2] or 0) & WRITING
        ):
            path = arguments[0]
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder):
                self.on_point()

    def on_point(self):
        self.passed += 1
        if self.passed == self.at:
            os.kill(os.getpid(), self.number)


def child(folder, arguments, at, number, say):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    points = Points(folder, at, number)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        code = main(arguments)
    say.send(points.passed)
    os._exit(code)


def call(folder, arguments, at=None, number=None):
    """Runs a command in a child; returns its exit code and how many points it passed, None where it
    was killed.
    """
    listen, say = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(folder, arguments, at, number, say))
    process.start()
    say.close()
    process.join(240)
    passed = None
    with contextlib.suppress(EOFError):
        passed = listen.recv() if listen.poll() else None
    return process.exitcode, passed


@pytest.fixture(scope="module")
def settings(two_tasks_of_six):
    return [*two_tasks_of_six, "--checkpoint-every", "2"]


def result(folder):
    """All that must not depend on where a run was broken off.

    Nor on the commit, which may change while a developer tests.
    """
    results = json.loads((folder / "results.json").read_text())
    for name in ("seconds", "resumed", "peak_memory_bytes", "commit"):
        del results[name]
    return (
        results,
        (folder / "accuracy.csv").read_text(),
        sorted(p.name for p in folder.rglob("*") if "tfevents" not in p.name),
    )


def export(folder):
    card = json.loads((folder / CARD).read_text())
    del card["run"]["commit"]
    return card, sorted(p.name for p in folder.iterdir())


def sweep(folder):
    table = read_store(folder)
    own = [
        column
        for column in table
        if column not in ("resumed", "finished_at", "results_sha256", "commit_id", "peak_bytes")
    ]
    own = [column for column in own if not column.startswith("seconds")]
    return (
        table[own].astype(object).where(table[own].notna(), None).to_dict("records"),  # nan is not nan
        [result(folder / name) for name in table["folder"]],
        [p.name for p in folder.rglob(".*")],
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, settings):
    """For each kind: what makes and continues it in a folder, what it comes to, and how many points
    it has.
    """
    finished = tmp_path_factory.mktemp("run") / "run"
    commands = {
        "run": (lambda out: ["run", *settings, "--out", str(out)], lambda out: ["resume", str(out)], result),
        "export": (*[lambda out: ["export", str(finished), "--out", str(out)]] * 2, export),
        "sweep": (
            *[lambda out: ["sweep", *settings, "--seeds", "0-1", "--workers", "1", "--out", str(out)]] * 2,
            sweep,
        ),
    }
    known = {}

    def of(kind):
        if kind not in known:
            if kind == "export":
                of("run")
            begin, go_on, outcome = commands[kind]
            out = finished if kind == "run" else tmp_path_factory.mktemp(kind) / kind
            code, passed = call(out, begin(out))
            assert code == 0
            known[kind] = begin, go_on, outcome, outcome(out), passed
        return known[kind]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place", "number"), [(kind, *case) for kind, cases in CASES.items() for case in cases]
)
def test_killed_anywhere_and_continued(tmp_path, unbroken, kind, place, number):
    begin, go_on, outcome, expected, points = unbroken(kind)
    assert points > 10
    out = tmp_path / kind
    at = 1 + int(place * points)
    code, _ = call(out, begin(out), at, number)
    # After its last batch a run does what it has begun.
    assert code in ((-signal.SIGKILL,) if number == signal.SIGKILL else (128 + number, 0)) or (
        kind == "sweep" and code == 0
    )
    deadline = time.monotonic() + 60
    while kind == "sweep" and number == signal.SIGKILL and holders(out):
        assert time.monotonic() < deadline, "workers of a killed sweep still live"
        time.sleep(0.05)
    if kind != "run":
        code, _ = call(out, go_on(out)) if kind == "sweep" or outcome_is_missing(out) else (0, None)
    elif not (out / "results.json").exists():
        # Killed before its configuration was written, it is begun again: there is nothing of it
        # that could be lost.
        code, _ = call(out, (go_on if (out / "config.json").exists() else begin)(out))
    else:
        code = 0
    assert code == 0
    found = outcome(out)
    left = [path for path in out.rglob(".*") if path.name != LOCK]
    assert not left
    if kind != "sweep" and (out / LOCK).exists():  # ended after its results, it let go by dying
        found[-1].remove(LOCK)
    assert found == expected


def outcome_is_missing(out):
    return not (out / CARD).exists() or "unfinished" in json.loads((out / CARD).read_text())


def holders(folder):
    """Ids of the processes that hold the lock of a folder, or of one below it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            files = [file.path for file in process.open_files()]
            found += [process.pid for path in files if path.startswith(str(folder)) and path.endswith(LOCK)]
    return found
