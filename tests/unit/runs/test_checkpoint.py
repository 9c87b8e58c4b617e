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
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load, save, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from mose_fast.runs import checkpoint as checkpoint_module
from mose_fast.runs.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    Snapshot,
    latest,
    load_checkpoint,
    save_checkpoint,
)
from mose_fast.runs.files import RunError, write_atomically
from mose_fast.settings.run import RunConfig
from mose_fast.state_file import serialised
from mose_fast.train import loop as loop_module
from mose_fast.train import run
from tests.paths import ROOT

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


def test_files_are_those_of_safetensors():
    metadata = {"a": "b", "Ä": "\n"}
    file = serialised(TENSORS, metadata).tobytes()
    found, wanted = load(file), load(save({name: tensor.contiguous() for name, tensor in TENSORS.items()}, metadata))
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted)
    size = int.from_bytes(file[:8], "little")
    assert json.loads(file[8 : 8 + size])["__metadata__"] == metadata
    # Where a file is mapped into memory, each tensor must start at a multiple of its element.
    header = json.loads(file[8 : 8 + size])
    assert size % 8 == 0 and all(
        header[name]["data_offsets"][0] % TENSORS[name].element_size() == 0 for name in TENSORS
    )
    assert load(serialised({}, metadata).tobytes()) == {}


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
    if name == "safetensors without metadata":
        return save({"weight": torch.ones(3)})
    if name == "pickle":
        return pickle.dumps(Trap(sprung))
    if name == "torch.save":
        torch.save({"model": Trap(sprung)}, sprung.with_suffix(".pt"))
        return sprung.with_suffix(".pt").read_bytes()
    tensors = {"weight": torch.ones(3)}
    if name == "no hash":
        return save(tensors, {"mose_fast_checkpoint": "1", "values": json.dumps(VALUES)})
    assert name == "format no number"
    return save(tensors, {"mose_fast_checkpoint": "one", "values": "{}"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("safetensors without metadata", "is a safetensors file, but not a checkpoint of mose-fast"),
        ("pickle", "is truncated, damaged or not a checkpoint"),
        ("torch.save", "is truncated, damaged or not a checkpoint"),
        ("no hash", "is damaged: its header is unreadable"),
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


@pytest.mark.parametrize("length", [0, 20, -1])
def test_truncated_files_are_refused(tmp_path, length):
    good = save_checkpoint(tmp_path, 4, TENSORS, VALUES)
    bad = save_checkpoint(tmp_path, 5, TENSORS, VALUES)
    bad.write_bytes(bad.read_bytes()[:length])
    with pytest.raises(
        CheckpointError, match=r"step-000000005.safetensors is truncated, damaged or not a checkpoint"
    ) as error:
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
        with pytest.raises(
            RunError, match=r"cannot write .*step-000000005.safetensors .*: No space left on device; .* untouched"
        ):
            save_checkpoint(tmp_path, 5, TENSORS, VALUES)
        with pytest.raises(RunError, match=r"step-000000004.safetensors"):
            write_atomically(tmp_path / "step-000000004.safetensors", "new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


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
            "from mose_fast.runs.files import write_atomically",
            f"write_atomically(Path({str(path)!r}), 'x' * 10**6)",
        ]
    )
    ended = subprocess.run([sys.executable, "-c", script], preexec_fn=limit, capture_output=True, text=True, cwd=ROOT)
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


# A copy of the state


def views() -> dict[str, torch.Tensor]:
    """Tensors as learners have them: views of common buffers with gaps between them, and some of
    their own.
    """
    buffer, counts = torch.arange(400, dtype=torch.float32), torch.arange(6)
    return {
        "weight": buffer.as_strided((2, 3, 2, 2), (12, 1, 6, 3), 64),  # channels_last
        "bias": buffer[128:135],
        "row": buffer.view(20, 20)[17],
        "column": buffer.view(20, 20)[:, 3],
        "step": counts[4],
        "steps": counts[1:3],
        **TENSORS,
    }


def test_a_snapshot_is_a_copy_with_the_same_strides():
    tensors = views()
    wanted = {name: (tensor.clone(), tensor.stride()) for name, tensor in tensors.items()}
    snapshot = Snapshot(tensors)
    # float32, int64, uint8 and bfloat16.
    assert len(snapshot.flats) == 4
    for tensor in tensors.values():
        tensor.fill_(0)
    found = snapshot.tensors()
    assert list(found) == list(wanted)
    for name, (tensor, strides) in wanted.items():
        assert (
            found[name].dtype == tensor.dtype and found[name].stride() == strides and torch.equal(found[name], tensor)
        ), name
    assert snapshot.not_finite() is None and list(Snapshot({}).tensors()) == []
    assert list(snapshot.on_host().tensors()) == list(wanted)


@pytest.mark.parametrize(
    ("name", "value"), [("weight", float("nan")), ("column", float("inf")), ("half", -float("inf"))]
)
def test_a_snapshot_names_what_is_not_finite(name, value):
    tensors = {other: tensor.clone(memory_format=torch.preserve_format) for other, tensor in views().items()}
    tensors[name][(-1,) * tensors[name].dim()] = value
    assert Snapshot(tensors).not_finite() == name


class Launches(TorchDispatchMode):
    """Counts what a GPU would have to launch or copy: all but views of tensors and questions about
    them.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if not function.is_view and not any(
            word in str(function) for word in ("detach", "alias", "as_strided", "prim.device")
        ):
            self.names.append(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_a_checkpoint_copies_the_state_in_a_few_pieces(tmp_path, monkeypatch, kernels):
    counted, tensors = [], []
    monkeypatch.setattr(
        checkpoint_module, "save_checkpoint", lambda folder, step, state, values: tensors.append(len(state))
    )
    save_state = loop_module.Loop._save

    def counting(loop, **how):
        with Launches() as launches:
            save_state(loop, **how)
        counted.append(launches.names)

    monkeypatch.setattr(loop_module.Loop, "_save", counting)
    settings = {
        "stream": {"name": "digits", "tasks": 2, "limit_per_task": 30},
        "options": {"buffer_batch": 8},
        "memory": 30,
        "width": 8,
    }
    run(RunConfig.create(**settings, device="cpu", kernels=kernels, checkpoint_every=2), out=tmp_path / "run")
    assert len(counted) == 5 and min(tensors) > 700
    # float32, int64 and uint8 are copied; float32 is checked, the answer fetched.
    copies = [[name for name in names if name.startswith("aten.cat")] for names in counted]
    assert max(map(len, copies)) <= 4 and max(map(len, counted)) <= 10, max(counted, key=len)


def test_a_checkpoint_that_could_not_be_written_is_told_by_the_next_call(tmp_path, monkeypatch):
    # A stand-in for a stream takes every call, and may be entered.
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    writer = CheckpointWriter(tmp_path / "missing", torch.device("cuda"))
    writer.write(1, Snapshot(TENSORS), {})
    with pytest.raises(RunError, match=r"cannot write .*step-000000001"):
        writer.write(2, Snapshot(TENSORS), {})
    writer.close()
