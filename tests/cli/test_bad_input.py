"""Bad input ends with exit code 2 and one message that names the argument, its value and what is wanted; nothing is lost."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from mose_fast.config import RunConfig


def refused(call, *arguments, says):
    """Asserts that a command is refused with a message that holds every text in ``says``."""
    code, out, err = call(*arguments)
    assert code == 2, (out, err)
    assert "Traceback" not in err
    message = err[err.index("mose-fast") :]
    for text in says:
        assert str(text) in message, message
    return message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--method", "mosse"), ("method is 'mosse'", "did you mean 'mose'")),
        (("--stream", "split-cifar1000"), ("'split-cifar1000' is unknown", "did you mean 'split-cifar100'")),
        (("--stream", "./nowhere"), ("nowhere", "wanted a folder with train and test, or an .npz file")),
        (("--preset", "realeased"), ("preset is 'realeased'", "did you mean 'released'?")),
        (("--set", "temprature=1"), ("temprature is not a setting", "did you mean 'temperature'")),
        (("--set", "temperature=0"), ("options.temperature is 0", "wanted a number above 0")),
        (("--memory", "0"), ("memory is 0", "wanted an integer of at least 1")),
        (("--memory", "63"), ("memory is 63, smaller than options.buffer_batch, 64", "wanted a memory of at least one buffer batch")),
        (("--set", "buffer_batch=65"), ("memory is 64, smaller than options.buffer_batch, 65")),
        (("--memory", "many"), ("argument --memory: invalid int value: 'many'",)),
        (("--width", "-1"), ("width is -1",)),
        (("--epochs", "0"), ("epochs is 0",)),
        (("--seed", "-1"), ("seed is -1",)),
        (("--tasks", "3"), ("tasks is 3", "wanted tasks to be one of 1, 2, 5")),
        (("--limit-per-task", "1"), ("limit_per_task is 1", "wanted at least one image a class")),
        (("--normalisation", "cifar11"), ("'cifar11'", "cifar10")),
        (("--precision", "fp16"), ("precision is 'fp16'", "'bf16'")),
        (("--device", "gpu"), ("device is 'gpu'", "wanted auto, cpu, cuda or cuda:N")),
        (("--augment", "cuda"), ("feed is 'cuda'", "wanted one of 'auto', 'dali', 'fused', 'torch'")),
        (("--augment", "simclr"), ("feed is 'simclr', which is a recipe", "--set augment=simclr")),
        (("--decoder", "turbo"), ("stream.decoder is 'turbo'", "'pil'")),
        (("--checkpoint-every", "0"), ("checkpoint_every is 0",)),
        (("--mem", "5"), ("unrecognized arguments: --mem",)),
    ],
)
def test_unusable_setting(call, tiny, tmp_path, arguments, says):
    folder = tmp_path / "run"
    refused(call, "run", *tiny, "--out", folder, *arguments, says=[says] if isinstance(says, str) else says)
    assert not folder.exists()


def test_dali_is_asked_for_and_missing(call, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr("mose_fast.streams.create", lambda *arguments, **named: pytest.fail("data were loaded first"))
    says = ("feed is 'dali', but DALI is not installed", "wanted: pip install 'mose-fast[dali]'", "nvidia-dali-cuda130")
    refused(call, "run", *tiny, "--augment", "dali", "--out", tmp_path / "run", says=says)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(call, tiny, tmp_path):
    refused(call, "run", *tiny, "--device", "cuda", "--out", tmp_path / "run", says=("device is 'cuda'", "wanted", "--device cpu"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [(), ("walk",), ("list", "tasks"), ("resume",)])
def test_unusable_command(call, command):
    code, _, err = call(*command)
    assert code == 2
    assert "usage: mose-fast" in err


def test_used_folder_is_refused_and_overwrite_replaces_the_run_alone(call, tiny, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "results.json").write_text("earlier")
    refused(call, "run", *tiny, "--out", folder, says=(folder, "is already used", "--overwrite", "mose-fast resume"))
    refused(call, "run", *tiny, "--out", folder, "--overwrite", says=(folder, "results.json", "nothing was deleted"))
    (folder / "config.json").write_text(RunConfig().to_json())
    assert (folder / "results.json").read_text() == "earlier"
    code, _, _ = call("run", *tiny, "--out", folder, "--overwrite")
    assert code == 0
    assert (folder / "results.json").read_text().startswith("{")
    assert (folder / "notes.txt").read_text() == "mine"


def test_file_in_the_way_of_the_folder(call, tiny, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder in (file, file / "run"):
        refused(call, "run", *tiny, "--out", folder, says=(f"cannot write into the output folder {folder}", "choose another --out"))
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="a read-only folder does not stop root")
def test_read_only_folder(call, tiny, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(call, "run", *tiny, "--out", tmp_path / "locked" / "run", says=("cannot write into the output folder", "Permission denied"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.json", None, ("cannot read the configuration", "No such file")),
        ("run.json", '{"memory": 5', ("is not valid JSON",)),
        ("run.toml", "memory = = 5", ("is not valid TOML",)),
        ("run.json", "[1, 2]", ("a configuration is a table of settings, not list",)),
        ("run.json", '{"memori": 5}', ("memori is not a setting", "did you mean 'memory'")),
        ("run.json", '{"options": {"augmant": "scr"}}', ("options.augmant is not a setting", "'augment'")),
        ("run.json", '{"stream": 5}', ("stream is 5", "wanted the name of a stream")),
        ("run.json", '{"options": "scr"}', ("options is 'scr'", "wanted a table")),
        ("run.json", '{"preset": ["paper"]}', ("preset is ['paper']",)),
        ("run.json", '{"method": null}', ("method is None",)),
        ("run.toml", 'stream = {name = "digits", data_dir = 5}', ("stream.data_dir is 5", "wanted a folder")),
        ("run.json", '{"memory": NaN}', ("memory is nan",)),
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
    refused(call, "run", "--stream", "split-cifar100", "--data-dir", empty, "--out", out, says=(empty / "cifar100.npz", "damaged"))
    images, labels = np.zeros((8, 32, 32, 3), np.float32), np.arange(8) % 2
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    refused(call, "run", "--stream", tmp_path / "own.npz", "--out", out, says=("x_train is float32", "wanted uint8"))
    (tmp_path / "pets" / "train" / "cat").mkdir(parents=True)
    refused(call, "run", "--stream", tmp_path / "pets", "--out", out, says=(tmp_path / "pets" / "test", "is missing"))
    assert not out.exists()


def test_resume_of_nothing(call, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        refused(call, "resume", folder, says=(f"there is no run in {folder}", "mose-fast run --out"))
    assert list(tmp_path.iterdir()) == []


def test_resume_of_a_finished_run(call, finished):
    before = (finished / "results.json").read_bytes()
    refused(call, "resume", finished, says=(f"the run in {finished} is finished", finished / "results.json"))
    assert (finished / "results.json").read_bytes() == before


def test_resume_of_a_truncated_checkpoint(call, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    older, newest = sorted((folder / "checkpoints").iterdir())
    kept = older.read_bytes()
    newest.write_bytes(newest.read_bytes()[:1000])
    refused(call, "resume", folder, says=(newest, "truncated", older, f"delete {newest.name}"))
    assert older.read_bytes() == kept
    newest.unlink()  # as the message says
    code, _, _ = call("resume", folder)
    assert code == 0
    assert (folder / "accuracy.csv").read_bytes() == (finished / "accuracy.csv").read_bytes()


def test_resume_with_a_broken_configuration(call, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    (folder / "config.json").write_text("{")
    refused(call, "resume", folder, says=(folder / "config.json", "is not valid JSON"))


def test_diverged_training_is_said(call, tiny, tmp_path):
    refused(call, "run", *tiny, "--set", "lr=1e30", "--out", tmp_path / "run", says=("the loss is not finite at batch", "lower options.lr"))


def test_unexpected_error_keeps_its_traceback(tiny, tmp_path):
    code = (
        "import sys, mose_fast.train as t, mose_fast.cli as c\n"
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
