"""Whole studies with real workers: what they leave, what they refuse, and that a killed one
continues to the same trials.
"""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mose_fast.app.cli import main
from mose_fast.experiments.place import Place
from mose_fast.experiments.tune.tuning import tune
from mose_fast.present.report import write_report
from mose_fast.runs.store import read_run
from mose_fast.settings.run import RunConfig

pytestmark = pytest.mark.slow

#: Runs of nine batches in three tasks.
CHANGES = {
    "stream.tasks": 3,
    "stream.validation": 0.25,
    "width": 1,
    "memory": 20,
    "options.buffer_batch": 8,
    "device": "cpu",
}
TRIALS, SEEDS = 5, (0, 1)


def changes(data):
    return {**CHANGES, "stream.name": str(data)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images of two brightnesses a task, without a test image: to read one would fail."""
    y = np.arange(120) % 6
    x = np.random.default_rng(0).integers(0, 60, (120, 8, 8, 3)) + 30 * y[:, None, None, None]
    path = tmp_path_factory.mktemp("data") / "train_only.npz"
    np.savez(path, x_train=x.astype(np.uint8), y_train=y)
    return path


@pytest.fixture(scope="module")
def study(tmp_path_factory, data):
    """A finished study: its folder, what it returned and what it said."""
    out, said = tmp_path_factory.mktemp("study") / "out", []
    return out, study_in(out, data, said.append), said


def study_in(out, data, say=lambda line: None, **more):
    """With one worker: to start one takes most of the time."""
    more = {"trials": TRIALS, "seeds": SEEDS, "place": Place(workers=1), **more}
    return tune("er", out=out, changes=changes(data), say=say, **more)


def trials_of(out):
    with (out / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_trial_has_its_runs_on_held_out_images(study):
    out, tuned, _ = study
    rows = trials_of(out)
    assert [row["trial"] for row in rows] == [str(number) for number in range(TRIALS)]
    assert {row["state"] for row in rows} <= {"complete", "stopped"}
    for row in rows:
        accuracies = []
        for seed in SEEDS:
            folder = out / f"trial-{int(row['trial']):03d}_seed-{seed}"
            config = RunConfig.load(folder / "config.json")
            assert (config.evaluate_on, config.stream.validation, config.seed) == ("validation", 0.25, seed)
            assert config.options.lr == pytest.approx(float(row["options.lr"]), rel=0.01)
            if row["state"] == "complete":
                accuracies.append(100 * read_run(folder)[0]["acc"])
        if accuracies:
            assert float(row["ACC"]) == pytest.approx(np.mean(accuracies), abs=0.06)
    best = max(float(row["ACC"]) for row in rows if row["ACC"])
    assert 100 * tuned.accuracy == pytest.approx(best, abs=0.06) and tuned.trials == TRIALS
    # The first trial has the method's own settings.
    assert (float(rows[0]["options.lr"]), float(rows[0]["options.weight_decay"])) == (1e-3, 1e-4)


def test_the_best_settings_run_on_all_images_and_are_marked_in_a_report(study, data, tmp_path, monkeypatch):
    _, tuned, _ = study
    config = RunConfig.load(tuned.config)
    assert {f"options.{name}": getattr(config.options, name) for name in ("lr", "weight_decay")} == tuned.best
    assert (config.evaluate_on, config.stream.validation, config.stream.fingerprint) == ("test", None, None)
    assert (config.memory, config.width, config.options.buffer_batch, config.stream.tasks) == (20, 1, 8, 3)
    assert config.tuned == "5 trials of 2 seeds on 25 % of the training images of train_only.npz"
    with np.load(data) as arrays:
        whole = tmp_path / "whole.npz"
        np.savez(whole, **arrays, x_test=arrays["x_train"], y_test=arrays["y_train"])
    out = tmp_path / "runs" / "best"
    assert main(["run", "--config", str(tuned.config), "--stream", str(whole), "--out", str(out)]) == 0
    monkeypatch.setattr("mose_fast.present.report.figures", lambda groups: [])
    page = write_report([tmp_path / "runs"])[0].read_text()
    assert "Tuned by mose-fast tune (5 trials of 2 seeds on 25 % of the training images of train_only.npz)" in page


def test_it_forecasts_and_says_how_sure_it_is(study):
    out, tuned, said = study
    text = "\n".join(said)
    assert "5 trials of 2 seeds in" in text and "at most about" in text
    assert "options.lr: 0.0001 to 0.1, logarithmic, by itself 0.001" in text
    assert all(line in text for line in tuned.sure) and "2 common seeds" in tuned.sure[0]
    assert "mose-fast run --config" in said[-1]
    names = {path.name for path in out.iterdir() if path.is_file()}
    assert {"best.toml", "trials.csv", "trials.md", "history.svg", "slices.svg", "study.sqlite"} <= names
    assert b"<svg" in (out / "history.svg").read_bytes()


def test_a_finished_study_only_says_again_what_it_found(study, data):
    out, tuned, _ = study
    before = {path: text for path, text in contents(out).items() if path.parent != out}
    assert study_in(out, data) == tuned
    assert {path: text for path, text in contents(out).items() if path.parent != out} == before


def test_trials_of_other_code_and_machines_are_told(study, data, tmp_path):
    whole, tuned, _ = study
    assert tuned.cautions == ()
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    results = out / "trial-000_seed-1" / "results.json"
    values = json.loads(results.read_text())
    torch = values["versions"]["torch"]
    values["versions"]["torch"], values["native_backend"] = "1.0", None
    results.write_text(json.dumps(values))
    said = []
    again = study_in(out, data, said.append)
    (version, library) = again.cautions
    assert version.startswith(f"caution: the version of torch differs: {torch} (trial-000_seed-0, trial-001_seed-0, ")
    assert version.endswith(", 1.0 (trial-000_seed-1)") and library.endswith(", none (trial-000_seed-1)")
    assert {version, library} <= {*said} and f"# {version}\n" in again.config.read_text()
    assert version.removeprefix("caution: ") in (out / "trials.md").read_text()
    assert RunConfig.load(again.config) == RunConfig.load(tuned.config)


def command_of(data, out, *more):
    """The command of the study; a setting in ``more`` replaces the study's."""
    found = ["tune", "--method", "er", "--trials", str(TRIALS), "--workers", "1", "--out", str(out), *more]
    for name, value in changes(data).items():
        if not any(word.startswith(f"{name}=") for word in more):
            found += ["--set", f"{name}={value}"]
    return found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--space", "SPACE"), "has other space (options.lr is"),
        (("--seeds", "0,2"), "has other seeds ([0, 1] there and [0, 2] here)"),
        (("--set", "memory=30"), "has other settings (memory is 20 there and 30 here)"),
    ],
)
def test_a_study_is_not_continued_with_other_settings(study, data, tmp_path, capsys, more, message):
    out, before = study[0], contents(study[0])
    space = tmp_path / "space.toml"
    space.write_text("[space]\nlr = { low = 1e-3, high = 0.1, log = true }")
    more = [str(space) if word == "SPACE" else word for word in more]
    assert main(command_of(data, out, *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and contents(out) == before


def test_trials_that_all_fail_leave_no_settings(data, tmp_path, capsys):
    (tmp_path / "space.toml").write_text("[space]\nlr = [1e30, 1e31]\n")
    out = tmp_path / "out"
    more = ("--space", str(tmp_path / "space.toml"), "--trials", "2", "--seeds", "0")
    assert main(command_of(data, out, *more)) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "none of the 2 trials came to its end (2 failed), so nothing was tuned" in line
    assert not (out / "best.toml").exists()


def test_a_dry_run_writes_nothing(data, tmp_path):
    said = []
    assert study_in(tmp_path / "out", data, said.append, dry_run=True) is None
    assert "5 trials of 2 seeds" in said[1] and not (tmp_path / "out").exists()


def test_a_study_that_is_killed_continues_to_the_same_trials(study, data, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mose_fast", *command_of(data, out, "--seeds", "0-1")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    # In the second of five trials: one of its two runs has finished.
    while len(list(out.glob("trial-*/results.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert trials_of(out) == trials_of(study[0])
    assert (out / "best.toml").read_text() == (study[0] / "best.toml").read_text()
