"""The store keeps every measured number, in the file of its GPU, and the table says what the rows
say.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest

from bench.store import COLUMNS, append, file_name, main, read_csv, row_of, table
from tests.paths import ROOT


def make_row(**changes: str) -> dict[str, str]:
    row = dict.fromkeys(COLUMNS, "")
    row.update(
        op="sort",
        impl="native",
        direction="forward",
        shape="N=384 K=100",
        dtype="float32",
        device="cpu",
        median_us="20.0",
    )
    row.update(
        p20_us="19.0", p80_us="22.5", processor="A, B (R) CPU", torch="2.14", cuda="13.0", python="3.11", threads="2"
    )
    return {**row, "commit": "abc", "date": "2026-01-02", **changes}


@pytest.mark.slow
def test_a_run_of_the_benchmarks_ends_in_the_store(tmp_path):
    written = tmp_path / "bench.json"
    chosen = ["bench/bench_null.py", "-k", "reference and 40", "--devices=cpu", "--compiled=off"]
    chosen += [f"--benchmark-json={written}", f"--rows={tmp_path / 'at-once'}"]
    # pytest-benchmark measures nothing where it believes to be a worker of pytest-xdist.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = inherited | {"MOSE_FAST_COMMIT": "feed", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], cwd=ROOT, env=environment, check=True
    )
    assert main([str(tmp_path / "at-once" / "cpu.csv"), "--results", str(tmp_path / "results")]) == 0
    with open(tmp_path / "results" / "cpu.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["op"], row["impl"], row["direction"], row["shape"]) for row in rows] == [
        ("null", "reference", "forward", "N=40 P=128"),
        ("null", "reference", "forward+backward", "N=40 P=128"),
    ]
    measured = json.loads(written.read_text())["benchmarks"]
    for row, benchmark in zip(rows, measured, strict=True):
        assert float(row["median_us"]) == pytest.approx(1e6 * benchmark["stats"]["median"], rel=1e-3, abs=1e-3)
        assert float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
        assert (row["commit"], row["threads"], row["launches"], row["peak_bytes"]) == ("feed", "1", "", "")


def test_rows_of_a_csv_file_that_was_cut_off(tmp_path, capsys):
    append([make_row(), make_row(impl="reference")], tmp_path)
    text = (tmp_path / "cpu.csv").read_text()
    assert read_csv(text[:-5]) == [make_row()]
    for other in ("", "op,time\nsort,3\n"):
        with pytest.raises(ValueError, match="wanted 'op,impl"):
            read_csv(other)
    assert main([str(tmp_path / "cpu.csv"), "--show", "--results", str(tmp_path / "none")]) == 0
    assert "added" not in capsys.readouterr().out and not (tmp_path / "none").exists()


def test_rows_are_added_and_never_lost(tmp_path):
    first, second = make_row(), make_row(impl="reference", median_us="1e3")
    assert append([first], tmp_path / "new") == [tmp_path / "new" / "cpu.csv"]
    append([second, first], tmp_path / "new")
    with open(tmp_path / "new" / "cpu.csv") as file:
        assert list(csv.DictReader(file)) == [first, second, first]


def test_each_gpu_has_its_file(tmp_path):
    gpu = make_row(device="cuda", processor="NVIDIA H100 80GB HBM3", launches="4")
    assert file_name(gpu) == "nvidia-h100-80gb-hbm3.csv"
    assert sorted(path.name for path in append([gpu, make_row()], tmp_path)) == ["cpu.csv", "nvidia-h100-80gb-hbm3.csv"]


def test_a_file_with_other_columns_is_left_alone(tmp_path):
    (tmp_path / "cpu.csv").write_text("op,time\nsort,3\n")
    with pytest.raises(ValueError, match=r"cpu.csv has the columns 'op,time'; wanted 'op,impl"):
        append([make_row(device="cuda", processor="X"), make_row()], tmp_path)
    assert (tmp_path / "cpu.csv").read_text() == "op,time\nsort,3\n"
    assert not (tmp_path / "x.csv").exists()


def test_a_row_takes_numbers_and_gaps():
    info = {**make_row(), "median_us": 20.5, "launches": 4, "peak_bytes": None}
    del info["target_us"]
    row = row_of(info)
    assert (row["median_us"], row["launches"], row["peak_bytes"], row["target_us"]) == ("20.5", "4", "", "")


def test_table():
    rows = [
        make_row(
            device="cuda",
            median_us="50",
            target_us="40",
            launches="4",
            peak_bytes="2048",
            bytes_needed="30000000",
            bytes_moved="45000000",
            copy_bytes_per_us="1000000",
        ),  # a copy of 30 MB would take 30 us
        make_row(device="cuda", median_us="120", impl="compiled"),
        make_row(device="cuda", median_us="999", impl="reference"),
        make_row(device="cuda", median_us="250", impl="reference"),
        make_row(shape="N=1", median_us="40", target_us="40.0"),
        make_row(shape="N=2", impl="reference", median_us="7"),
    ]
    head, *lines = [" ".join(line.split()) for line in table(rows).splitlines()]
    assert head.startswith("op direction shape dtype device reference us compiled us native us")
    assert lines == [
        "sort forward N=384 K=100 float32 cuda 250.0 120.0 50.0 5.00 40 MISSED 4 2 30.0 45.0 0.60",
        "sort forward N=1 float32 cpu - - 40.0 - 40 met - - - -",
        "sort forward N=2 float32 cpu 7.0 - - - - - - - -",
    ]
    assert len({len(line) for line in table(rows).splitlines()}) == 1


@pytest.mark.parametrize(
    ("text", "message"), [(",".join(COLUMNS) + "\n", "no benchmark in it"), ("", "the columns are 'none'")]
)
def test_main_refuses(tmp_path, capsys, text, message):
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "b.csv"), "--results", str(tmp_path)])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cpu.csv").exists()
    append([make_row()], tmp_path / "rows")
    (tmp_path / "cpu.csv").write_text("other\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows" / "cpu.csv"), "--results", str(tmp_path)])
    assert "cpu.csv has the columns 'other'" in capsys.readouterr().err
