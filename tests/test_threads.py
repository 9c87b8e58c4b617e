"""Threads and cores: what is settled before torch starts, and what a run warns of."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mose_fast.threads import crowding, settle_threads, usable_cores


def test_a_container_with_fewer_cores_gets_as_many_threads():
    environment = {}
    settle_threads(environment, cores=0)
    assert environment == {"OMP_NUM_THREADS": "0"}


def test_what_the_user_has_set_stays():
    environment = {"OMP_NUM_THREADS": "7"}
    settle_threads(environment, cores=0)
    assert environment == {"OMP_NUM_THREADS": "7"}


def test_all_cores_of_the_machine_are_left_to_torch():
    environment = {}
    settle_threads(environment, cores=os.cpu_count())
    assert environment == {}


def test_affinity_counts():
    one = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); from mose_fast.threads import usable_cores;"
        " print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


SAID = (
    "{} threads, but only {} of {} cores free (load {}): other programs slow this one down; "
    "OMP_NUM_THREADS={} or OMP_WAIT_POLICY=PASSIVE may be faster"
)


@pytest.mark.parametrize(
    ("threads", "cores", "load", "said"),
    [
        (2, 2, 0.2, ""),
        (1, 2, 1.0, ""),
        (1, 2, 9.0, ""),
        (8, 8, 0.4, ""),
        (2, 2, 1.0, SAID.format(2, 1, 2, 1.0, 1)),
        (2, 2, 5.0, SAID.format(2, 0, 2, 5.0, 1)),
        (8, 8, 3.0, SAID.format(8, 5, 8, 3.0, 5)),
    ],
)
def test_threads_without_free_cores_are_warned_of(threads, cores, load, said):
    assert crowding(threads, cores, load) == said


def test_commands_settle_it_before_torch_is_imported():
    program = """
import os, sys
from mose_fast import cli, threads
threads.usable_cores = lambda: 0
def settled(arguments):
    print(os.environ["OMP_NUM_THREADS"], "torch" in sys.modules)
    return 0
cli._run = settled
cli.main(["run"])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False"]
