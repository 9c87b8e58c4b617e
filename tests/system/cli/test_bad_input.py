"""Bad input ends with exit code 2 and one message that names the argument, its value and what is
wanted; nothing is lost.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mose_fast import create_learner
from mose_fast.learner.named_settings import all_settings
from mose_fast.learner.room import least_bytes
from mose_fast.nn.backbone import backbone_parameters
from mose_fast.runs.checkpoint import latest, load_checkpoint, save_checkpoint
from mose_fast.settings.run import ConfigError, RunConfig
from tests.declared import outside

DIGITS = "9" * 400


def refused(call, *arguments, says):
    """Asserts that a command is refused with a message that holds every text in ``says``."""
    code, out, err = call(*arguments)
    assert code == 2, (out, err)
    assert "Traceback" not in err
    message = err[err.index("mose-fast") :]
    for text in says:
        assert str(text) in message, message
    return message


@pytest.fixture
def refused_run(call, tiny, tmp_path):
    """Asserts that a tiny run with more arguments is refused and makes no folder."""

    def refuse(*arguments, says, out=tmp_path / "run"):
        refused(call, "run", *tiny, "--out", out, *arguments, says=says)
        assert out != tmp_path / "run" or not out.exists()

    return refuse


def contents(folder):
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--method", "mosse"), ("method is 'mosse'", "did you mean 'mose'")),
        (("--stream", "split-cifar1000"), ("'split-cifar1000' is unknown", "did you mean 'split-cifar100'")),
        (("--stream", "./nowhere"), ("nowhere", "wanted a folder with train and test, or an .npz file")),
        (("--preset", "realeased"), ("preset is 'realeased'", "did you mean 'released'?")),
        (("--memory", "0"), ("memory is 0", "wanted an integer of at least 1")),
        (
            ("--memory", "63"),
            ("memory is 63, smaller than options.buffer_batch, 64", "wanted a memory of at least one buffer batch"),
        ),
        (("--set", "buffer_batch=65"), ("memory is 64, smaller than options.buffer_batch, 65")),
        (("--limit-per-task", "1"), ("limit_per_task is 1", "wanted at least one image a class")),
        (("--normalisation", "cifar11"), ("'cifar11'", "cifar10")),
        (("--validation", "some"), ("argument --validation: invalid float value: 'some'",)),
        (("--kind", "task_free", "--batch", "1000"), ("tasks is 5 with kind 'task_free'", "make 1 batches of 1000")),
        (("--kind", "task_free", "--epochs", "2"), ("epochs is 2, but a stream of kind 'task_free'", "wanted 1")),
        (("--device", "gpu"), ("device is 'gpu'", "wanted auto, cpu, cuda or cuda:N")),
        (("--feed", "simclr"), ("feed is 'simclr', which is a recipe", "--set augment=simclr")),
        (
            ("--seed", DIGITS),
            ("seed is an integer of about 400 digits", "wanted an integer of at least 0 and below 2**63"),
        ),
        (
            ("--set", f"lr={DIGITS}"),
            ("options.lr is an integer of about 400 digits", "wanted a number above 0 and below 1e+32"),
        ),
        (("--set", "lr=1e31", "--set", "beta1=0.99999999"), ("options.lr is 1e+31 with options.beta1 0.99999999",)),
        (
            ("--set", f"jitter_domain={'[' * 100_000}"),
            ("options.jitter_domain is", "(100,002 characters)", "wanted one of"),
        ),
        (("--device", "cuda:99999999999"), ("device is 'cuda:99999999999'", "wanted auto, cpu, cuda or cuda:N")),
        (("--stream", "x" * 5000), ("stream.name is 'xxx", "wanted the name of a stream")),
        (("--data-dir", "x" * 300), ("stream.data_dir is", "wanted a folder")),
        (("--method", f"{'x' * 300}.py:Name"), ("method is 'xxx", "unknown")),
    ],
)
def test_unusable_setting(refused_run, arguments, says):
    refused_run(*arguments, says=[says] if isinstance(says, str) else says)


# A wrong method or preset is told the names that there are.
FLAGS = [s for s in all_settings("mose").values() if s.flag and s.type != "bool" and s.name not in ("method", "preset")]


@pytest.mark.parametrize("setting", FLAGS, ids=lambda setting: setting.flag)
def test_a_flag_refuses_what_its_setting_cannot_hold(refused_run, setting):
    kinds = {"int": (int,), "float": (int, float), "str": (str,)}["str" if setting.choices else setting.type]
    for value, wanted in outside(setting):
        if isinstance(value, kinds) and not isinstance(value, bool):
            refused_run(f"--{setting.flag}={value}", says=[f"{setting.name} is", wanted])


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        # An image of 32 x 32 pixels in 3 bytes each, and 24 bytes beside it.
        ("--memory", 1_000_000_000, ("memory is 1000000000, which does not fit", "takes 3,096.0 GB")),
        # 2,725 parameters for each pair of channels (11.17 million at width 64), 16 bytes each.
        ("--width", 100_000, ("width is 100000, which does not fit", "at least 435,8")),
        ("--set", "projection=1000000000000", ("does not fit",)),
    ],
)
def test_what_does_not_fit_into_the_memory_is_refused_before_anything_is_deleted(
    call, tiny, refused_run, finished, tmp_path, flag, value, says
):
    folder = tmp_path / "used"
    shutil.copytree(finished, folder)
    before = contents(folder)
    refused_run(flag, value, "--overwrite", says=(*says, "GB are free on", "wanted a smaller"), out=folder)
    assert contents(folder) == before
    refused(call, "sweep", *tiny, flag, value, "--seeds", "0-1", "--out", tmp_path / "sweep", says=says)
    assert not (tmp_path / "sweep").exists()


def test_the_estimate_of_the_memory_is_that_of_the_real_learner(tiny):
    config = RunConfig.create(width=2, memory=100, options={"projection": 16})
    learner = create_learner(config, classes=10, image_size=(16, 8))
    memory, network, views, statistics = least_bytes(config, (16, 8), 10)
    assert memory == sum(
        t.numel() * t.element_size() for name, t in learner.memory.tensors().items() if name != "state"
    )
    backbone = sum(p.numel() for name, p in learner.network.named_parameters() if name.startswith(("stem.", "stage")))
    assert backbone == backbone_parameters(2)
    assert network == 16 * (backbone + 4 * 16 * 16)  # four projections to 16 from a feature of 8 * 2
    assert network <= 16 * sum(p.numel() for p in learner.network.parameters())
    assert views == statistics == 0 and backbone_parameters(64) == 11_168_832


def test_the_estimate_counts_what_a_method_keeps_of_each_class(tiny):
    config = RunConfig.create(method="il2a", width=2, options={"buffer_batch": 8})
    learner = create_learner(config, classes=10, image_size=(16, 8))
    kept = [tensor for name, tensor in learner.state()[0].items() if name in ("kept/means", "kept/covariances")]
    found = least_bytes(config, (16, 8), 10).statistics
    assert found == sum(t.numel() * t.element_size() for t in kept) == 4 * 10 * 16 * 17
    with pytest.raises(ConfigError, match=r"width is 3000, which .* the statistics of 100 classes 230\.4 GB, and"):
        create_learner(method="il2a", width=3000, classes=100)


@pytest.mark.parametrize("seeds", ["0-99999999999", f"0-{DIGITS}", DIGITS, "0-20000", ",".join(["0-5000"] * 3)])
def test_too_many_seeds_are_refused(call, tiny, tmp_path, seeds):
    refused(call, "sweep", *tiny, "--seeds", seeds, "--out", tmp_path / "sweep", says=("seeds are", "wanted"))
    assert not (tmp_path / "sweep").exists()


def test_too_large_a_grid_is_refused(call, tiny, tmp_path):
    rates = "lr=" + ",".join(f"0.{n}" for n in range(1, 9))
    grid = ("--seeds", "0-999", "--grid", rates, "--grid", "temperature=0.1,0.2", "--out", tmp_path / "sweep")
    refused(call, "sweep", *tiny, *grid, says=("the grid has 16,000 runs", "wanted at most 10,000"))
    assert not (tmp_path / "sweep").exists()


def test_paths_that_the_system_refuses(call, tiny, finished, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in ("x" * 300, tmp_path / "loop" / "run"):
        for command in (
            ("run", *tiny, "--out", path),
            ("resume", path),
            ("export", finished, "--out", path),
            ("report", path),
        ):
            refused(call, *command, says=(path,))
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        ({"image_size": 32}, "image_size is 32; wanted height and width"),
        ({"image_size": (32.0, 32.0)}, "image_size is (32.0, 32.0)"),
        ({"image_size": (10**400, 8)}, "image_size is"),
        ({"classes": "ten"}, "classes is 'ten'; wanted an integer of at least 2"),
        ({"classes": True}, "classes is True"),
        ({"mean": 0.5}, "mean is 0.5; wanted three numbers, one for each channel"),
        ({"std": (1, 1, 0)}, "std is (1, 1, 0); wanted three numbers above 0"),
        ({"std": (1, 1, float("nan"))}, "std is (1, 1, nan)"),
        ({"mirror_safe": "no"}, "mirror_safe is 'no'; wanted True or False"),
    ],
)
def test_arguments_of_a_learner(stream, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        create_learner(width=1, memory=64, **{"classes": 10, **stream})


def test_array_in_the_place_of_a_setting():
    for setting in ("memory", "seed", "device", "feed", "deterministic", "method", "preset"):
        with pytest.raises(ConfigError, match=f"{setting} is array"):
            RunConfig.create(**{setting: np.zeros(3)})


def test_dali_is_asked_for_and_missing(refused_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr("mose_fast.streams.create", lambda *arguments, **named: pytest.fail("data were loaded first"))
    says = ("feed is 'dali', but DALI is not installed", "wanted: pip install 'mose-fast[dali]'", "nvidia-dali-cuda130")
    refused_run("--feed", "dali", says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(refused_run):
    refused_run("--device", "cuda", says=("device is 'cuda'", "wanted", "--device cpu"))


@pytest.mark.parametrize("command", [(), ("walk",), ("list", "tasks"), ("resume",)])
def test_unusable_command(call, command):
    code, _, err = call(*command)
    assert code == 2
    assert len(err.splitlines()) == 1 and "; see mose-fast " in err and "--help" in err


def test_used_folder_is_refused_and_overwrite_replaces_the_run_alone(call, tiny, refused_run, tmp_path):
    folder = tmp_path / "used"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "results.json").write_text("earlier")
    refused_run(says=(folder, "is already used", "--overwrite", "mose-fast resume"), out=folder)
    refused_run("--overwrite", says=(folder, "results.json", "nothing was deleted"), out=folder)
    (folder / "config.json").write_text(RunConfig().to_json())
    assert (folder / "results.json").read_text() == "earlier"
    code, _, _ = call("run", *tiny, "--out", folder, "--overwrite")
    assert code == 0
    assert (folder / "results.json").read_text().startswith("{")
    assert (folder / "notes.txt").read_text() == "mine"


def test_file_in_the_way_of_the_folder(refused_run, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "run"):
        refused_run(says=(f"cannot write into the output folder {folder}", "choose another --out"), out=folder)
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="a read-only folder does not stop root")
def test_read_only_folder(refused_run, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    says = ("cannot write into the output folder", "Permission denied")
    refused_run(says=says, out=tmp_path / "locked" / "run")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.json", None, ("cannot read the configuration", "No such file")),
        ("run.json", '{"memory": 5', ("is not valid JSON",)),
        ("run.json", "[1, 2]", ("a configuration is a table of settings, not list",)),
        ("run.json", '{"options": {"augmant": "scr"}}', ("options.augmant is not a setting", "'augment'")),
        ("run.json", '{"stream": 5}', ("stream is 5", "wanted the name of a stream")),
        ("run.json", '{"options": "scr"}', ("options is 'scr'", "wanted a table")),
        ("run.json", '{"preset": ["paper"]}', ("preset is ['paper']",)),
        ("run.toml", 'stream = {name = "digits", data_dir = 5}', ("stream.data_dir is 5", "wanted a folder")),
        ("run.json", '{"memory": NaN}', ("memory is nan",)),
        ("run.json", f'{{"seed": {DIGITS}}}', ("seed is an integer of about 400 digits", "below 2**63")),
        ("run.json", "[" * 100_000, ("is nested too deeply",)),
        ("run.json", '{"stream": {"name": "a\\u0000.npz"}}', ("stream.name is 'a\\x00.npz'", "wanted")),
        ("run.json", '{"stream": {"data_dir": "\\ud800"}}', ("stream.data_dir is '\\ud800'", "wanted")),
    ],
)
def test_unusable_configuration_file(call, tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    refused(call, "run", "--config", tmp_path / name, "--out", tmp_path / "run", says=(tmp_path / name, *says))
    assert not (tmp_path / "run").exists()


def test_configuration_that_is_a_folder_or_no_text(call, tmp_path):
    (tmp_path / "run.json").mkdir()
    refused(call, "run", "--config", tmp_path / "run.json", says=("cannot read the configuration", "run.json"))
    (tmp_path / "noise.json").write_bytes(bytes(range(256)))
    refused(call, "run", "--config", tmp_path / "noise.json", says=("noise.json is not valid JSON",))


def test_missing_and_damaged_data(call, tmp_path):
    out = tmp_path / "run"
    empty = tmp_path / "empty"
    empty.mkdir()
    tiny_imagenet = ("run", "--stream", "split-tiny-imagenet", "--data-dir", empty, "--out", out)
    refused(call, *tiny_imagenet, says=(empty, "tiny-imagenet-200", "CS231n"))
    (empty / "cifar100.npz").write_bytes(b"PK\3\4 cut off")
    cifar = ("run", "--stream", "split-cifar100", "--data-dir", empty, "--out", out)
    refused(call, *cifar, says=(empty / "cifar100.npz", "damaged"))
    images, labels = np.zeros((8, 32, 32, 3), np.float32), np.arange(8) % 2
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    refused(call, "run", "--stream", tmp_path / "own.npz", "--out", out, says=("x_train is float32", "wanted uint8"))
    (tmp_path / "pets" / "train" / "cat").mkdir(parents=True)
    refused(call, "run", "--stream", tmp_path / "pets", "--out", out, says=(tmp_path / "pets" / "test", "is missing"))
    assert not out.exists()


@pytest.fixture
def unfinished(finished, tmp_path):
    """A copy of a finished run's folder without its results."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    return tmp_path / "run"


def test_resume_of_nothing(call, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        refused(call, "resume", folder, says=(f"there is no run in {folder}", "mose-fast run --out"))
    assert list(tmp_path.iterdir()) == []


def test_resume_of_a_finished_run(call, finished):
    before = (finished / "results.json").read_bytes()
    refused(call, "resume", finished, says=(f"the run in {finished} is finished", finished / "results.json"))
    assert (finished / "results.json").read_bytes() == before


def test_resume_of_a_truncated_checkpoint(call, finished, unfinished):
    older, newest = sorted((unfinished / "checkpoints").iterdir())
    kept = older.read_bytes()
    newest.write_bytes(newest.read_bytes()[:1000])
    refused(call, "resume", unfinished, says=(newest, "truncated", older, f"delete {newest.name}"))
    assert older.read_bytes() == kept
    newest.unlink()  # as the message says
    code, _, _ = call("resume", unfinished)
    assert code == 0
    assert (unfinished / "accuracy.csv").read_bytes() == (finished / "accuracy.csv").read_bytes()


def test_resume_of_another_networks_checkpoint(call, unfinished):
    config = RunConfig.load(unfinished / "config.json")
    # The identity in the file is that of the configuration beside it, so only the tensors tell.
    tensors, values = load_checkpoint(latest(unfinished / "checkpoints"))
    values["identity"]["config"]["width"] = 2
    (unfinished / "config.json").write_text(dataclasses.replace(config, width=2).to_json())
    save_checkpoint(unfinished / "checkpoints", 999, tensors, values)
    message = refused(
        call,
        "resume",
        unfinished,
        says=("step-000000999.safetensors", "another network", "has shape", "more tensors differ"),
    )
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("values", [5, None, [], {}, {"learner": 5, "position": [], "records": "", "seconds": None}])
def test_resume_of_a_checkpoint_with_other_values(call, unfinished, values):
    tensors, known = load_checkpoint(latest(unfinished / "checkpoints"))
    if isinstance(values, dict):
        values["identity"] = known["identity"]
    save_checkpoint(unfinished / "checkpoints", 999, tensors, values)
    refused(call, "resume", unfinished, says=("step-000000999.safetensors",))


@pytest.mark.slow
def test_events_on_a_full_disk_leave_no_traceback_of_a_thread(call, tiny, tmp_path, monkeypatch):
    kept = Path.open
    opened = []

    def full(path, *arguments, **named):
        if "tfevents" in path.name:
            opened.append(path)
            return kept(Path("/dev/full"), "wb", **{**named, "buffering": 0})
        return kept(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", full)
    code, _, err = call("run", *tiny, "--out", tmp_path / "run")
    assert code == 0
    assert len(opened) == 1
    assert err.count("cannot write TensorBoard events") == 1
    assert "No space left on device" in err
    assert "Traceback" not in err


def test_one_bad_file_among_good_ones_is_told_and_the_others_are_classified(call, finished, tmp_path):
    assert call("export", finished, "--out", tmp_path / "e")[0] == 0
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    good = [tmp_path / name for name in ("a.png", "c.png")]
    for path in good:
        Image.fromarray(pixels).save(path)
    (tmp_path / "b.png").write_bytes(good[0].read_bytes()[:50])
    files = (good[0], tmp_path / "b.png", tmp_path / "missing.png", good[1])
    code, out, err = call("predict", tmp_path / "e", *files)
    assert code == 2
    assert [line.split("\t")[0] for line in out.splitlines()] == list(map(str, good))
    told = [line for line in err.splitlines() if line.startswith("mose-fast: ")]
    assert len(told) == 2
    assert f"{tmp_path / 'b.png'} is a damaged or truncated image" in told[0]
    assert f"cannot read {tmp_path / 'missing.png'}: No such file" in told[1]


def test_resume_with_a_broken_configuration(call, unfinished):
    (unfinished / "config.json").write_text("{")
    refused(call, "resume", unfinished, says=(unfinished / "config.json", "is not valid JSON"))


def test_diverged_training_is_said(refused_run, tmp_path):
    refused_run("--set", "lr=1e30", says=("the loss is not finite at batch", "lower options.lr"), out=tmp_path / "kept")


@pytest.mark.slow
def test_unexpected_error_keeps_its_traceback(tiny, tmp_path):
    code = (
        "import sys, mose_fast.train as t, mose_fast.app.cli as c\n"
        "def broken(*a, **k): raise ZeroDivisionError('a bug')\n"
        "t.run = broken\n"
        "sys.exit(c.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "run", *tiny, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: a bug" in done.stderr


def test_message_of_the_real_program(tmp_path, tiny):
    command = [sys.executable, "-m", "mose_fast", "run", *tiny, "--memory", "0", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "mose-fast: memory is 0; wanted an integer of at least 1\n"
    assert done.stdout == ""
