"""What a run may delete, and who may work in its folder."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mose_fast.runs.files import LOCK
from mose_fast.runs.lock import FolderLock, FolderLocked
from mose_fast.settings.run import RunConfig
from mose_fast.train import Interrupted, Listener, RunError, resume, run
from tests.listeners import StopAt
from tests.paths import ROOT

CONFIG = RunConfig.create(stream={"name": "digits", "limit_per_task": 2}, width=1, memory=64, device="cpu")


def contents(folder):
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    run(CONFIG, out=out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


FOREIGN = {
    "a config of something else": {
        "config.json": '{"learning_rate": 1}',
        "checkpoints/thesis.pt": "years",
        "tensorboard/mine": "curves",
    },
    "a broken config": {"config.json": '{"method": "mose", '},
    "results alone": {"results.json": "{}"},
    "checkpoints alone": {"checkpoints/step-000000001.safetensors": "not a run's"},
    "events alone": {"tensorboard/events.out.tfevents.1.host": "another program's"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_overwrite_refuses_a_folder_whose_files_no_run_wrote(tmp_path, files):
    write(tmp_path, files)
    before = contents(tmp_path)
    says = f"{tmp_path} holds {next(iter(files))}.*, but no config.json of a run of mose-fast.*nothing was deleted"
    with pytest.raises(RunError, match=says):
        run(CONFIG, out=tmp_path, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_run_killed_while_it_wrote_its_configuration_begins_again(tmp_path):
    code = """
import os, signal, sys
from mose_fast.settings.run import RunConfig
from mose_fast.train import run
def kill(event, arguments):
    if event == "os.rename" and "config.json" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
stream = {"name": "digits", "limit_per_task": 2}
run(RunConfig.create(stream=stream, width=1, memory=64, device="cpu"), out=sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    (unfinished,) = tmp_path.glob(".config.json.*")
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, unfinished.name, "checkpoints"}
    run(CONFIG, out=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "file", ["notes.txt", ".results.json.abcd1234", "checkpoints/mine", ".config.json.mine", "tensorboard/mine"]
)
def test_any_other_file_makes_a_folder_used(tmp_path, file):
    write(tmp_path, {".config.json.abcd1234": "{", file: "mine"})
    with pytest.raises(RunError, match="is already used; choose another --out, pass --overwrite"):
        run(CONFIG, out=tmp_path)
    assert (tmp_path / file).read_text() == "mine"


@pytest.mark.slow
def test_overwrite_leaves_what_lies_between_the_files_of_a_run(copy):
    mine = {
        "checkpoints/thesis.pt": "years",
        "checkpoints/step-best.safetensors": "chosen",
        "tensorboard/mine": "curves",
        "notes.txt": "notes",
        "checkpoints/old/step-000000001.safetensors": "kept",
        ".results.json.backup": "kept",
    }
    write(copy, mine)
    (old,) = (copy / "tensorboard").glob("events.*")
    (copy / ".results.json.ab0_xyz9").touch()  # what a killed write leaves
    (copy / "checkpoints" / ".step-000000007.safetensors.ab0_xyz9").touch()
    results = run(CONFIG, out=copy, overwrite=True)
    after = contents(copy)
    assert {name: after[name].decode() for name in mine} == mine
    assert not old.exists()
    assert {name for name in after if "xyz9" in name} == set()
    assert results == json.loads((copy / "results.json").read_text())


def test_a_file_beside_the_checkpoints_is_neither_resumed_nor_deleted(tmp_path):
    with pytest.raises(Interrupted):
        run(CONFIG, out=tmp_path, listeners=[StopAt(3)])
    write(tmp_path, {f"checkpoints/step-{name}.safetensors": "mine" for name in ("best", "00000000", "a-copy")})
    resume(tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir() if path.read_bytes() == b"mine"} == {
        "step-best.safetensors",
        "step-00000000.safetensors",
        "step-a-copy.safetensors",
    }


def test_the_configuration_is_there_at_every_moment_of_an_overwrite(copy, monkeypatch):
    """So that a folder whose replacing was killed is still known as a run's."""
    unlink, missing = Path.unlink, []

    def watched(path, missing_ok=False):
        unlink(path, missing_ok=missing_ok)
        missing.append(not (copy / "config.json").exists())

    monkeypatch.setattr(Path, "unlink", watched)
    run(CONFIG, out=copy, overwrite=True)
    assert missing and not any(missing)


class Meddler(Listener):
    """Starts other work in the folder of a run that is going on."""

    def __init__(self, out):
        self.out, self.refused = out, []

    def on_batch(self, batch, losses):
        if batch == 1:
            again = lambda: run(CONFIG, out=self.out, overwrite=True)  # noqa: E731
            for work in (again, lambda: resume(self.out), lambda: FolderLock(self.out, "sweep")):
                with pytest.raises(FolderLocked) as error:
                    work()
                self.refused.append(str(error.value))


def test_a_folder_is_held_while_a_run_works_in_it(tmp_path):
    meddler = Meddler(tmp_path)
    results = run(CONFIG, out=tmp_path, listeners=[meddler])
    says = f"a run already works in {tmp_path} (process {os.getpid()} on {socket.gethostname()}); wait until it ends"
    assert len(meddler.refused) == 3
    assert all(message.startswith(says) for message in meddler.refused)
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert not (tmp_path / LOCK).exists()


def test_a_failed_run_lets_go(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(CONFIG, out=tmp_path, listeners=[StopAt(1, ZeroDivisionError)])
    resume(tmp_path)


def in_another_process(code, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = (
        "import os, sys; from pathlib import Path; from mose_fast.runs.lock import FolderLock; folder ="
        f" Path(sys.argv[1]); {code}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_holder_lets_go(tmp_path):
    holder = in_another_process(
        'lock = FolderLock(folder, "run"); print("held", flush=True); __import__("signal").pause()', tmp_path
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(FolderLocked, match=f"a run already works in {tmp_path} \\(process {holder.pid} on"):
        FolderLock(tmp_path, "export")
    holder.kill()
    holder.communicate()
    assert (tmp_path / LOCK).exists()
    held = f"an export already works in {tmp_path} \\(process {os.getpid()} on"
    with FolderLock(tmp_path, "export"), pytest.raises(FolderLocked, match=held):
        FolderLock(tmp_path, "run")
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_was_taken_away_in_between_is_not_held(tmp_path, monkeypatch):
    """Its holder deletes the file after another process opened it: two could then hold two files of
    the same name.
    """
    first = FolderLock(tmp_path, "run")
    flock = fcntl.flock

    def late(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.remove()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second = FolderLock(tmp_path, "run")
    with pytest.raises(FolderLocked):
        FolderLock(tmp_path, "run")
    second.remove()


def test_a_file_system_without_locks_is_told_and_a_living_holder_refused(tmp_path, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(
        UserWarning, match=r"has no file locks \(No locks available\); nothing keeps a second run, sweep or export out"
    ):
        FolderLock(tmp_path, "run").release()
    note = {"process": os.getppid(), "machine": socket.gethostname(), "work": "sweep"}
    (tmp_path / LOCK).write_text(json.dumps(note))
    with pytest.raises(FolderLocked, match=f"a sweep already works in {tmp_path} \\(process {os.getppid()} on"):
        FolderLock(tmp_path, "run")
