"""Launches of two threads do not lower each other's limit of shared memory: it is set once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH")
def test_a_launch_between_request_and_launch_of_another_takes_no_memory_away(tmp_path):
    program = tmp_path / "shared_limit"
    command = ["nvcc", "-std=c++20", "-cudart", "none", "-I", CSRC, "-gencode", "arch=compute_80,code=compute_80"]
    command += ["-o", program, HERE / "shared_limit.cu", HERE / "shared_limit.cpp"]
    subprocess.run([str(part) for part in command], check=True, timeout=120)
    told = subprocess.run([program], capture_output=True, check=True, text=True, timeout=20).stdout
    assert told == "kernels 2, requests 1 1\n"
