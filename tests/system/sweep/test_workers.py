"""Real worker processes: killed at any moment nothing is lost, and every way to compute gives the
run that it would be alone.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import mose_fast
from mose_fast._build_info import build_info
from mose_fast.experiments import engine as engine_module
from mose_fast.experiments.engine import LocalEngine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.grid import grid_cells
from mose_fast.experiments.place import Place
from mose_fast.experiments.protocol import ENDS
from mose_fast.experiments.ray_engine import RayEngine
from mose_fast.experiments.sweep import run_grid
from mose_fast.learner.named_settings import with_changes
from mose_fast.runs.files import LOCK
from mose_fast.runs.lock import FolderLock, FolderLocked
from mose_fast.runs.store import read_store
from mose_fast.train import RunError, run
from tests.paths import ROOT

PACKAGE = Path(mose_fast.__file__).parent
SEEDS = (0, 1)
# Small batches, so that there are many moments to be interrupted at.
CHANGES = {
    "stream.tasks": 2,
    "stream.limit_per_task": 40,
    "stream.batch": 4,
    "width": 1,
    "memory": 64,
    "device": "cpu",
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def alone():
    """Weight hashes by seed of the runs alone, in this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches of 4 are not the preset's
        hashes = {seed: run(with_changes(None, {**CHANGES, "seed": seed}))["weights_sha256"] for seed in SEEDS}
    torch.set_num_threads(before)
    return hashes


SWEEP = (
    "sweep --width 1 --memory 64 --tasks 2 --limit-per-task 40 --batch 4 --checkpoint-every 2 --seeds 0-1 --device cpu"
)


def start_sweep(out):
    """With one worker: to start one takes most of the time here."""
    command = [sys.executable, "-m", "mose_fast", *SWEEP.split(), "--workers", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent
    )


def wait_for(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes_in(folder):
    """Ids of the processes that hold the sweep's lock file open: workers and their children."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(folder / LOCK) for file in process.open_files()):
                found.append(process.pid)
    return found


def has_checkpoints(out):
    return list(out.glob("seed-*/checkpoints/step-*"))


@pytest.mark.slow
def test_interrupted_killed_and_with_a_killed_worker_a_sweep_loses_nothing(tmp_path, alone):
    out = tmp_path / "s"
    sweep = start_sweep(out)
    wait_for(lambda: has_checkpoints(out) or sweep.poll() is not None)
    with pytest.raises(FolderLocked, match=f"process {sweep.pid} on {socket.gethostname()}"):
        FolderLock(out, "sweep")
    sweep.send_signal(signal.SIGINT)
    told = sweep.communicate()[0]
    assert sweep.returncode == 130, told
    assert "; to continue, run the same command again" in told
    assert not processes_in(out)
    assert len(list(out.glob("seed-*/results.json"))) < 2, "too late to have interrupted anything"

    sweep = start_sweep(out)
    wait_for(lambda: resumed(out) or sweep.poll() is not None)
    sweep.kill()
    sweep.communicate()
    wait_for(lambda: not processes_in(out), 15)
    assert len(list(out.glob("seed-*/results.json"))) < 2, "too late to have interrupted anything"

    before = resumed(out)
    sweep = start_sweep(out)
    wait_for(lambda: resumed(out) > before or sweep.poll() is not None)
    for process in processes_in(out):
        if process != sweep.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    told = sweep.communicate()[0]
    assert sweep.returncode == 0, told
    assert "it continues from its last checkpoint" in told
    assert "measuring" not in told
    table = read_store(out)
    assert dict(zip(table["seed"], table["weights_sha256"], strict=True)) == alone
    assert table["threads"].tolist() == [1, 1]
    assert (table["resumed"] >= 1).any()


def resumed(out):
    """How often runs have gone on from a checkpoint."""
    return sum(log.read_text().count("continued after batch") for log in out.glob("logs/seed-*.log"))


@pytest.fixture
def folder(tmp_path):
    made = SweepFolder(tmp_path / "s")
    made.create()
    return made


@pytest.fixture(scope="module")
def engine():
    """An engine with two workers, which start when they are needed."""
    with contextlib.closing(LocalEngine([None, None], threads=1)) as made:
        yield made


def commands(folder):
    for cell in grid_cells({"seed": SEEDS}, CHANGES):
        paths = {"config": folder.config(cell.name), "out": folder.run(cell.name), "log": folder.log(cell.name)}
        paths["config"].write_text(cell.config.to_json())
        command = {"do": "run", "cell": cell.name, "afresh": False, "wandb": None}
        yield command | {name: str(path) for name, path in paths.items()}


def until_ended(engine, number):
    """The last events of that many cells, by cell."""
    ended, deadline = {}, time.monotonic() + 120
    while len(ended) < number:
        assert time.monotonic() < deadline, f"waited in vain; so far {ended}"
        ended |= {event["cell"]: event for event in engine.events(0.2) if event["event"] in ENDS}
    return ended


@pytest.mark.slow
def test_a_run_that_cannot_start_fails_with_its_reason_in_the_log(folder, engine, tmp_path):
    command = next(commands(folder))
    missing = with_changes(None, {**CHANGES, "stream.name": str(tmp_path / "missing.npz")})
    Path(command["config"]).write_text(missing.to_json())
    engine.start(command)
    ended = until_ended(engine, 1)["seed-0"]
    assert ended["event"] == "failed"
    assert "missing.npz" in ended["error"]
    assert "missing.npz" in folder.log("seed-0").read_text()


@pytest.mark.slow
def test_one_run_is_stopped_and_the_other_goes_on(folder, engine, alone):
    other, stopped = commands(folder)
    engine.start(stopped)
    engine.start(other)
    wait_for(lambda: list(folder.path.glob("seed-1/checkpoints/step-*")))
    engine.stop("seed-1")
    ended = until_ended(engine, 2)
    assert {cell: event["event"] for cell, event in ended.items()} == {"seed-0": "done", "seed-1": "stopped"}
    results = json.loads((folder.run("seed-0") / "results.json").read_text())
    assert results["weights_sha256"] == alone[0] and results["resumed"] == 0
    assert not (folder.run("seed-1") / "results.json").exists()

    # As a cluster ends a job: every process gets the signal, or one of them.
    engine.start(stopped)
    process = next(worker.process for worker in engine.workers if worker.cell == "seed-1")
    wait_for(lambda: any(event["event"] == "progress" for event in engine.events(0.1)))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGHUP)
    assert until_ended(engine, 1)["seed-1"]["event"] == "stopped"
    assert process.wait(30) == 0


_RAY_TASK = """
import json, signal, sys
from mose_fast.experiments.ray_engine import _run_on_this_machine

class Queue:
    put = staticmethod(lambda event: print(json.dumps(event), flush=True))

signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray has it in its workers
_run_on_this_machine(json.loads(sys.argv[1]), 1, sys.argv[2], Queue)
"""


@pytest.mark.slow
def test_a_ray_task_that_is_ended_lets_its_run_write_a_checkpoint(folder):
    command = next(commands(folder))
    # Hundreds of batches before the checkpoint at the task's end.
    config = with_changes(None, CHANGES | {"checkpoint_every": None, "stream.limit_per_task": None, "stream.tasks": 1})
    Path(command["config"]).write_text(config.to_json())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    task = [sys.executable, "-c", _RAY_TASK, json.dumps(command), command["config"]]
    with subprocess.Popen(task, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "progress" and event["batch"] > 0:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)
    assert process.returncode == signal.SIGTERM
    assert len(list(folder.path.glob("seed-0/checkpoints/step-*"))) == 1
    assert not (folder.run("seed-0") / "results.json").exists()


def error_of_a_first_command():
    with contextlib.closing(LocalEngine([None], threads=1)) as engine:
        engine.start({"do": "measure", "cell": "seed-0", "config": {}})
        return until_ended(engine, 1)["seed-0"]["error"]


def test_a_worker_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('this is not torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = "a worker process said: ImportError: this is not torch, when it started"
    assert error_of_a_first_command() == said


@pytest.mark.slow
def test_a_worker_that_has_used_cuda_forks_no_run(monkeypatch):
    """Whoever asks PyTorch for GPUs, even in vain, has."""
    used = "import sys, torch; torch.cuda.is_available(); from mose_fast.experiments.worker import main; main()"
    monkeypatch.setattr(engine_module, "python", lambda module, *arguments: [sys.executable, "-c", used, *arguments])
    assert error_of_a_first_command() == "its worker had used CUDA before it forked, after which no run can"


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--engine", "ray", "--address", "local"]], ids=["local", "ray"])
def test_workers_import_what_the_sweep_imports_wherever_it_stands(tmp_path, alone, more):
    """A sweep with the installed package, in a clone without native library and with modules named
    like others; its runs are those that they are alone.
    """
    if more:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'mose-fast[ray]'")
    clone = tmp_path / "clone"
    shutil.copytree(PACKAGE, clone / "mose_fast", ignore=shutil.ignore_patterns("_C*", "_build.json", "__pycache__"))
    for name in ("torch", "queue"):
        (clone / f"{name}.py").write_text(f"raise ImportError('this is not {name}')\n")
    # As pip's script.
    script = tmp_path / "mose-fast"
    script.write_text("import sys\nfrom mose_fast.app.cli import main\nsys.exit(main())\n")
    command = [sys.executable, script, *SWEEP.split(), "--workers", "2", "--out", tmp_path / "s", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=clone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/results.json")]
    here = build_info()
    assert [run["native_backend"] for run in found] == [here["backend"]] * 2
    assert {run["commit"] is None for run in found} == {here["commit"] is None}
    assert {run["seed"]: run["weights_sha256"] for run in found} == alone


class RayOfTasks:
    """Ray whose tasks are numbers. They end when they are told to, and events are put by hand."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self):
        self.finished, self.events, self.errors = [], [], {}
        self.qsize = lambda: len(self.events)

    def wait(self, tasks, num_returns, timeout):
        return [task for task in tasks if task in self.finished], []

    def get(self, task):
        if task in self.errors:
            raise self.errors[task]

    def get_nowait_batch(self, count):
        found, self.events = self.events[:count], self.events[count:]
        return found


@pytest.fixture
def ray_engine():
    """An engine with one task, of the cell a."""
    engine = RayEngine.__new__(RayEngine)
    engine.ray = engine.queue = RayOfTasks()
    engine.runs, engine.running, engine.ended = 2, {1: "a"}, set()
    return engine


def test_a_ray_task_ends_its_own_start_of_a_cell_and_no_later_one(ray_engine):
    failed = {"event": "failed", "cell": "a", "error": "no room"}
    ray_engine.ray.events = [failed]
    assert ray_engine.events(0) == [failed]
    ray_engine.running[2] = "a"  # started again, while the first task still has its process to end
    ray_engine.ray.finished = [1]
    assert ray_engine.events(0) == [] and ray_engine.free() == 1
    ray_engine.ray.finished = [2]
    assert ray_engine.events(0) == [{"event": "died", "cell": "a", "signal": None}] and ray_engine.free() == 2


@pytest.mark.parametrize(
    ("cause", "event"),
    [
        (RunError("machine m does not see it"), {"event": "failed", "error": "machine m does not see it"}),
        (ImportError("a page\nthis is not torch"), {"event": "failed", "error": "ImportError: this is not torch"}),
        (None, {"event": "died", "signal": None}),
    ],
)
def test_a_ray_task_that_fails_says_why(ray_engine, cause, event):
    error = RuntimeError("a long traceback")
    error.cause = cause
    ray_engine.ray.finished, ray_engine.ray.errors = [1], {1: error}
    assert ray_engine.events(0) == [{**event, "cell": "a"}]


def test_unreachable_ray(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'mose-fast[ray]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(RunError, match=f"cannot reach a Ray cluster at {address}"):
            run_grid(grid_cells({"seed": SEEDS}, CHANGES), tmp_path / "s", Place(engine="ray", address=address))
    assert time.monotonic() - start < 10
