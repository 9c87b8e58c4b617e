"""A library built elsewhere is taken only to the tree that it was built from."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from bench.prebuilt import main, obstacle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    for name in ("_C.cpython-312-x86_64-linux-gnu.so", "kernel_check"):
        (tmp_path / name).touch()
    sources = runpy.run_path(str(ROOT / "mose_fast" / "_version.py"))["source_hash"](ROOT)
    (tmp_path / "_build.json").write_text(json.dumps({"sources": sources, "torch": "2.11.0+cu130"}))
    return tmp_path


def test_one_of_this_tree(folder, capsys):
    assert obstacle(folder) is None
    assert main([str(folder)]) == 0 and "2.11.0+cu130" in capsys.readouterr().out


def test_one_of_another_tree(folder, capsys):
    (folder / "_build.json").write_text(json.dumps({"sources": "0123"}))
    assert "was built from other sources (0123) than those in csrc" in obstacle(folder)
    assert main([str(folder)]) == 1 and "bench/prebuild.sh again" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["_C.cpython-312-x86_64-linux-gnu.so", "kernel_check", "_build.json"])
def test_a_file_is_missing(folder, name):
    (folder / name).unlink()
    wanted = "_C*.so" if name.startswith("_C") else name
    assert obstacle(folder) == f"there is no {wanted} in {folder}; wanted what bench/prebuild.sh leaves"
