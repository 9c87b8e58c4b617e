"""A learner in a file, a pickle or a copy continues as the learner itself."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import subprocess
import sys
from itertools import cycle

import pytest
import torch

import mose_fast
from mose_fast.learner.saved import parts
from mose_fast.methods import METHODS, Er, create_learner
from mose_fast.runs.checkpoint import save_checkpoint
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.state_file import StateFileError, state_file
from tests.paths import ROOT
from tests.unit.learner.ema import Ema, entered
from tests.unit.methods.by_hand import bits


@pytest.fixture(autouse=True)
def ema():
    with entered():
        yield


def options(name: str) -> dict:
    return {"passes": 2, "passes_before": 1} if name == "gdumb" else {}


def go_on(learner, teach, batch) -> list[int]:
    """The rest of a task, a task more, and predictions."""
    teach(learner, tasks=(1,), steps=2, seed=1)
    teach(learner, tasks=(2,), steps=2)
    learner.end_task()
    return learner.predict(batch([0, 1, 2, 3, 4, 5], seed=9)[0]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), zip([*METHODS, "ema"], cycle(["file", "pickle", "copy"]), strict=False))
def test_it_continues_bit_for_bit_in_the_middle_of_a_task(name, how, make, teach, batch, tmp_path):
    learner = teach(make(name, options=options(name), kernels="fused"), steps=2)
    before = bits(learner)
    if how == "file":
        learner.save(tmp_path / "learner.safetensors")
        other = mose_fast.load_learner(tmp_path / "learner.safetensors")
    else:
        other = pickle.loads(pickle.dumps(learner)) if how == "pickle" else copy.deepcopy(learner)
    assert type(other) is type(learner) and other.config == learner.config
    assert bits(other) == bits(learner) == before
    assert go_on(other, teach, batch) == go_on(learner, teach, batch)
    assert bits(other) == bits(learner) != before


CONTINUES = """
import json, pickle, sys, torch, mose_fast
torch.set_num_threads(1)
folder = sys.argv[1]
for name in json.load(open(f"{folder}/names.json")):
    for learner in (
        mose_fast.load_learner(f"{folder}/{name}.safetensors"), pickle.load(open(f"{folder}/{name}.pickle", "rb"))
    ):
        for step in range(3):
            x = torch.randint(0, 256, (10, 8, 8, 3), generator=torch.Generator().manual_seed(step)).to(torch.uint8)
            learner.observe(x, torch.tensor([2, 3] * 5), task=1)
        print(learner.weights_hash())
"""


@pytest.mark.slow
def test_it_continues_bit_for_bit_in_a_new_process(make, teach, tmp_path):
    own = tmp_path / "own.py"
    text = 'from mose_fast.methods import *\n@method("mine", options=BaselineOptions, presets={"table": Preset("")},'
    own.write_text(f"{text} year=2026, reference='', cost=1.0)\nclass Mine(ReplayLearner): ...\n")
    learners = [make(name) for name in ("mose", "il2a", "derpp", f"{own}:Mine")]
    (tmp_path / "names.json").write_text(json.dumps([str(n) for n in range(len(learners))]))
    for number, learner in enumerate(learners):
        teach(learner, steps=2)
        learner.save(tmp_path / f"{number}.safetensors")
        (tmp_path / f"{number}.pickle").write_bytes(pickle.dumps(learner))
    command = [sys.executable, "-c", CONTINUES, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for learner in learners:
        for step in range(3):
            x = torch.randint(0, 256, (10, 8, 8, 3), generator=torch.Generator().manual_seed(step)).to(torch.uint8)
            learner.observe(x, torch.tensor([2, 3] * 5), task=1)
    for name in ("mine", f"{own}:Mine"):
        METHODS.pop(name, None)
    assert done.stdout.split() == [learner.weights_hash() for learner in learners for _ in range(2)]


def test_what_cannot_be_saved_is_refused_and_leaves_the_earlier_file(make, teach, batch, tmp_path, monkeypatch):
    path = tmp_path / "learner.safetensors"
    learner = teach(make("er"), tasks=(0,))
    learner.save(path)
    earlier = path.read_bytes()
    prepared = learner.prepare(*batch([0, 1]), task=0)
    for attempt in (lambda: learner.save(path), lambda: pickle.dumps(learner), lambda: copy.copy(learner)):
        with pytest.raises(ConfigError, match=r"has 1 planned steps that were not taken; wanted take\(\) or undo\(\)"):
            attempt()
    prepared.undo()
    learner.centres = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"tensor of shape \[3\] in self.centres"):
        learner.save(path)
    del learner.centres
    learner.__class__ = type("Nameless", (Er,), {})
    with pytest.raises(ConfigError, match="Nameless is not the class of method 'er', by which it would be loaded"):
        learner.save(path)
    assert type(copy.deepcopy(learner)) is type(learner)
    learner.__class__ = Er

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        StateFileError, match=r"cannot write .*learner.safetensors \(.* bytes\): No space left on device"
    ):
        learner.save(path)
    assert path.read_bytes() == earlier and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_files_of_something_else_are_refused(make, tmp_path):
    path = tmp_path / "learner.safetensors"
    with pytest.raises(StateFileError, match=f"there is no saved learner {path}"):
        mose_fast.load_learner(path)
    make("er").save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StateFileError, match="is damaged: its content does not have the hash in its header"):
        mose_fast.load_learner(path)
    with pytest.raises(StateFileError, match="not a saved learner of mose-fast"):
        mose_fast.load_learner(save_checkpoint(tmp_path, 1, {}, {}))
    path.write_bytes(state_file("mose_fast_learner", 2, {}, {}))
    with pytest.raises(StateFileError, match="has format 2, newer than 1"):
        mose_fast.load_learner(path)
    tensors, values = parts(make("er"))
    values["identity"] = {}
    path.write_bytes(state_file("mose_fast_learner", 1, tensors | {"kept/x": torch.zeros(1)}, values))
    with pytest.raises(StateFileError, match=r"belongs to another version of method 'er': what the method keeps"):
        mose_fast.load_learner(path)


def test_a_method_whose_file_has_moved_and_one_that_nobody_imported(make, tmp_path):
    text = 'from mose_fast.methods import *\n@method("moved", options=BaselineOptions, presets={"table": Preset("")},'
    (tmp_path / "old.py").write_text(f"{text} year=2026, reference='', cost=1.0)\nclass Mine(ReplayLearner): ...\n")
    learner = make(f"{tmp_path / 'old.py'}:Mine")
    learner.save(tmp_path / "a.safetensors")
    make("moved").save(tmp_path / "b.safetensors")
    for name in ("moved", learner.config.method):
        del METHODS[name]
    (tmp_path / "old.py").rename(tmp_path / "new.py")
    with pytest.raises(ConfigError, match=r"there is no file .*old.py; .*wanted load_learner\(..., method='path/to"):
        mose_fast.load_learner(tmp_path / "a.safetensors")
    with pytest.raises(
        ConfigError, match="of method 'moved', which is unknown here; import the module that defines it"
    ):
        mose_fast.load_learner(tmp_path / "b.safetensors")
    with pytest.warns(UserWarning, match="was saved by other code .*old.py was .* and is absent now"):
        moved = mose_fast.load_learner(tmp_path / "a.safetensors", method=f"{tmp_path / 'new.py'}:Mine")
    assert moved.weights_hash() == learner.weights_hash()
    for name in ("moved", moved.config.method):
        METHODS.pop(name, None)


def test_a_path_from_another_folder_and_another_device(make, tmp_path, monkeypatch):
    learner = make("er", step="eager")
    tensors, values = parts(learner)
    values["config"]["device"], values["identity"] = "cuda:7", {"method_files": {}, "code": "x", "machine": {}}
    path = tmp_path / "learner.safetensors"
    learner.save(path)
    found = mose_fast.load_learner(path, device="cpu")
    assert (found.config.step, found.config.feed, found.config.device) == ("auto", "auto", "cpu")
    path.write_bytes(state_file("mose_fast_learner", 1, tensors, values))
    with pytest.raises(ConfigError, match="device is 'cuda:7'"):
        mose_fast.load_learner(path)


def test_other_code_and_another_machine_are_told(make, tmp_path, monkeypatch):
    path = tmp_path / "learner.safetensors"
    make("er").save(path)
    monkeypatch.setattr("mose_fast.learner.saved.code_hash", lambda: "other")
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match=r"mose-fast was .* and is .*, code other now; threads was 1 and is 2 now"):
        mose_fast.load_learner(path)


def test_precision_and_stream_are_those_of_the_learner(tmp_path):
    stream = {"classes": 4, "image_size": (16, 8), "mean": [0.1, 0.2, 0.3], "std": (1, 2, 3), "mirror_safe": False}
    config = RunConfig.create(method="er", width=1, memory=64, device="cpu", precision="bf16")
    learner = create_learner(config, **stream)
    learner.save(tmp_path / "learner.safetensors")
    found = mose_fast.load_learner(tmp_path / "learner.safetensors")
    assert (found.image_size, found.mean, found.std, found.mirrored) == ((16, 8), (0.1, 0.2, 0.3), (1, 2, 3), False)
    assert found.precision == learner.precision and issubclass(Ema, type(found).__mro__[1])
