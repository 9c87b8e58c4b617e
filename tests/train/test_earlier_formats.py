"""A run folder and a table of runs as commit b2cdeb9 wrote them are read: results of format 1, a
table of format 2, and MOSE's options under their names of then.

``tests/golden/format_1``: a run on ``data.npz`` (60 images of 8x8 pixels, 4 classes, 2 tasks) with
width 1, memory 32, scl=last, ce_buffer_weight=1.5, buffer_batch=16, projection=4 and new_extra=4,
stopped after batch 3 and resumed, and the table that ``Store.add`` made of it.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import jsonschema
import pandas
import pytest

from mose_fast.cli import main
from mose_fast.config import ConfigError, RunConfig
from mose_fast.report.page import write_report
from mose_fast.sweep.store import FORMAT, STORE, Store, collect, read_run, read_store, setting_id
from mose_fast.train import RunError, resume
from mose_fast.train.results import SCHEMA_VERSION, schema

EARLIER = Path(__file__).parents[1] / "golden" / "format_1"
CHANGES = {"buffer_batch": 16, "buffer_weight": 1.5, "contrastive": "last", "new_extra": 4, "projection": 4}


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(EARLIER, tmp_path / "earlier"))


def test_it_is_of_the_format_before(folder):
    results = json.loads((folder / "run" / "results.json").read_text())
    assert (results["schema_version"], SCHEMA_VERSION) == (1, 2)
    assert {"ce", "scl", "distil", "separate_ce", "ce_buffer_weight"} <= results["config"]["options"].keys()
    assert results["resumed"] == 1


def test_its_configuration_is_read(folder):
    config = RunConfig.load(folder / "run" / "config.json")
    assert config.changes_from_preset() == CHANGES
    assert (config.memory, config.width, config.stream.tasks) == (32, 1, 2)


def test_its_results_are_read_and_fit_the_schema(folder):
    row, results = read_run(folder / "run")
    assert json.loads(row["changes"]) == results["changes_from_preset"] == CHANGES
    assert row["setting"] == setting_id(RunConfig.load(folder / "run" / "config.json"))
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(results)) == []


def test_its_table_is_read_and_added_to(folder):
    before = (folder / STORE).read_bytes()
    table = read_store(folder)
    assert (folder / STORE).read_bytes() == before
    Store(folder)
    with closing(sqlite3.connect(folder / STORE)) as database:
        assert database.execute("PRAGMA user_version").fetchone()[0] == FORMAT == 6
    for found in (table, read_store(folder), collect(folder)[0]):
        (row,) = found.to_dict("records")
        assert row["setting"] == read_run(folder / "run")[0]["setting"]
        assert json.loads(row["changes"]) == CHANGES
        assert RunConfig.from_dict(json.loads(row["config"])).options.contrastive == "last"


# What tables of earlier formats lack, and what is read for it.
LACKING = dict.fromkeys(("eager_steps", "images_kept", "bytes_kept", "code", "method_version", "native_backend"))
LACKING |= {"kernels": None, "switched_off": ""}
LACKING |= {"kind": "tasks", "kind_seed": 0, "evaluate_on": "test", "validation": None}


@pytest.mark.parametrize(("number", "lacking"), [(3, 12), (4, 10), (5, 8)])
def test_a_table_of_a_later_format_is_read_and_added_to(folder, number, lacking):
    collect(folder)
    with closing(sqlite3.connect(folder / STORE)) as database, database:
        for column in list(LACKING)[:lacking]:
            database.execute(f"ALTER TABLE runs DROP COLUMN {column}")
        database.execute(f"PRAGMA user_version = {number}")
    for add in (False, True):
        if add:
            Store(folder).add(folder / "run")
        (row,) = read_store(folder).to_dict("records")
        assert all(pandas.isna(row[name]) if value is None else row[name] == value for name, value in LACKING.items())
        assert row["setting"] == read_run(folder / "run")[0]["setting"]


def test_it_is_reported_and_exported(folder, monkeypatch):
    monkeypatch.setattr("mose_fast.report.page.figures", lambda groups: [])
    page, skipped = write_report([folder])
    assert skipped == [] and "mose released" in page.read_text()
    assert main(["export", str(folder / "run"), "--out", str(folder / "export")]) == 0


def test_it_is_not_continued_by_other_code(folder, monkeypatch):
    """The settings are the same by their new names; what differs is the code."""
    monkeypatch.chdir(folder)
    (folder / "run" / "results.json").unlink()
    with pytest.raises(RunError, match="was written by other code"):
        resume("run")


def test_a_run_is_repeated_from_its_configuration(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert main(["run", "--config", "run/config.json", "--set", "contrastive=all", "--out", "again"]) == 0
    assert RunConfig.load(folder / "again" / "config.json").changes_from_preset() == {
        name: value for name, value in CHANGES.items() if name != "contrastive"
    }


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("ce", "cross_entropy"),
        ("scl", "contrastive"),
        ("distil", "distillation"),
        ("separate_ce", "separate_cross_entropy"),
        ("ce_buffer_weight", "buffer_weight"),
    ],
)
def test_in_python_an_earlier_name_is_refused_with_the_name_of_now(earlier, now):
    with pytest.raises(ConfigError, match=f"options.{earlier} is not a setting; did you mean '{now}'"):
        RunConfig.create(options={earlier: "off"})
    with pytest.raises(ConfigError, match=f"^{earlier} is not a setting; did you mean '{now}'"):
        RunConfig.create(**{earlier: "off"})
