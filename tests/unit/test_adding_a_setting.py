"""The two changes in docs/adding_a_setting.md are small, and everything that the page names follows
from them.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT

DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "adding_a_setting.md").read_text(encoding="utf-8"), re.DOTALL)

# What the changed package says, as JSON.
ASK = """
import contextlib, io, json, sys, warnings
import torch
import mose_fast
from build_tools.settings_page import page
from mose_fast.app.cli import main
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.experiments.paper.plan import _departures
from mose_fast.learner.named_settings import telling_apart
from mose_fast.experiments.forecast import cost_key
from mose_fast.experiments.grid import grid_cells, read_axes
from mose_fast.runs.results import schema

warnings.simplefilter("ignore")
name, value, other, wrong = json.loads(sys.argv[1])
said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    main(["run", "--help"])
def refusal(act):
    try:
        act()
    except ConfigError as error:
        return str(error)
config = RunConfig.create(**{name: value})
assert RunConfig.from_dict(json.loads(config.to_json())) == config != RunConfig()
usual = RunConfig.create(**{name: other})
results = mose_fast.run(
    stream={"name": "digits", "limit_per_task": 10, "tasks": 1}, width=1, memory=64, device="cpu", **{name: value}
)
print(json.dumps({
    "help": " ".join(said.getvalue().split()),
    "page": page(),
    "refusal": refusal(lambda: RunConfig.create(**{name: wrong})),
    "grid": refusal(lambda: grid_cells(read_axes([f"{name}={value},{other}"], ["mose"]), {})),
    "apart": name in telling_apart("mose"),
    "departs": _departures(config, usual),
    "same cost": cost_key(config) == cost_key(usual),
    "schema": schema()["$defs"]["config"]["properties"][name],
    "resolved": schema()["properties"]["resolved"]["properties"].get(name),
    "signature": str(mose_fast.run.__signature__),
    "run": results["config"][name],
    "became": results["resolved"].get(name, torch.get_num_threads()),
}))
"""


def files(diff):
    return re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)


@pytest.fixture
def changed(tmp_path):
    """A function that applies a diff to a copy of the package and returns what the copy says."""

    def ask(diff, *arguments):
        for name in ("mose_fast", "build_tools"):
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        git = {"input": diff, "text": True, "cwd": tmp_path, "capture_output": True}
        applied = subprocess.run(["git", "apply", "-"], **git)
        assert applied.returncode == 0, f"docs/adding_a_setting.md is out of date: {applied.stderr}"
        command = [sys.executable, "-W", "ignore", "-c", ASK, json.dumps(arguments)]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout.splitlines()[-1])

    return ask


def new_lines(page):
    return set(page.splitlines()) - set((ROOT / "docs" / "settings.md").read_text(encoding="utf-8").splitlines())


def test_each_change_touches_at_most_three_files():
    assert len(DIFFS) == 2
    for diff in DIFFS:
        assert len({*files(diff), "docs/settings.md"}) <= 3
        assert all((ROOT / name).is_file() for name in files(diff))


@pytest.mark.slow
def test_a_new_value(changed):
    said = changed(DIFFS[0], "precision", "bf16_sums", "fp32", "fp8")
    assert "| bf16_sums (partial sums of matrix products too) [auto]" in said["help"]
    (row,) = new_lines(said["page"])
    assert row.startswith("| `precision` |") and r"\| bf16_sums (partial sums of matrix products too) |" in row
    assert said["refusal"] == "precision is 'fp8'; wanted one of 'auto', 'fp32', 'tf32', 'bf16', 'bf16_sums'"
    assert said["grid"] is None and said["apart"] and said["departs"] == [] and not said["same cost"]
    assert said["schema"]["enum"][-1] == said["resolved"]["enum"][-1] == "bf16_sums"
    assert (said["run"], said["became"]) == ("bf16_sums", "bf16_sums")


@pytest.mark.slow
def test_a_new_setting(changed):
    said = changed(DIFFS[1], "threads", 2, 1, 0)
    assert "--threads N threads of the CPU [as PyTorch chooses]" in said["help"]
    (row,) = new_lines(said["page"])
    assert (
        row == "| `threads` | null | `--threads` | threads of the CPU; null: as PyTorch chooses | execution | choice |"
    )
    assert said["refusal"] == "threads is 0; wanted an integer of at least 1"
    assert said["grid"].startswith("threads is in the grid; wanted it the same for all runs")
    assert not said["apart"] and said["departs"] == [] and not said["same cost"]
    assert said["schema"] == {
        "description": "threads of the CPU; null: as PyTorch chooses",
        "type": ["integer", "null"],
        "minimum": 1,
    }
    assert "threads: int | None = None" in said["signature"]
    assert (said["run"], said["became"]) == (2, 2)
