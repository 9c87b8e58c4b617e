"""``mose-fast run`` and what it makes of flags, files and ``--set``."""

import json
import os
import re
import subprocess
import sys

import pytest

from mose_fast import _dali, streams
from mose_fast.app.cli import build_parser
from mose_fast.app.flags import read_settings
from mose_fast.learner.named_settings import all_settings, dotted
from mose_fast.methods import METHODS
from mose_fast.methods.mose import MOSE_PRESETS
from mose_fast.settings.run import ConfigError, RunConfig
from tests.declared import another

JITTER = "not dali, whose colour jitter gives other pixels"


def settings(*arguments):
    return read_settings(build_parser().parse_args(["run", *map(str, arguments)]))


def test_run_writes_the_folder_and_says_what_happens(call, tiny, tmp_path):
    folder = tmp_path / "new" / "run"
    code, out, err = call("run", *tiny, "--out", folder)
    assert code == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "results.json", "accuracy.csv", "accuracy.png", "checkpoints", "tensorboard"}
    assert "digits: 5 tasks, 10 classes, 100 training and 355 test images of 32x32" in out
    assert "mirroring off: it changes these labels" in out
    assert "fp32 (auto: on the CPU); native library: " in out
    assert "8,730 parameters" in out
    assert "10 batches" in out
    assert str(folder / "results.json") in out
    results = json.loads((folder / "results.json").read_text())
    assert f"memory    at most {results['peak_memory_bytes']['host'] / 2**20:,.0f} MiB on the host\n" in out
    assert f"kept      at most 64 images of the stream, {64 * (32 * 32 * 3 + 24) / 2**20:.1f} MiB\n" in out
    assert results["kept"] == {"images": 64, "bytes": 64 * (32 * 32 * 3 + 24), "bytes_beside": 0}
    table = out.split("accuracy in percent after task 5 of 5")[1]
    shown = re.search(r"\* ncm +4 +([\d.]+) +([\d.]+)", table)
    assert float(shown.group(1)) == pytest.approx(100 * results["acc"]["ncm"]["4"], abs=0.051)
    assert float(shown.group(2)) == pytest.approx(100 * results["accuracy"]["ncm"]["4"][4][0], abs=0.051)
    assert re.findall(r"^task (\d) of 5: 2 batches", err, re.MULTILINE) == list("12345")  # stderr is no terminal here
    assert "\r" not in err
    assert max(map(len, out.replace(str(folder), "").splitlines())) <= 110


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "feed", "line"),
    [
        ((), "fused", "views    ocm, made by fused"),
        (("--feed", "torch"), "torch", "views    ocm, made by torch"),
        (("--feed", "dali"), "dali", "views    ocm, made by dali"),
        (("--feed", "dali", "--set", "augment=scr"), "fused", f"views    scr, made by fused ({JITTER})"),
    ],
)
def test_what_makes_the_views_is_said_once_and_recorded(call, tiny, tmp_path, arguments, feed, line):
    if "dali" in arguments and _dali.obstacle():
        pytest.skip(_dali.obstacle())
    code, out, _ = call("run", *tiny, *arguments, "--out", tmp_path / "run")
    assert code == 0
    assert [shown for shown in out.splitlines() if shown.startswith("views")] == [line]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["config"]["feed"] == (arguments[1] if arguments else "auto")
    assert results["resolved"]["feed"] == feed


def test_written_configuration_repeats_the_run(call, finished, tmp_path):
    code, _, _ = call("run", "--config", finished / "config.json", "--out", tmp_path / "again")
    assert code == 0
    assert (tmp_path / "again" / "accuracy.csv").read_bytes() == (finished / "accuracy.csv").read_bytes()
    first, again = (json.loads((folder / "results.json").read_text()) for folder in (finished, tmp_path / "again"))
    assert first["weights_sha256"] == again["weights_sha256"]


@pytest.mark.slow
def test_default_folder_and_module(tmp_path, tiny):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mose_fast", "run", *tiny, "--seed", "3", "--preset", "paper"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "digits-mose-paper-m64-s3" / "results.json").is_file()


FLAGS = [s for s in all_settings("mose").values() if s.flag and s.name not in ("method", "preset", "evaluate_on")]


@pytest.mark.parametrize("setting", FLAGS, ids=lambda setting: setting.flag)
def test_a_flag_reaches_its_setting_and_no_other(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value = another(setting)
    config = dotted(settings(f"--{setting.flag}", *([] if setting.type == "bool" else [value])).to_dict())
    found = {name: kept for name, kept in config.items() if kept != dotted(RunConfig().to_dict())[name]}
    assert found == {setting.name: str(tmp_path / value) if setting.name == "stream.data_dir" else value}


def test_flags_that_want_others():
    assert settings("--preset", "paper", "--memory", 99) == RunConfig.create("paper", memory=99)
    assert settings("--method", "er") == RunConfig.create(method="er")
    held_out = RunConfig.create(evaluate_on="validation", stream={"validation": 0.1})
    assert settings("--evaluate-on", "validation", "--validation", 0.1) == held_out


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_flags_override_the_file_and_absent_flags_do_not(tmp_path, as_toml, suffix):
    written = RunConfig.create(
        memory=200, width=8, seed=4, stream={"name": "digits", "batch": 5}, options={"augment": "simclr"}
    )
    file = tmp_path / f"run.{suffix}"
    file.write_text(written.to_json() if suffix == "json" else as_toml(written))
    assert settings("--config", file) == written
    config = settings("--config", file, "--memory", 300, "--tasks", 2, "--set", "contrastive=last")
    assert (config.memory, config.width, config.seed) == (300, 8, 4)
    assert (config.stream.batch, config.stream.tasks) == (5, 2)
    assert (config.options.augment, config.options.contrastive) == ("simclr", "last")


@pytest.mark.parametrize("how", [("--preset", "paper"), ("--set", "preset=paper")])
def test_other_preset_beside_a_file_keeps_only_what_the_file_changed(tmp_path, how):
    file = tmp_path / "run.json"
    file.write_text(RunConfig.create(options={"temperature": 0.2}).to_json())
    config = settings("--config", file, *how)
    assert config.changes_from_preset() == {"temperature": 0.2}
    assert config.options.rsd_reduction == MOSE_PRESETS["paper"]["rsd_reduction"]


@pytest.mark.parametrize(
    ("text", "owner", "name", "value"),
    [
        ("augment=scr", "options", "augment", "scr"),
        ("lr=1e-2", "options", "lr", 0.01),
        ("attention=false", "options", "attention", False),
        ("per_class_cap=null", "options", "per_class_cap", None),
        ("expert=1", "options", "expert", "1"),
        ("stream.normalisation=null", "stream", "normalisation", None),
        ("train_on=final_memory", None, "train_on", "final_memory"),
    ],
)
def test_set(text, owner, name, value):
    config = settings("--stream", "split-cifar100", "--normalisation", "half", "--set", text)
    found = getattr(getattr(config, owner) if owner else config, name)
    assert found == value
    assert type(found) is type(value)


def test_set_is_repeatable_and_wins_over_a_flag():
    config = settings("--memory", 70, "--set", "memory=80", "--set", "new_extra=0", "--set", "contrastive=off")
    assert (config.memory, config.options.new_extra, config.options.contrastive) == (80, 0, "off")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch=5", "'stream.batch'"),
        ("options=5", "options is not a setting"),
        ("augment", "wanted NAME=VALUE"),
        ("attention=True", "options.attention is 'True'; wanted true or false"),
        ("augment=null", "options.augment is 'null'"),
    ],
)
def test_set_refuses(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        settings("--set", text)


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "pets").mkdir()
    (tmp_path / "digits").mkdir()
    assert settings("--stream", "pets").stream.name == str(tmp_path / "pets")
    assert settings("--stream", "./digits").stream.name == str(tmp_path / "digits")
    assert settings("--stream", "digits").stream.name == "digits"
    assert settings("--stream", "none.npz").stream.name == str(tmp_path / "none.npz")
    assert settings("--stream", "unknown").stream.name == "unknown"
    assert settings("--data-dir", "cache").stream.data_dir == str(tmp_path / "cache")
    assert settings("--data-dir", "~/cache").stream.data_dir == str(tmp_path / "home" / "cache")


def test_warnings_are_one_line(call, tiny, tmp_path):
    # Ten classes of digits, memory for four images: some class goes without.
    code, _, err = call("run", *tiny, "--memory", "4", "--set", "buffer_batch=4", "--out", tmp_path / "run")
    assert code == 0
    assert re.search(r"^warning: \d of \d+ classes seen have no sample in the memory of 4", err, re.MULTILINE)
    assert ".py:" not in err


def test_list(call):
    code, out, _ = call("list", "methods")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*METHODS, "file.py:Name"]
    for line, learner in zip(out.splitlines(), METHODS.values(), strict=False):
        assert (
            f"{learner.about.year}  " in line
            and f"{learner.about.cost:.2f}x" in line
            and learner.about.reference in line
        )
    code, out, _ = call("list", "streams")
    assert code == 0
    for name in streams.names():
        assert re.search(rf"^{name} +{re.escape(streams.summary(name))}$", out, re.MULTILINE)


def test_help_shows_meaning_and_defaults(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call("run", "--help")
    assert code == 0
    assert re.search(r"--memory N .*replay memory.*\[1000\]", out)
    assert re.search(r"--class-order-seed N .*\[the natural order\]", out)


def test_the_joint_bound_shows_one_task_and_all_accuracies(call, tiny, tmp_path):
    code, out, err = call("run", *tiny, "--method", "joint", "--out", tmp_path / "joint")
    assert code == 0
    assert re.search(r"^task 1 of 1: 10 batches", err, re.MULTILINE)
    assert out.count("accuracy in percent after") == 1 and "after task 5 of 5" in out
    row = re.search(r"^\* linear +1 +(.*)$", out, re.MULTILINE).group(1).split()
    assert len(row) == 6  # the mean and five tasks
