"""Steps of ``make`` say what they do while they do it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from build_tools.announce import _main, announce, compiled, native_build
from build_tools.cuda import Toolkit
from build_tools.describe import Build
from tests.paths import ROOT

CSRC = ROOT / "csrc"


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


def test_what_a_build_will_be_follows_from_its_decision_and_the_driver():
    cpu, few = native_build(CSRC, Build("cpu", None, [], "CPU-only build: none. Looked in:\n  here", {}), False)
    assert cpu == f"{few} files of C++, about a minute on two cores; CPU-only build: none"
    build = Build("cuda", Toolkit(Path("cuda"), (13, 0)), ["8.0", "9.0"], "CUDA build: because", {})
    without_driver, many = native_build(CSRC, build, False)
    assert many > few
    assert f"{many} files of C++ and CUDA for 8.0 9.0" in without_driver
    assert "MOSE_FAST_BACKEND=cpu" in without_driver
    text, _ = native_build(CSRC, build, True)
    assert "MOSE_FAST_BACKEND" not in text
    assert text.endswith("; CUDA build: because")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TORCH_CUDA_ARCH_LIST", "7.0;7.5", "TORCH_CUDA_ARCH_LIST is '7.0;7.5'; wanted"),
        ("MOSE_FAST_BACKEND", "gpu", "MOSE_FAST_BACKEND is 'gpu'; wanted"),
    ],
)
def test_a_build_that_cannot_go_on_is_one_line_before_anything_is_compiled(capfd, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("build_tools.announce.installed_torch", lambda folders: ("2.14.1", "13.0"))
    monkeypatch.setattr("build_tools.describe.plan.check_same_torch", lambda compiled, target: None)
    toolkits = [Toolkit(Path("cuda"), (13, 0))]
    monkeypatch.setattr("build_tools.describe.cuda.find_toolkits", lambda environment: (toolkits, []))
    assert _main(["compiling", "--native", "--", sys.executable, "-c", "print('compiled')"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"mose_fast: {said}")


def test_files_compiled_before_are_not_counted(tmp_path):
    objects = tmp_path / "objects-cuda" / "csrc"
    objects.mkdir(parents=True)
    for name, when in (("old.o", 100), ("new.o", 300), ("newer.o", 301), ("new.txt", 300)):
        (objects / name).touch()
        os.utime(objects / name, (when, when))
    assert compiled(tmp_path, 200) == 2


def test_the_second_text_may_be_left_out(capfd):
    assert _main(["installing", "--", sys.executable, "-c", "print('-m')"]) == 0
    assert capfd.readouterr().err.startswith("installing ...")
