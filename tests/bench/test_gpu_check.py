"""bench/gpu_check.sh with stand-ins for the tools of a machine with a card: order, failures, time limits, the table last."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("timeout"), reason="needs timeout of GNU coreutils")

# Each stand-in notes its call; FAIL and SLEEP hold words, and a call that contains one fails or takes too long.
STAND_IN = """#!/bin/bash
call="$(basename "$0") $*"
echo "$call" >>"$CALLS"
for word in $SLEEP; do if [[ "$call" == *"$word"* ]]; then sleep 30; fi; done
for word in $FAIL; do if [[ "$call" == *"$word"* ]]; then echo "it broke"; exit 3; fi; done
case "$call" in
  nvidia-smi*) echo "9.0, NVIDIA H100 80GB HBM3" ;;
  cmake*--build*) mkdir -p build/card && cp "$0" build/card/kernel_check ;;
  python*--benchmark-json=*) echo "{}" >"${call##*--benchmark-json=}" ;;
  python*bench.store*) echo "op  native us"; echo "op,impl" >>bench/results/nvidia-h100-80gb-hbm3.csv ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A function that runs the script and returns (exit status, output, calls); its keywords are environment variables."""
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    (tree / "bench" / "results").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(ROOT / "bench" / "gpu_check.sh", tree / "bench")
    for name in ("bench_a.py", "bench_b.py"):
        (tree / "bench" / name).write_text("def bench_it(measure): ...\n")
    (tree / "bench" / "bench_script.py").write_text("print('no benchmark of pytest')\n")
    for name in ("nvidia-smi", "nvcc", "cmake", "ninja", "compute-sanitizer", "python"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)

    def run(*arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        calls = tmp_path / "calls"
        calls.write_text("")
        given = {"CALLS": str(calls), "PYTHON": "python", "PATH": f"{tools}:{os.environ['PATH']}", **environment}
        inherited = {name: value for name, value in os.environ.items() if name not in ("OUT", "LIMIT")}
        command = [tree / "bench" / "gpu_check.sh", *arguments]
        done = subprocess.run(command, env={**inherited, **given}, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()

    run.tree, run.tools = tree, tools
    return run


def test_all_steps_in_order_and_the_table_last(machine, tmp_path):
    status, output, calls = machine(OUT=str(tmp_path / "out"))
    assert status == 0, output
    text = "\n".join(calls)
    places = [
        text.index(words)
        for words in (
            "nvidia-smi", "cmake --build build/card --target kernel_check", "python -W error", "kernel_check \n", "--tool memcheck",
            "--tool racecheck", "--tool initcheck", "pytest tests/gpu", "pytest bench/bench_a.py", "pytest bench/bench_b.py",
            "bench.compare_step", "mose_fast bench", "bench.store",
        )
    ]  # fmt: skip
    assert places == sorted(places)
    assert "bench_script" not in text
    assert "-m pip install --no-build-isolation --no-deps" in text
    assert "-DMOSE_FAST_ARCHS_WANTED=9.0" in text
    assert output.endswith("op  native us\n")
    assert "FAILED" not in output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "log.txt", "nvidia-h100-80gb-hbm3.csv", "nvidia-h100-80gb-hbm3.txt",
    ]  # fmt: skip
    assert (machine.tree / "bench/results/nvidia-h100-80gb-hbm3.txt").read_text() == "op  native us\n"


def test_a_failed_check_is_told_and_the_rest_still_runs(machine):
    status, output, calls = machine(FAIL="racecheck bench_a.py")
    assert status == 1
    assert [line.split()[-1] for line in output.splitlines() if "FAILED: exit status 3" in line] == ["3", "3"]
    assert "it broke" in output
    store = next(call for call in calls if "bench.store" in call)
    assert "bench_b.json" in store
    assert "bench_a.json" not in store
    assert output.endswith("op  native us\n")


def test_nothing_runs_on_a_library_that_could_not_be_built(machine):
    for part in ("kernel_check", "pip"):
        status, output, calls = machine(FAIL=part)
        assert status == 1
        assert "build " in output
        assert "FAILED: exit status" in output
        assert not any("sanitizer" in call or "pytest" in call for call in calls)


def test_time_runs_out(machine):
    status, output, calls = machine(SLEEP="tests/gpu", LIMIT="3")
    assert status == 1
    # The sleeper, and after it the captured steps, the two benchmarks, the choices of the step and mose-fast bench.
    assert output.count("FAILED: out of time") == 6
    assert not any("bench_a.py" in call for call in calls)


def test_a_card_and_its_tools_are_wanted(machine):
    status, output, _ = machine(FAIL="compute_cap")
    assert (status, output) == (1, "nvidia-smi finds no card; bench/gpu_check.sh --dry-run works without one\n")
    (machine.tools / "compute-sanitizer").unlink()
    if not shutil.which("compute-sanitizer"):
        status, output, calls = machine()
        assert (status, output) == (1, "compute-sanitizer is not on PATH\n")
        assert not any("pip" in call for call in calls)


def test_the_dry_run_runs_nothing_but_the_collection(machine):
    status, output, calls = machine("--dry-run")
    assert status == 0
    assert calls == ["python -m bench.collect"]
    for words in ("build", "racecheck", "tests/gpu", "bench_a", "bench_b", "results and table"):
        assert words in output
    assert machine("--dry-run", FAIL="bench.collect")[0] == 3


def test_other_arguments_are_refused(machine):
    wanted = "wanted --dry-run, --only check, --only measure or nothing\n"
    assert machine("--dry") == (2, f"arguments are '--dry'; {wanted}", [])
    assert machine("--only", "tests") == (2, f"arguments are '--only tests'; {wanted}", [])


def test_checks_and_measurements_can_run_apart(machine):
    status, _, calls = machine("--only", "check")
    text = "\n".join(calls)
    assert status == 0
    assert "tests/gpu" in text and "bench_a" not in text and "bench.store" not in text
    status, output, calls = machine("--only", "measure")
    text = "\n".join(calls)
    assert status == 0
    assert "tests/gpu" not in text and "sanitizer" not in text
    assert "bench_a" in text and "bench.compare_step" in text and "mose_fast bench" in text
    assert output.endswith("op  native us\n")
