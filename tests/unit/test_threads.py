"""Threads and cores: what is settled before torch starts, and what a run warns of."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch  # noqa: F401

from mose_fast.app import doctor
from mose_fast.experiments.place import Layout, Place
from mose_fast.threads import SPIN_COUNT, crowding, settle_spinning, settle_threads, thread_limit, usable_cores, waiting
from tests.paths import ROOT


@pytest.mark.parametrize(("before", "cores", "after"), [(None, 0, "0"), ("7", 0, "7"), (None, os.cpu_count(), None)])
def test_a_container_with_fewer_cores_gets_as_many_threads_unless_the_user_says(before, cores, after):
    environment = {} if before is None else {"OMP_NUM_THREADS": before}
    settle_threads(environment, cores=cores)
    assert environment.get("OMP_NUM_THREADS") == after


def test_affinity_counts():
    one = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); from mose_fast.threads import usable_cores;"
        " print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


SAID = "{} threads, but only {} of {} cores free (load {}): other programs slow this one down"


@pytest.mark.parametrize(
    ("threads", "cores", "load", "said"),
    [(1, 2, 9.0, ""), (8, 8, 0.4, ""), (2, 2, 5.0, SAID.format(2, 0, 2, 5.0)), (8, 8, 3.0, SAID.format(8, 5, 8, 3.0))],
)
def test_threads_without_free_cores_are_warned_of(threads, cores, load, said, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "20000")
    assert crowding(threads, cores, load) == said
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    advice = f"; GOMP_SPINCOUNT={SPIN_COUNT} in the environment makes it less"
    assert crowding(threads, cores, load) == (said and said + advice)


def test_commands_settle_it_before_torch_is_imported():
    program = """
import os, sys
from mose_fast.app import cli
from mose_fast import threads
threads.usable_cores = lambda: 0
def settled(arguments):
    print(os.environ["OMP_NUM_THREADS"], "torch" in sys.modules)
    return 0
cli.run._act = settled
cli.main(["run"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=without_openmp(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "False"]


def without_openmp(**changes):
    """This environment without OpenMP's variables."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    return found | changes


ENTRIES = {
    "the command line": ["-m", "mose_fast", "doctor"],
    "a worker": ["-m", "mose_fast.experiments.worker", "--threads", "2"],
    "a benchmark": ["-m", "bench.kernel_times"],
    "the tests": ["-m", "pytest", "-q", "-n", "0", "--collect-only", "tests/unit/ops/test_null.py"],
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_settled_before_torch_in_every_process_that_computes(entry, tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ.get('GOMP_SPINCOUNT'), file=open('told', 'w'), flush=True)\nos._exit(0)\n"
    )
    root = str(ROOT)
    command = [sys.executable, *ENTRIES[entry]]
    if entry == "the tests":
        command[-1:] = ["--rootdir", root, "-c", f"{root}/pyproject.toml", f"{root}/{command[-1]}"]
    environment = without_openmp(PYTHONPATH=f"{tmp_path}{os.pathsep}{root}")
    subprocess.run(command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert (tmp_path / "told").read_text().strip() == str(SPIN_COUNT)


def test_libgomp_has_read_it():
    environment = without_openmp(OMP_DISPLAY_ENV="VERBOSE")
    command = [sys.executable, "-c", "import mose_fast.device"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    if "GOMP_SPINCOUNT" not in told:
        pytest.skip("this torch does not use GNU's libgomp")
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", told)) == {str(SPIN_COUNT)}


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPIN_COUNT)}),
        ({"GOMP_SPINCOUNT": ""}, {"GOMP_SPINCOUNT": str(SPIN_COUNT)}),
        ({"GOMP_SPINCOUNT": "77"}, {"GOMP_SPINCOUNT": "77"}),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_how_threads_wait_is_the_users_where_it_is_set(given, settled, monkeypatch):
    environment = dict(given)
    settle_spinning(environment)
    assert environment == given  # torch is imported here: it would not count
    monkeypatch.delitem(sys.modules, "torch")
    settle_spinning(environment)
    assert environment == settled


@pytest.mark.slow
def test_doctor_says_that_torch_came_first():
    program = "import torch, mose_fast; from mose_fast.app.doctor import _torch; print(_torch().found)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=without_openmp(), capture_output=True, text=True, check=True)
    assert "torch was imported before mose_fast" in done.stdout


def test_doctor_says_how_threads_wait(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert waiting(os.environ) == "GOMP_SPINCOUNT=77"
    assert "thread(s), GOMP_SPINCOUNT=77" in doctor._torch().found


@pytest.mark.parametrize(
    ("value", "limit"), [("1", 1), (" 08 ", 8), ("4,2", 4), ("0", None), ("-1", None), ("1.5", None), (None, None)]
)
def test_the_users_limit_of_threads(value, limit):
    assert thread_limit({} if value is None else {"OMP_NUM_THREADS": value}) == limit


@pytest.mark.parametrize(
    ("limit", "cores", "runs", "threads"), [("3", 8, 2, 3), ("6", 8, 2, 4), ("2", 2, 4, 1), (None, 8, 2, 4)]
)
def test_a_sweep_gives_its_runs_no_more_threads_than_the_user_allows(limit, cores, runs, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert Layout(Place(), "cpu", cores, (), runs).threads == threads
