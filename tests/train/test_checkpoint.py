"""Checkpoint files: round trip, refusals that say why, failures of the disk."""

import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from mose_fast.train.checkpoint import CheckpointError, latest, load_checkpoint, save_checkpoint
from mose_fast.train.files import RunError, write_atomically

TENSORS = {
    "network/weight": torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "network/batches": torch.tensor(7),
    "memory/images": torch.arange(96, dtype=torch.uint8).reshape(2, 4, 4, 3),
    "memory/labels": torch.tensor([-1, 2**62]),
    "adam/tiny": torch.tensor([1e-45, -0.0, 3.14], dtype=torch.float32),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
}
VALUES = {"position": {"task": 3, "done": 2**40}, "records": [0.1, None, "Ä"], "seconds": 1e-300}


def test_round_trip(tmp_path):
    tensors, values = load_checkpoint(save_checkpoint(tmp_path, 5, TENSORS, VALUES))
    assert values == VALUES
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert torch.signbit(tensors["adam/tiny"][1])


def test_training_on_does_not_change_the_file(tmp_path):
    path = save_checkpoint(tmp_path, 5, TENSORS, VALUES)
    before = path.read_bytes()
    tensors, _ = load_checkpoint(path)
    for tensor in tensors.values():
        tensor.fill_(1)
    del tensors
    assert path.read_bytes() == before


def test_the_newest_two_are_kept(tmp_path):
    assert latest(tmp_path) is None
    for step in (9, 10, 99, 100):
        save_checkpoint(tmp_path, step, TENSORS, {"step": step})
    assert latest(tmp_path) == tmp_path / "step-000000100.safetensors"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000099.safetensors", "step-000000100.safetensors"]
    assert load_checkpoint(tmp_path / "step-000000099.safetensors")[1] == {"step": 99}


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def foreign(name, sprung):
    """Contents of a file that is no checkpoint."""
    if name == "safetensors of another program":
        return save({"weight": torch.ones(3)}, {"format": "pt"})
    if name == "safetensors without metadata":
        return save({"weight": torch.ones(3)})
    if name == "random bytes":
        return torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy().tobytes()
    if name == "pickle":
        return pickle.dumps(Trap(sprung))
    if name == "torch.save":
        torch.save({"model": Trap(sprung)}, sprung.with_suffix(".pt"))
        return sprung.with_suffix(".pt").read_bytes()
    if name == "torch.save of old":
        torch.save({"model": Trap(sprung)}, sprung.with_suffix(".pt"), _use_new_zipfile_serialization=False)
        return sprung.with_suffix(".pt").read_bytes()
    tensors = {"weight": torch.ones(3)}
    if name == "values cut":
        return save(tensors, {"mose_fast_checkpoint": "1", "values": '{"position": {"ta'})
    if name == "values missing":
        return save(tensors, {"mose_fast_checkpoint": "1"})
    assert name == "format no number"
    return save(tensors, {"mose_fast_checkpoint": "one", "values": "{}"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("safetensors of another program", "is a safetensors file, but not a checkpoint of mose-fast"),
        ("safetensors without metadata", "is a safetensors file, but not a checkpoint of mose-fast"),
        ("random bytes", "is truncated, damaged or no checkpoint at all"),
        ("pickle", "is truncated, damaged or no checkpoint at all"),
        ("torch.save", "is truncated, damaged or no checkpoint at all"),
        ("torch.save of old", "is truncated, damaged or no checkpoint at all"),
        ("values cut", "is damaged: its header is unreadable"),
        ("values missing", "is damaged: its header is unreadable"),
        ("format no number", "is damaged: its header is unreadable"),
    ],
)
def test_foreign_files_are_refused_and_nothing_is_executed(tmp_path, name, says):
    good = save_checkpoint(tmp_path, 4, TENSORS, VALUES)
    bad, sprung = tmp_path / "step-000000005.safetensors", tmp_path / "sprung"
    bad.write_bytes(foreign(name, sprung))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(bad)
    assert f"{bad} {says}" in str(error.value)
    assert f"the one before it is {good}: delete {bad.name} to continue from there" in str(error.value)
    assert not sprung.exists()
    assert load_checkpoint(good)[1] == VALUES


def test_the_trap_works(tmp_path):
    """Without this the test above could not fail on an unpickling reader."""
    pickle.loads(foreign("pickle", tmp_path / "sprung"))
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20, 400, -97, -1])
def test_truncated_files_are_refused(tmp_path, length):
    good = save_checkpoint(tmp_path, 4, TENSORS, VALUES)
    bad = save_checkpoint(tmp_path, 5, TENSORS, VALUES)
    bad.write_bytes(bad.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"step-000000005.safetensors is truncated, damaged or no checkpoint at all") as error:
        load_checkpoint(bad)
    assert f"the one before it is {good}" in str(error.value)
    assert load_checkpoint(good)[1] == VALUES


def test_newer_format_is_refused(tmp_path):
    path = tmp_path / "step-000000005.safetensors"
    save_file({"other": torch.ones(1)}, path, {"mose_fast_checkpoint": "2", "values": json.dumps({"unknown": 1})})
    with pytest.raises(CheckpointError, match=r"has format 2, newer than 1, .* update mose-fast"):
        load_checkpoint(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-000000005.safetensors"):
        load_checkpoint(tmp_path / "step-000000005.safetensors")


@pytest.mark.parametrize("function", ["fsync", "replace", "chmod"])
def test_failed_write_leaves_the_old_files(tmp_path, monkeypatch, function):
    for step in (3, 4):
        save_checkpoint(tmp_path, step, TENSORS, VALUES)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*args, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, function, full)
        with pytest.raises(RunError, match=r"cannot write .*step-000000005.safetensors .*: No space left on device; .* untouched"):
            save_checkpoint(tmp_path, 5, TENSORS, VALUES)
        with pytest.raises(RunError, match=r"step-000000004.safetensors"):
            write_atomically(tmp_path / "step-000000004.safetensors", "new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_atomically(path, "old")

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


def test_real_write_failure_leaves_the_old_file(tmp_path):
    """The kernel refuses to let the file grow, as on a full disk."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    path = tmp_path / "results.json"
    path.write_text("old")
    script = "\n".join(
        [
            "from pathlib import Path",
            "from mose_fast.train.files import write_atomically",
            f"write_atomically(Path({str(path)!r}), 'x' * 10**6)",
        ]
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], preexec_fn=limit, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert "RunError: cannot write" in ended.stderr
    assert "File too large" in ended.stderr
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_files_have_the_rights_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "accuracy.csv", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "accuracy.csv").stat().st_mode & 0o777 == 0o640
