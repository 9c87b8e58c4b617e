"""The real kernel bodies of csrc/cuda, run on the CPU: bit-equal to csrc/cpu in four schedules, under sanitizers, memory poisoned."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

LIBRARY = ("cpu/reservoir.cpp", "cpu/augment_parameters.cpp")
FLAGS = ("-O1", "-g", "-Wall", "-Wextra", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(compiled: Callable[..., Path]) -> Path:
    return compiled("decision_kernels.cpp", *FLAGS, library=LIBRARY)


def test_kernels_equal_cpu(program):
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(re.fullmatch(r"(\d+) comparisons equal\n", done.stdout)[1]) > 600


def test_every_missing_barrier_is_detected(program):
    whole = subprocess.run([program, "--small"], capture_output=True, text=True, timeout=60)
    assert whole.returncode == 0, whole.stderr
    lines = re.findall(r"barrier (\d+)", whole.stdout)
    assert len(lines) >= 8
    for line in lines:
        done = subprocess.run([program, "--small", "--without", line], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, f"nothing noticed that the barrier in line {line} was missing"
        assert "differs from the CPU's" in done.stderr or "reached the barrier" in done.stderr
