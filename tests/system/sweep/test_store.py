"""The table of runs holds what the folders hold, whole rows only, and names every folder that it
cannot trust.
"""

import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from mose_fast.runs.store import COLUMNS, STORE, RunDamaged, Store, collect, read_run, read_store, setting_id
from mose_fast.settings.run import RunConfig
from mose_fast.train import RunError


@pytest.fixture
def config(settings):
    return RunConfig.create(**settings)


def test_row_says_what_results_say(finished_run, config):
    row, results = read_run(finished_run)
    assert list(row) == list(COLUMNS)
    assert row["acc"] == results["acc"]["ncm"]["4"]
    assert json.loads(row["metrics"])["linear"]["mean_logit"]["af_paper"] == results["af_paper"]["linear"]["mean_logit"]
    assert (row["method"], row["memory"], row["tasks"], row["threads"], row["gpu"]) == ("mose", 64, 5, 1, None)
    assert RunConfig.from_dict(json.loads(row["config"])) == config
    assert row["data"] == results["config"]["stream"]["fingerprint"]
    phases = ("train", "evaluate", "checkpoint", "capture")
    assert row["seconds_total"] == pytest.approx(sum(row[f"seconds_{phase}"] for phase in phases), abs=0.01)
    assert row["seconds_wall"] == pytest.approx(row["seconds_total"] + row["seconds_other"], abs=0.01)
    assert row["seconds_other"] > 0


def test_precision_is_what_the_run_had(finished_run, tmp_path):
    copy = shutil.copytree(finished_run, tmp_path / "copy")
    assert read_run(copy)[0]["precision"] == "fp32"
    results = json.loads((copy / "results.json").read_text())
    assert results["config"]["precision"] == "auto"
    results["resolved"]["precision"] = "bf16"
    (copy / "results.json").write_text(json.dumps(results))
    assert read_run(copy)[0]["precision"] == "bf16"


def test_setting_is_all_but_the_seed(config):
    assert setting_id(config) == setting_id(dataclasses.replace(config, seed=9))
    assert setting_id(config) != setting_id(dataclasses.replace(config, memory=65))


@pytest.fixture
def finish(tmp_path, pretend, config):
    """A function that makes the finished run of a seed in a folder, and gives its row."""

    def make(name, seed=0):
        pretend(tmp_path / name, dataclasses.replace(config, seed=seed))
        return read_run(tmp_path / name)[0]

    return make


def test_added_and_collected_tables_are_the_same(tmp_path, finish):
    added = Store(tmp_path)
    for row in (finish("seed-0"), finish("seed-1", 1)):
        added.add(row)
        added.add(row)
    before = read_store(tmp_path)
    assert before["folder"].tolist() == ["seed-0", "seed-1"]
    assert before["seed"].tolist() == [0, 1]
    assert before["acc"].dtype == "float64"
    after, skipped = collect(tmp_path)
    assert skipped == []
    assert after.equals(before)


def test_rows_are_only_added_and_the_newest_counts(tmp_path, finish):
    Store(tmp_path).add(finish("run"), finish("run", 5))
    with closing(sqlite3.connect(tmp_path / STORE)) as database:
        assert database.execute("SELECT seed FROM runs ORDER BY rowid").fetchall() == [(0,), (5,)]
    assert read_store(tmp_path)["seed"].tolist() == [5]


def test_a_crash_leaves_no_half_row(tmp_path, finish):
    table, row = Store(tmp_path), finish("run")
    with pytest.raises(RunError, match="cannot write the table of runs"):
        table.add(row, {"folder": "half", "results_sha256": ""})
    assert len(read_store(tmp_path)) == 0
    table.add(row)
    assert len(read_store(tmp_path)) == 1


# With a cache of one page, what a transaction changes is in the file before its end.
KILLED_WRITER = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA cache_size = 1")
for _ in range(3):
    database.execute("INSERT INTO runs SELECT * FROM runs")
    database.execute("UPDATE runs SET seed = 99")
os._exit(0)
"""


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_what_a_killed_writer_began_is_undone(tmp_path, finish, damaged):
    Store(tmp_path).add(*(finish(f"seed-{seed}", seed) for seed in range(4)))
    before = read_store(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED_WRITER, tmp_path / STORE], check=True)
    journal = tmp_path / f"{STORE}-journal"
    assert journal.exists() and b"seed-0" in journal.read_bytes()
    if damaged:  # what the journal holds belongs to a file that is replaced
        (tmp_path / STORE).write_bytes(b"no database" * 999)
        collect(tmp_path)
    assert read_store(tmp_path).equals(before)
    assert collect(tmp_path)[0].equals(before)


def change_results(change):
    def damage(folder):
        results = json.loads((folder / "results.json").read_text())
        change(results)
        (folder / "results.json").write_text(json.dumps(results))

    return damage


def truncate(name):
    def damage(folder):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])

    return damage


DAMAGES = {
    "results cut": (truncate("results.json"), "truncated or no JSON"),
    "configuration cut": (truncate("config.json"), "truncated or no JSON"),
    "table cut": (truncate("accuracy.csv"), "accuracy.csv does not hold the accuracies"),
    "no results": (lambda folder: (folder / "results.json").unlink(), "not finished"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
    "no table": (lambda folder: (folder / "accuracy.csv").unlink(), "accuracy.csv cannot be read"),
    "better ACC": (change_results(lambda r: r["acc"]["ncm"].update({"4": 0.99})), "acc of ncm, expert 4 does not"),
    "better matrix": (
        change_results(lambda r: r["accuracy"]["ncm"]["4"][-1].__setitem__(0, 1.0)),
        "accuracy.csv does not hold",
    ),
    "other memory": (
        change_results(lambda r: r["config"].update(memory=5000)),
        "config.json and the configuration in results.json differ",
    ),
    "no threads": (change_results(lambda r: r.pop("threads")), "results.json is incomplete"),
    "newer": (change_results(lambda r: r.update(schema_version=99)), "schema_version 99; wanted 1"),
    "a list": (lambda folder: (folder / "results.json").write_text("[]"), "schema_version None; wanted 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_edited_and_truncated_folders_are_skipped_and_named(tmp_path, finish, damage):
    finish("good")
    finish("bad", 1)
    harm, message = DAMAGES[damage]
    harm(tmp_path / "bad")
    with pytest.raises(RunDamaged, match=message):
        read_run(tmp_path / "bad")
    table, skipped = collect(tmp_path)
    assert table["folder"].tolist() == ["good"]
    assert len(skipped) == 1 and skipped[0].startswith(f"{tmp_path / 'bad'}: ")


def test_a_database_of_something_else_is_not_replaced(tmp_path, finished_run):
    shutil.copytree(finished_run, tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / STORE)) as database, database:
        database.execute("CREATE TABLE photographs (x)")
    before = (tmp_path / STORE).read_bytes()
    with pytest.raises(RunError, match=r"runs.sqlite is a database of something else \(it holds photographs\)"):
        collect(tmp_path)
    assert (tmp_path / STORE).read_bytes() == before
    (tmp_path / STORE).write_bytes(b"a damaged table is built anew")
    assert len(collect(tmp_path)[0]) == 1


def test_tables_that_are_none(tmp_path):
    with pytest.raises(RunError, match=r"there is no table of runs .*build it with: mose-fast collect"):
        read_store(tmp_path)
    with pytest.raises(RunError, match="is no folder"):
        collect(tmp_path / "missing")
    with pytest.raises(RunError, match="there is no run below"):
        collect(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / STORE).write_text("this is no database, but long enough to look like a file of one" * 20)
    with pytest.raises(RunError, match="cannot be read"):
        read_store(tmp_path)
    with pytest.raises(RunError, match="cannot write the table"):
        Store(tmp_path)
    (tmp_path / STORE).unlink()
    with closing(sqlite3.connect(tmp_path / STORE)) as database, database:
        database.execute("CREATE TABLE runs (x)")
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(RunError, match="has format 99; wanted 1"):
        read_store(tmp_path)
    table, _ = collect(tmp_path)
    assert len(table) == 0


def test_a_full_disk_leaves_the_old_table(tmp_path, finish, monkeypatch):
    finish("run")
    collect(tmp_path)
    before = (tmp_path / STORE).read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=r"No space left on device.* Free some space, then collect again"):
        collect(tmp_path)
    assert (tmp_path / STORE).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", STORE]
