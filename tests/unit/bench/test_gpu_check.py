"""bench/gpu_check.sh with stand-ins for a GPU's machine: order, choice of steps, failures, time
limits, what lies in OUT when.
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mose_fast import _loader
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("timeout"), reason="needs timeout of GNU coreutils")
FIRST = [
    "library",
    # The first looks of the design paper on GPUs, in its order.
    "self_check",
    "tests",
    "processes",
    "retries",
    "captured",
    "conflicts",
    "kernel_check",
    "smoke",
    "step",
    "kernel_times",
    "run",
    "loop",
    "norms",
    "alignment",
]
FIRST += ["memcheck", "search", "search_all"]
LATER = ["bench_a", "bench_b", "bench", "compiled", "racecheck", "initcheck"]

# Each stand-in notes its call; FAIL and SLEEP hold words, and a call that contains one fails or
# takes too long. python is the real one where REAL names it.
STAND_IN = """#!/bin/bash
call="$(basename "$0") $*"
echo "$call" >>"$CALLS"
for word in $SLEEP; do if [[ "$call" == *"$word"* ]]; then echo "halfway"; sleep 30; fi; done
for word in $FAIL; do if [[ "$call" == *"$word"* ]]; then echo "it broke"; exit 3; fi; done
case "$call" in
  nvidia-smi*) echo "9.0, NVIDIA H100 80GB HBM3" ;;
  cmake*--build*) mkdir -p build/gpu && cp "$0" build/gpu/kernel_check ;;
  compute-sanitizer* | ncu*) "${@: -1}" ;;
  python*)
    if [[ -n $REAL ]]; then exec "$REAL" "$@"; fi
    case "$call" in
      *bench_step.py*) rows=${call##*--rows=} && echo "op,impl" >"${rows%% *}/nvidia-h100-80gb-hbm3.csv" ;;
      *bench.store*) echo "op  native us" ;;
      *"mose_fast run"*) cd build/gpu_check && mkdir -p run && echo "{}" >run/results.json
                      echo "a" >run/accuracy.csv ;;
    esac ;;
esac
"""


class Machine:
    """A copy of the script between stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.tools, self.out, self.calls = (folder / name for name in ("tree", "tools", "out", "calls"))
        self.tools.mkdir()
        for name in ("nvidia-smi", "nvcc", "cmake", "ninja", "compute-sanitizer", "ncu", "python", "kernel_check"):
            (self.tools / name).write_text(STAND_IN)
            (self.tools / name).chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen:
        self.calls.write_text("")
        given = {
            "CALLS": str(self.calls),
            "PYTHON": "python",
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "OUT": str(self.out),
        }
        # pytest-benchmark measures nothing where it believes to be a worker of pytest-xdist.
        left_out = ("LIMIT", "MOSE_FAST_NATIVE", "PYTEST_XDIST")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return subprocess.Popen(
            [self.tree / "bench" / "gpu_check.sh", *arguments],
            env={**inherited, **given, **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """Exit status, output, calls of stand-ins; keywords are environment variables."""
        started = self.start(*arguments, **environment)
        output, _ = started.communicate(timeout=400)
        return started.returncode, output, self.calls.read_text().splitlines()

    def summary(self) -> dict[str, str]:
        """What summary.txt says of each step."""
        lines = [line.split(maxsplit=3) for line in (self.out / "summary.txt").read_text().splitlines()]
        return {line[0]: line[3] for line in lines if len(line) == 4 and line[2] == "s"}

    def wait_for(self, text: str) -> None:
        """Until the log holds it."""
        for _ in range(400):  # less than the sleeper sleeps
            log = self.out / "log.txt"
            if log.exists() and text in log.read_text():
                return
            time.sleep(0.05)
        raise AssertionError(f"{text!r} did not come to the log")


@pytest.fixture
def machine(tmp_path):
    """All is a stand-in, python too; the tree holds the script and two benchmarks."""
    made = Machine(tmp_path)
    for folder in ("bench", "tests/gpu"):
        (made.tree / folder).mkdir(parents=True)
    shutil.copy(ROOT / "bench" / "gpu_check.sh", made.tree / "bench")
    for name in ("bench_a.py", "bench_b.py"):
        (made.tree / "bench" / name).write_text("def bench_it(measure): ...\n")
    (made.tree / "bench" / "bench_script.py").write_text("print('no benchmark of pytest')\n")
    for name in ("test_a.py", "test_b.py", "test_captured.py"):
        (made.tree / "tests" / "gpu" / name).write_text("")
    return made


def test_all_steps_in_order_each_with_its_results_and_the_table_last(machine):
    status, output, calls = machine.run(LIMIT="2000")
    assert status == 0, output
    text = "\n".join(calls)
    places = [
        text.index(words)
        for words in (
            "nvidia-smi",
            "cmake --build build/gpu --target kernel_check",
            "python -W error",
            "mose_fast doctor --check",
            "pytest tests/gpu --ignore",
            "bench.processes --device cuda\n",
            "bench.processes --device cuda --retries 20",
            "pytest tests/gpu/test_captured.py",
            "ncu --kernel-name regex:align_conv",
            "bench.smoke",
            "bench/bench_step.py",
            "bench.kernel_times",
            "bench/bench_run.py",
            "bench_loop and",
            "bench/bench_batch_norm_act.py",
            "bench/bench_align_conv.py",
            "--tool memcheck",
            "--cudnn-search=3",
            "--cudnn-search=0",
            "bench/bench_a.py",
            "bench/bench_b.py",
            "mose_fast bench",
            "-k compiled",
            "--tool racecheck",
            "--tool initcheck",
        )
    ]
    assert places == sorted(places)
    assert "bench_script" not in text
    assert "-m pip install --no-build-isolation --no-deps" in text and "-DMOSE_FAST_ARCHS_WANTED=9.0" in text
    assert "-n 3 --dist loadfile" in text  # a process a file
    assert "FAILED" not in output and "not run" not in output
    assert list(machine.summary()) == ["build", *FIRST, *LATER]
    rows = machine.out / "nvidia-h100-80gb-hbm3.csv"
    assert output.endswith(f"op  native us\nto keep these rows: python -m bench.store {rows}\n")
    assert {path.name for path in machine.out.iterdir()} == {
        "log.txt",
        "summary.txt",
        rows.name,
        "nvidia-h100-80gb-hbm3.txt",
    }


def test_steps_by_name(machine):
    machine.run("--only", "smoke,memcheck")
    assert list(machine.summary()) == ["library", "smoke", "memcheck"]
    (machine.out / "summary.txt").unlink()
    machine.run("--after", "compiled")
    assert list(machine.summary()) == ["library", "racecheck", "initcheck"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "smoke,tset"], "there is no step 'tset'; wanted one of build library self_check"),
        (["--after", "x"], "there is no step 'x'"),
        (["--only", "smoke", "--after", "step"], "--only and --after are both given; wanted one"),
        (["--dry"], "argument is '--dry'; wanted --dry-run, --only, --after, --prebuilt, --data or --device"),
        (["--only"], "--only needs a value"),
        (["--device", "tpu"], "--device is 'tpu'; wanted cuda or cpu"),
    ],
)
def test_other_arguments_are_refused(machine, arguments, told):
    status, output, calls = machine.run(*arguments)
    assert status == 2 and output.startswith(told) and calls == []


def test_a_failed_step_is_told_and_the_rest_still_runs(machine):
    status, output, _ = machine.run(FAIL="racecheck bench_a.py", LIMIT="2000")
    assert status == 1
    failed = {name: said for name, said in machine.summary().items() if said != "ok"}
    assert failed == {"bench_a": "FAILED: exit status 3", "racecheck": "FAILED: exit status 3"}
    assert "it broke" in output and (machine.out / "log.txt").read_text().count("it broke") == 2


def test_nothing_runs_on_a_library_that_could_not_be_built(machine):
    for part in ("kernel_check", "pip"):
        status, output, calls = machine.run(FAIL=part)
        assert status == 1
        assert "build " in output and "FAILED: exit status" in output
        assert not any("sanitizer" in call or "pytest" in call for call in calls)


def test_a_prebuilt_library_is_looked_at_and_taken(machine):
    shutil.copy(machine.tools / "kernel_check", machine.tree / "kernel_check")
    there = os.path.relpath(machine.tree)
    status, output, calls = machine.run("--prebuilt", there, "--only", "kernel_check")
    assert status == 0, output
    looked = f"python -m bench.prebuilt {machine.tree}"
    assert calls[1:] == [looked, "python -", "python -W error::RuntimeWarning - cuda", "kernel_check "]
    status, _, calls = machine.run("--prebuilt", there, FAIL="bench.prebuilt")
    assert status == 1 and len(calls) == 2


def test_a_step_starts_only_if_there_is_time_for_it_and_the_next_call_is_named(machine):
    status, output, _ = machine.run("--prebuilt", "/built", "--data", "/there", LIMIT="79")
    assert status == 1
    # The next one, tests, is expected to take 80 s.
    assert list(machine.summary()) == ["library", "self_check"]
    told = (machine.out / "summary.txt").read_text().splitlines()[-2:]
    assert told[0].startswith("not run for lack of time: tests processes retries")
    assert told[1] == "next: bench/gpu_check.sh --after self_check --prebuilt /built --data /there"
    assert told[1] in output
    _, output, _ = machine.run("--after", "alignment", LIMIT="20")
    assert "next: bench/gpu_check.sh --after alignment" in output


def test_a_step_that_runs_out_of_time(machine):
    status, output, calls = machine.run(
        "--device", "cpu", "--only", "self_check,captured,step", SLEEP="test_captured", LIMIT="4"
    )
    assert status == 1
    assert machine.summary()["self_check"] == "ok" and machine.summary()["captured"] == "FAILED: out of time"
    assert "halfway" in output and "not run for lack of time: step" in output
    assert not any("bench_step.py" in call for call in calls)


@pytest.mark.usefixtures("signals_act")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_kill_in_mid_step_leaves_what_was_found(machine, how):
    started = machine.start("--only", "step,smoke,kernel_times", SLEEP="kernel_times")
    machine.wait_for("halfway")
    if how == signal.SIGKILL:  # of everything, as where a machine is taken back
        os.killpg(started.pid, how)
    else:
        started.send_signal(how)
    output, _ = started.communicate(timeout=30)
    assert (machine.summary()["smoke"], machine.summary()["step"]) == ("ok", "ok")
    assert "halfway" in (machine.out / "log.txt").read_text() and (machine.out / "nvidia-h100-80gb-hbm3.csv").exists()
    if how != signal.SIGKILL:
        assert started.returncode == 1 and "kernel_times" in output and "FAILED: interrupted" in output


def test_the_dry_run_sums_seconds_by_call(machine):
    status, output, calls = machine.run("--dry-run")
    assert (status, calls) == (0, ["python -m bench.collect"]), output
    planned = [line.split()[0] for line in output.splitlines() if line.startswith("  ") and " at most " in line]
    assert planned == ["build", *FIRST, *LATER]
    sums = [int(line.split()[1]) for line in output.splitlines() if line.split()[:1] == ["sum"]]
    assert len(sums) == output.count("\ncall ") + 1 and all(0 < each <= 540 for each in sums)
    assert not machine.out.exists()
    assert machine.run("--dry-run", FAIL="bench.collect")[0] == 3


def test_the_dry_run_fails_where_a_call_does_not_fit(machine):
    status, output, _ = machine.run("--dry-run", LIMIT="270")
    assert status == 1 and "the steps before the later visit need 4 calls, of two" in output
    status, output, _ = machine.run("--dry-run", "--prebuilt", "/built", FAIL="bench.prebuilt")
    assert status == 1 and "does not fit: /built does not serve this tree" in output


def test_the_plan_of_this_tree_fits_two_calls(machine):
    machine.tree = ROOT
    for more in ([], ["--prebuilt", "."]):
        status, output, _ = machine.run("--dry-run", *more)
        assert status == 0, output
        assert output.index("a later visit") < (output + "call 3").index("call 3")


@pytest.mark.slow
@pytest.mark.skipif(_loader.native is None, reason="the native library was not built")
def test_every_step_works_on_a_stand_in_gpu(tmp_path):
    """The real modules on the CPU at small sizes, one step failing."""
    machine = Machine(tmp_path)
    machine.tree = ROOT
    prebuilt, data = tmp_path / "prebuilt", tmp_path / "data"
    prebuilt.mkdir(), data.mkdir()
    folder = Path(_loader.native.__file__).parent
    for file in [*folder.glob("_C*.so"), folder / "_build.json", machine.tools / "kernel_check"]:
        shutil.copy(file, prebuilt)
    labels = np.arange(200, dtype=np.uint8) % 100
    images = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
    np.savez(data / "cifar100.npz", x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100])
    options = ["--device", "cpu", "--prebuilt", str(prebuilt), "--data", str(data)]
    steps = "retries,conflicts,kernel_check,smoke,step,kernel_times,run,memcheck,racecheck"
    given = {"REAL": sys.executable, "OMP_NUM_THREADS": "1", "LIMIT": "380"}
    status, output, _ = machine.run(*options, "--only", steps, FAIL="racecheck", **given)
    assert status == 1
    assert machine.summary() == dict.fromkeys(["library", *steps.split(",")], "ok") | {
        "racecheck": "FAILED: exit status 3"
    }, output
    found = {path.name for path in machine.out.iterdir()}
    assert found == {"log.txt", "summary.txt", "kernels.csv", "cpu.csv", "cpu.txt", "run.json", "run.csv"}
    with open(machine.out / "cpu.csv") as file:
        ops = [row["op"] for row in csv.DictReader(file)]
    assert ops == ["step"] * 4
    with open(machine.out / "kernels.csv") as file:
        assert {"fused", "torch"} == {row["kernels"] for row in csv.DictReader(file)}
    log = (machine.out / "log.txt").read_text()
    assert "losses equal bit for bit" in log
    assert str(machine.out / "cpu.csv") in output and "op " in output
