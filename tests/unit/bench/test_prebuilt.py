"""A library built elsewhere is taken only to the tree that it was built from."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess

import pytest

from bench.prebuilt import main, obstacle
from tests.paths import ROOT


@pytest.fixture
def folder(tmp_path):
    for name in ("_C.cpython-312-x86_64-linux-gnu.so", "kernel_check"):
        (tmp_path / name).touch()
    sources = runpy.run_path(str(ROOT / "mose_fast" / "_version.py"))["source_hash"](ROOT, "cuda")
    record = {"sources": sources, "backend": "cuda", "torch": "2.11.0+cu130"}
    (tmp_path / "_build.json").write_text(json.dumps(record))
    return tmp_path


def test_one_of_this_tree(folder, capsys):
    assert obstacle(folder) is None
    assert main([str(folder)]) == 0 and "2.11.0+cu130" in capsys.readouterr().out


def test_one_that_did_not_arrive_whole(folder, capsys):
    library = folder / "_C.cpython-312-x86_64-linux-gnu.so"
    library.write_bytes(b"machine code")
    assert main([str(folder), "--seal"]) == 0 and obstacle(folder) is None
    library.write_bytes(b"machine")
    assert obstacle(folder) == f"{library} is not what bench/prebuild.sh left: it is damaged"


def test_one_of_another_tree(folder, capsys):
    (folder / "_build.json").write_text(json.dumps({"sources": "0123", "backend": "cuda"}))
    assert "was built from other sources (0123) than those in csrc" in obstacle(folder)
    assert main([str(folder)]) == 1 and "bench/prebuild.sh again" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["_C.cpython-312-x86_64-linux-gnu.so", "kernel_check", "_build.json"])
def test_a_file_is_missing(folder, name):
    (folder / name).unlink()
    wanted = "_C*.so" if name.startswith("_C") else name
    assert obstacle(folder) == f"there is no {wanted} in {folder}; wanted what bench/prebuild.sh leaves"


# cmake leaves what a build leaves; strip, python and du only note their calls.
STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  python*version*) echo "torch2.11.0+cu130-cpython-312" ;;
  python*) [[ -z $FAIL ]] ;;
  cmake*--build*) mkdir -p "$2/mose_fast"
                     touch "$2/mose_fast/_C.new.so" "$2/mose_fast/_build.json" "$2/kernel_check" ;;
esac
"""


@pytest.mark.parametrize("broken", [False, True])
def test_what_the_script_leaves(tmp_path, broken):
    tree, tools, target, calls = (tmp_path / name for name in ("tree", "tools", "target", "calls"))
    for folder in (tree / "bench", tools, target):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "bench" / "prebuild.sh", tree / "bench")
    for name in ("python", "cmake", "strip", "du"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    (target / "_C.old.so").touch()
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "python", "CALLS": str(calls)}
    command = [tree / "bench" / "prebuild.sh", os.path.relpath(target), "8.0;9.0"]
    done = subprocess.run(command, env=environment | {"FAIL": "1" if broken else ""}, check=False)
    assert done.returncode == int(broken)  # a library that does not load is told
    assert sorted(path.name for path in target.iterdir()) == ["_C.new.so", "_build.json", "kernel_check"]
    text = calls.read_text()
    assert "-DMOSE_FAST_BACKEND=cuda -DMOSE_FAST_ARCHS_WANTED=8.0;9.0" in text and "--target _C kernel_check" in text
    assert f"strip --strip-unneeded {target}/_C.new.so" in text and f"strip {target}/kernel_check" in text
    assert text.index("strip") < text.index(f"python -m bench.prebuilt {target} --seal")
