"""Steps of ``make`` say what they do while they do it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from build_tools.announce import announce, compiled, native_build
from build_tools.cuda import Toolkit

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def test_a_step_says_what_it_does_before_it_starts_and_how_long_it_took(capfd):
    assert announce("installing", "1 GB", [sys.executable, "-c", "print('noise')"]) == 0
    first, last = capfd.readouterr().err.splitlines()
    assert first == "installing (1 GB) ..."
    assert last.startswith("  done in ")


def test_a_long_step_tells_how_far_it_is(capfd):
    counted = iter(range(1, 1000))
    command = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    assert announce("compiling", "", command, lambda: f"{next(counted)} of 9", interval=0.1) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "compiling ..."
    assert [line.split(", ")[1] for line in lines[1:-1]] == [f"{n} of 9" for n in range(1, len(lines) - 1)]
    assert len(lines) >= 5


def test_a_step_that_fails_shows_the_end_of_its_output(capfd):
    program = "import sys; [print('line', i) for i in range(100)]; sys.exit(3)"
    assert announce("compiling", "", [sys.executable, "-c", program]) == 3
    lines = capfd.readouterr().err.splitlines()
    assert "line 0" not in lines
    assert lines[-2:] == ["line 99", "compiling failed with exit status 3"]


def test_what_a_build_will_be_follows_from_toolkit_and_driver():
    toolkit = [Toolkit(Path("cuda"), (13, 0))]
    cpu, few = native_build(CSRC, {}, False, [], [])
    assert "CUDA" not in cpu
    assert native_build(CSRC, {"MOSE_FAST_BACKEND": "cpu"}, True, toolkit, []) == (cpu, few)
    without_driver, many = native_build(CSRC, {"TORCH_CUDA_ARCH_LIST": "9.0"}, False, toolkit, [])
    assert many > few
    assert f"{many} files of C++ and CUDA for 9.0" in without_driver
    assert "MOSE_FAST_BACKEND=cpu" in without_driver
    assert "MOSE_FAST_BACKEND" not in native_build(CSRC, {}, True, toolkit, [])[0]
    looked = ["CUDA_HOME=/nowhere: no bin/nvcc in /nowhere", "CUDA_PATH: not set"]
    assert native_build(CSRC, {}, True, toolkit, looked)[0].endswith(
        "CUDA_HOME=/nowhere: no bin/nvcc in /nowhere, so it is ignored"
    )


def test_files_compiled_before_are_not_counted(tmp_path):
    objects = tmp_path / "objects-cuda" / "csrc"
    objects.mkdir(parents=True)
    for name, when in (("old.o", 100), ("new.o", 300), ("newer.o", 301), ("new.txt", 300)):
        (objects / name).touch()
        os.utime(objects / name, (when, when))
    assert compiled(tmp_path, 200) == 2
