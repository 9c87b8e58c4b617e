"""csrc/sources.cmake is the one list, complete, and the rooms that promise to be torch-free are."""

from __future__ import annotations

import os
import re

import pytest

from build_tools.sources import emulated_sources, parse_lists, read_sources
from tests.paths import ROOT

ROOMS = {
    "MOSE_FAST_CPU_SOURCES": "cpu/*.cpp",
    "MOSE_FAST_CUDA_SOURCES": "cuda/*.cu",
    "MOSE_FAST_TORCH_SOURCES": "torch/unit_*.cpp",
}


def test_parse_lists():
    text = (
        "# set(IGNORED x)\nset(A\n  cpu/a.cpp\n  # a comment\n  cpu/b.cpp\n)\nset(FLAGS -O3"
        " -Xcompiler=-Wall,-fopenmp)\n"
    )
    assert parse_lists(text) == {"A": ["cpu/a.cpp", "cpu/b.cpp"], "FLAGS": ["-O3", "-Xcompiler=-Wall,-fopenmp"]}


def test_a_kernels_emulated_source_is_written_once(tmp_path):
    paths = emulated_sources(tmp_path, ["cuda/a.cu", "cuda/b.cu"])
    assert paths == ["build/emulated_sources/a.cpp", "build/emulated_sources/b.cpp"]
    first, second = (tmp_path / path for path in paths)
    assert first.read_text() == '#include "emulated/cuda_on_cpu.h"\n#include "cuda/a.cu"\n'
    os.utime(first, (1, 1))
    second.write_text("something else")
    assert emulated_sources(tmp_path, ["cuda/a.cu", "cuda/b.cu"]) == paths
    assert first.stat().st_mtime == 1  # else ninja would compile it again
    assert '"cuda/b.cu"' in second.read_text()


def test_one_file_of_the_glue_alone_knows_what_a_gpu_is():
    """Every other one asks csrc/torch/device.h, so that an emulated GPU needs no edit of theirs;
    bind.h registers each op for both devices.
    """
    knows = re.compile(
        r"c10/cuda|ATen/cuda|c10::cuda|at::cuda|DispatchKey::(CUDA|CPU)|is_cuda\(\)|is_cpu\(\)|MOSE_FAST_EMULATED"
    )
    files = [
        path for path in (ROOT / "csrc" / "torch").iterdir() if knows.search(re.sub(r"//.*", "", path.read_text()))
    ]
    assert sorted(path.name for path in files) == ["bind.h", "device.cpp", "device.h"]


@pytest.mark.parametrize("item", ["${OTHER}", '"a.cpp"', "a.cpp#why"])
def test_parse_lists_refuses_what_only_cmake_understands(item):
    with pytest.raises(ValueError, match="wanted literal items"):
        parse_lists(f"set(A {item})")


def test_a_listed_source_that_does_not_exist_is_named(tmp_path):
    (tmp_path / "sources.cmake").write_text("set(X_SOURCES cpu/lost.cpp)")
    with pytest.raises(FileNotFoundError, match=r"X_SOURCES lists 'cpu/lost.cpp'"):
        read_sources(tmp_path)


@pytest.mark.parametrize("name", ROOMS)
def test_every_source_on_disk_is_listed_once(name):
    listed = read_sources(ROOT / "csrc")[name]
    on_disk = [str(path.relative_to(ROOT / "csrc")) for path in (ROOT / "csrc").glob(ROOMS[name])]
    assert sorted(listed) == sorted(on_disk)


def test_every_file_of_the_glue_is_in_one_translation_unit():
    folder = ROOT / "csrc" / "torch"
    units = sorted(folder.glob("unit_*.cpp"))
    included = [name for unit in units for name in re.findall(r'#include "torch/(\w+\.cpp)"', unit.read_text())]
    assert sorted(included) == sorted(path.name for path in folder.glob("*.cpp") if path not in units)


@pytest.mark.parametrize("room", ["core", "api", "cpu", "cuda"])
def test_no_torch_header_in_the_torch_free_rooms(room):
    files = [path for path in (ROOT / "csrc" / room).rglob("*") if path.is_file()]
    assert files
    offenders = [
        str(path) for path in files if re.search(r"#\s*include\s*[<\"](torch|ATen|c10|pybind11)/", path.read_text())
    ]
    assert offenders == []


def test_the_glue_includes_slim_headers_only():
    text = "\n".join(path.read_text() for path in (ROOT / "csrc" / "torch").iterdir())
    includes = re.findall(r"#\s*include\s*[<\"]([^>\"]+)", text)
    assert includes
    assert not {"torch/extension.h", "torch/all.h", "torch/torch.h", "ATen/ATen.h", "ATen/cuda/CUDAContext.h"} & set(
        includes
    )


def test_build_scripts_ask_for_no_stable_abi_and_no_standard_of_their_own():
    # pybind11 does not compile against the limited API, and the C++ standard is torch's to choose.
    scripts = [
        ROOT / "setup.py",
        ROOT / "pyproject.toml",
        ROOT / "csrc" / "sources.cmake",
        *(ROOT / "build_tools").glob("*.py"),
    ]
    text = "\n".join(path.read_text() for path in scripts)
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    assert "CUDAExtension" in code
    for word in ("py_limited_api", "-std=", "fast_math", "fast-math", "pkg_resources", "is_available"):
        assert word not in code
