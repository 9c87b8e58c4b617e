"""What the command for a GPU must find for every op with a CUDA kernel."""

from __future__ import annotations

import pytest

from bench.collect import collect, missing, parse_ids


@pytest.fixture
def root(tmp_path):
    for folder in ("tests/kernels", "tests/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/kernels/cases_sort.cpp").touch()
    (tmp_path / "tests/gpu/test_sort.py").write_text("from mose_fast.ops.sort import sort\n")
    return tmp_path


TESTS = ["tests/gpu/test_sort.py::test_equals_cpu[3]"]
BENCHMARKS = ["bench/bench_sort.py::bench_sort[native-cuda-384]"]


def test_an_op_with_everything(root):
    assert missing(root, ["sort"], TESTS, BENCHMARKS) == []


def test_each_missing_thing_is_named(root):
    assert missing(
        root, ["sort"], [], ["bench/bench_sort.py::bench_sort[native-cpu-384]", "bench/bench_sort_all.py::x[cuda]"]
    ) == [
        "sort: no test in tests/gpu imports mose_fast.ops.sort",
        "sort: no benchmark on a GPU; wanted bench/bench_sort.py",
    ]
    (root / "tests/kernels/cases_sort.cpp").unlink()
    (root / "tests/gpu/test_sort.py").write_text("from mose_fast.ops.sort_all import sort\n")
    assert missing(root, ["sort"], TESTS, BENCHMARKS) == [
        "sort: kernel_check has no cases for it; wanted tests/kernels/cases_sort.cpp",
        "sort: no test in tests/gpu imports mose_fast.ops.sort",
    ]


def test_an_op_imported_by_its_room(root):
    (root / "tests/gpu/test_sort.py").write_text("from mose_fast.ops import null, sort\n")
    assert missing(root, ["sort", "null"], TESTS, [*BENCHMARKS, "bench/bench_null.py::bench_null[cuda]"]) == [
        "null: kernel_check has no cases for it; wanted tests/kernels/cases_null.cpp"
    ]


def test_parse_ids():
    text = "tests/gpu/test_a.py::test_x[1-a b]\n\n2 tests collected in 0.1s\nERROR tests/gpu/test_b.py - E\n"
    assert parse_ids(text) == ["tests/gpu/test_a.py::test_x[1-a b]"]


def test_collect_lists_and_tells_what_cannot_be_imported(tmp_path):
    (tmp_path / "test_good.py").write_text("def test_it(): assert 1\n")
    ids, error = collect([str(tmp_path)])
    assert [test.split("::")[1] for test in ids] == ["test_it"]
    assert error == ""
    (tmp_path / "test_lost.py").write_text("import no_such_module\n")
    _, error = collect([str(tmp_path)])
    assert "no_such_module" in error
