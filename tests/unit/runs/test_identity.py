"""A checkpoint continues the run that wrote it and no other: other settings, data, code and damaged
files are refused by name.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import mose_fast
from mose_fast.app.cli import main
from mose_fast.runs.checkpoint import load_checkpoint, save_checkpoint
from mose_fast.settings.run import RunConfig
from mose_fast.streams import StreamError, from_arrays
from mose_fast.train import CheckpointError, Interrupted, RunError, resume, run
from tests.listeners import StopAt

BATCHES = 6


def arrays(shift=0):
    """Two classes a task, two tasks of three batches."""
    labels = np.arange(60) % 4
    images = np.random.default_rng(shift).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    return {"x_train": images, "y_train": labels, "x_test": images[:8], "y_test": labels[:8]}


def config(data):
    return RunConfig.create(
        stream={"name": str(data), "tasks": 2}, width=1, memory=64, device="cpu", checkpoint_every=2
    )


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with ``data.npz`` and ``run``, stopped after its fourth batch, with two
    checkpoints.
    """
    folder = tmp_path_factory.mktemp("stopped")
    np.savez(folder / "data.npz", **arrays())
    with pytest.raises(Interrupted):
        run(config(folder / "data.npz"), out=folder / "run", listeners=[StopAt(4)])
    return folder


@pytest.fixture
def stopped(template):
    """The run of the template, put back as it was before each test."""
    saved = template.with_name(template.name + "-saved")
    if not saved.exists():
        shutil.copytree(template, saved)
    shutil.rmtree(template)
    shutil.copytree(saved, template)
    return template / "run"


def change_config(out, **changes):
    values = json.loads((out / "config.json").read_text())
    for name, value in changes.items():
        owner, _, setting = name.rpartition("__")
        (values[owner] if owner else values)[setting] = value
    (out / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 5}, "seed was 0 and is 5 now"),
        ({"memory": 65}, "memory was 64 and is 65 now"),
        ({"epochs": 2}, "epochs was 1 and is 2 now"),
        ({"options__lr": 0.5, "width": 2}, "width was 1 and is 2 now; options.lr was 0.001 and is 0.5 now"),
        ({"stream__batch": 20}, "stream.batch was 10 and is 20 now"),
        ({"stream__fingerprint": None}, "stream.fingerprint was '[0-9a-f]{16}' and is None now"),
    ],
)
def test_another_setting_is_named_and_refused(stopped, changes, says):
    change_config(stopped, **changes)
    before = sorted((stopped / "checkpoints").iterdir())
    with pytest.raises(
        RunError,
        match=f"step-\\d+.safetensors does not belong to the configuration beside it: {says}. Change it back, or",
    ):
        resume(stopped)
    assert sorted((stopped / "checkpoints").iterdir()) == before
    assert not (stopped / "results.json").exists()


def test_settings_that_change_no_result_may_change(stopped):
    moved = stopped.parent / "elsewhere.npz"
    (stopped.parent / "data.npz").rename(moved)
    change_config(stopped, checkpoint_every=1, stream__name=str(moved), stream__decoder="pil")
    assert resume(stopped)["resumed"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU takes device cuda")
def test_resume_hints_at_no_flag_since_it_takes_none(stopped, capsys):
    change_config(stopped, device="cuda")
    assert main(["resume", str(stopped)]) == 2
    refused = capsys.readouterr().err
    assert "device is 'cuda'" in refused and "--device" not in refused


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1, "fewer", "labels"])
def test_changed_data_are_refused(stopped, shift, capsys):
    data = arrays(1 if shift == 1 else 0)
    if shift == "fewer":
        data = {name: array[:-4] for name, array in data.items()}
    if shift == "labels":
        data["y_train"] = data["y_train"][::-1].copy()
    path = stopped.parent / "data.npz"
    np.savez(path, **data)
    assert main(["resume", str(stopped)]) == 2
    assert f"the data of stream '{path}' have changed: their fingerprint is" in capsys.readouterr().err
    assert not (stopped / "results.json").exists()
    # Nor does the configuration repeat the run on them, unless it is told to.
    again = ["run", "--config", str(stopped / "config.json"), "--out", str(stopped.parent / "again")]
    assert main(again) == 2
    assert "have changed" in (refused := capsys.readouterr().err) and "--set stream.fingerprint=null" in refused
    assert main([*again, "--set", "stream.fingerprint=null"]) == 0
    # Another stream has data of its own.
    other = stopped.parent / "other.npz"
    path.rename(other)
    assert main([*again, "--overwrite", "--stream", str(other)]) == 0


def test_a_stream_object_is_compared_too(tmp_path):
    stream = from_arrays(**arrays(), tasks=2)
    with pytest.raises(Interrupted):
        run(stream=stream, out=tmp_path, listeners=[StopAt(2)], width=1, memory=64, device="cpu")
    with pytest.raises(StreamError, match="the data of stream 'arrays' have changed"):
        resume(tmp_path, stream=from_arrays(**arrays(1), tasks=2))
    assert (
        resume(tmp_path, stream=from_arrays(**arrays(), tasks=2))["config"]["stream"]["fingerprint"]
        == stream.fingerprint
    )


def test_a_fingerprint_is_of_the_data_alone():
    data = arrays()
    known = from_arrays(**data).fingerprint
    assert from_arrays(**data, tasks=2, class_order_seed=1, limit_per_task=4, batch=3).fingerprint == known
    other = {name: array.copy() for name, array in data.items()}
    other["x_test"][3, 2, 1, 0] ^= 1
    names = from_arrays(**data, class_names=list("abcd"))
    swapped = {**data, "x_train": data["x_train"][::-1].copy(), "y_train": data["y_train"][::-1].copy()}
    assert len({known, from_arrays(**other).fingerprint, names.fingerprint, from_arrays(**swapped).fingerprint}) == 4
    # A stream made by hand has one of its own images.
    made = from_arrays(**data)
    by_hand = [
        dataclasses.replace(made, fingerprint=""),
        dataclasses.replace(made, fingerprint="", x_test=made.x_test.flip(0)),
    ]
    assert by_hand[0].fingerprint != by_hand[1].fingerprint


def newest(out):
    return sorted((out / "checkpoints").iterdir())[-1]


@pytest.mark.parametrize("place", ["header", "last byte"])
def test_a_flipped_bit_is_found_and_the_one_before_offered(stopped, place):
    path = newest(stopped)
    older = sorted((stopped / "checkpoints").iterdir())[0]
    raw = bytearray(path.read_bytes())
    position = {
        "header": (
            raw.index(b'\\"seed\\": 0') + len(b'\\"seed\\": 0') - 1
        ),  # in the settings that the checkpoint notes: 0 becomes 1
        "last byte": len(raw) - 1,
    }[place]
    raw[position] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as error:
        resume(stopped)
    assert (
        str(error.value)
        == f"the checkpoint {path} is damaged: its content does not have the hash in its header; the one before it is"
        f" {older}: delete {path.name} to continue from there"
    )


def test_every_byte_of_a_small_checkpoint_counts(tmp_path):
    """But the hash's own name: without it, a checkpoint that says whose it is counts as damaged,
    too.
    """
    path = save_checkpoint(tmp_path, 1, {"weight": torch.arange(3.0)}, {"identity": 1})
    good = path.read_bytes()
    for position in range(len(good)):
        raw = bytearray(good)
        raw[position] ^= 1 << position % 8
        path.write_bytes(raw)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
    path.write_bytes(good)
    assert load_checkpoint(path)[1] == {"identity": 1}


def test_other_code_is_refused(stopped, monkeypatch):
    monkeypatch.setattr("mose_fast.learner.saved.code_hash", lambda: "of another version")
    with pytest.raises(
        RunError,
        match=r"was written by other code \(mose-fast 0.*, code [0-9a-f]{16}\) than .* running \(.*, code of another"
        r" version\), and the results would mix the two",
    ):
        resume(stopped)


EDITS = """
import sys
from pathlib import Path
import mose_fast
from mose_fast import train
from mose_fast._build_info import code_hash

package = Path(mose_fast.__file__).parent
for settings in ({"evaluate_every": 2}, {"train_on": "final_memory", "method": "er"}):
    stream = {"name": "digits", "limit_per_task": 4}
    train.run(stream=stream, width=1, memory=64, device="cpu", out=sys.argv[1] + settings.get("method", ""), **settings)
imported = {Path(module.__file__) for name, module in sys.modules.items() if name.split(".")[0] == "mose_fast"}
ordered = sorted(path for path in package.rglob("*.py"))
assert len(imported) > 100 and imported < set(ordered)
for path in ordered:
    before = code_hash()
    with path.open("a") as file:
        file.write("# edited\\n")
    print(path.relative_to(package), path in imported, code_hash() != before)
"""


@pytest.mark.slow
def test_an_edit_counts_unless_it_is_in_a_room_that_no_run_imports(tmp_path):
    package = Path(mose_fast.__file__).parent
    shutil.copytree(package, tmp_path / "mose_fast", ignore=shutil.ignore_patterns("__pycache__", "_C*", "_build.json"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MOSE_FAST_NATIVE": "0"}
    command = [sys.executable, "-c", EDITS, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    told = [line.split() for line in done.stdout.splitlines()]
    rooms = {path.split("/")[0] for path, _, counts in told if counts == "False"}
    assert rooms == {"app", "experiments", "export", "present"}
    assert [path for path, _, counts in told if path.split("/")[0] in rooms and counts == "True"] == []
    assert [path for path, imported, _ in told if imported == "True" and path.split("/")[0] in rooms] == []


def test_another_number_of_threads_is_told(stopped):
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match="threads was 1 and is 2 now: the last digits of the results will differ"):
        resume(stopped)


def test_the_checkpoint_says_whose_it_is(stopped):
    with safe_open(newest(stopped), framework="pt") as file:
        values = json.loads(file.metadata()["values"])
    assert values["identity"]["config"] == json.loads((stopped / "config.json").read_text())
    assert Path(values["identity"]["config"]["stream"]["name"]).name == "data.npz"
