"""The search for a CUDA toolkit and the architecture lists, on made-up folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from build_tools.cuda import (
    OLDEST_ARCH,
    RELEASE_ARCHS,
    Toolkit,
    cmake_archs,
    default_archs,
    find_toolkits,
    gencode_flags,
    ignored_variables,
    parse_archs,
    supported_archs,
)


def make_toolkit(root: Path) -> Path:
    (root / "include").mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").touch()
    (root / "bin").mkdir()
    (root / "bin" / "nvcc").touch(mode=0o755)
    return root


def nvcc_says(release: str, top: Path | None = None):
    def run(command):
        if "--version" in command:
            return f"Cuda compilation tools, release {release}, V{release}.88\n"
        return f"#$ _NVVM_BRANCH_=nvvm\n#$ TOP={top}/bin/..\n" if top else ""

    return run


def test_cuda_home_comes_first_and_is_not_listed_twice(tmp_path):
    home, other = make_toolkit(tmp_path / "home"), make_toolkit(tmp_path / "other")
    toolkits, looked = find_toolkits({"CUDA_HOME": str(home)}, [other, home], nvcc_says("13.0"))
    assert [toolkit.root for toolkit in toolkits] == [home, other]
    assert toolkits[0].version == (13, 0)
    assert "CUDA_PATH: not set" in looked and "nvcc on PATH: not found" in looked


def test_nvcc_on_path_that_is_a_wrapper_outside_its_toolkit(tmp_path):
    real = make_toolkit(tmp_path / "cuda-13.0")
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.touch(mode=0o755)
    toolkits, _ = find_toolkits({"PATH": str(wrapper.parent)}, [], nvcc_says("13.0", real))
    assert [toolkit.root for toolkit in toolkits] == [real]


def test_nvcc_on_path_that_is_a_link_into_its_toolkit(tmp_path):
    real = make_toolkit(tmp_path / "cuda")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(real / "bin" / "nvcc")
    toolkits, _ = find_toolkits({"PATH": str(tmp_path / "bin")}, [], nvcc_says("12.8"))
    assert [(toolkit.root, toolkit.version) for toolkit in toolkits] == [(real, (12, 8))]


@pytest.mark.parametrize("part", ["include/cuda_runtime.h", "bin/nvcc"])
def test_a_folder_without_header_or_compiler_is_no_toolkit_and_is_reported(tmp_path, part):
    home = make_toolkit(tmp_path / "home")
    (home / part).unlink()
    toolkits, looked = find_toolkits({"CUDA_HOME": str(home)}, [], nvcc_says("13.0"))
    assert toolkits == []
    assert f"CUDA_HOME={home}: no {part} in {home}" in looked


def test_an_nvcc_that_does_not_run_is_reported(tmp_path):
    home = make_toolkit(tmp_path / "home")
    toolkits, looked = find_toolkits({}, [home], lambda command: "")
    assert toolkits == []
    assert looked[-1] == f"{home}: {home / 'bin' / 'nvcc'} --version tells no release"


def test_default_architectures():
    assert ";".join(default_archs((13, 0))) == "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
    assert ";".join(default_archs((12, 6))) == "8.0;8.6;8.9;9.0+PTX"  # CUDA 12.6 does not know Blackwell
    assert RELEASE_ARCHS[0] == OLDEST_ARCH


@pytest.mark.parametrize("text", ["8.0;9.0a;12.0+PTX", "8.0 9.0a 12.0+PTX", " 8.0, 9.0a;;12.0+PTX "])
def test_parse_archs_takes_every_separator_that_torch_takes(text):
    assert parse_archs(text) == ["8.0", "9.0a", "12.0+PTX"]


@pytest.mark.parametrize("text", ["", " ; ", "90", "Hopper", "9.0;sm_80", "9.0+ptx"])
def test_parse_archs_refuses_what_is_no_compute_capability(text):
    with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST is .* wanted compute capabilities"):
        parse_archs(text)


def test_cmake_archs():
    assert cmake_archs(["8.0", "9.0a", "12.0+PTX"]) == ["80-real", "90a-real", "120"]


TOOLKIT = Toolkit(Path("/opt/cuda"), (13, 0))


def nvcc_knows(*numbers: str):
    def run(command):
        assert command[0] == "/opt/cuda/bin/nvcc" and "--dryrun" in command
        number = next(flag for flag in command if flag.startswith("-gencode")).split(",")[0].partition("compute_")[2]
        return "" if number in numbers else f"nvcc fatal   : Unsupported gpu architecture 'compute_{number}'\n"

    return run


@pytest.mark.parametrize(
    ("archs", "kept", "left_out"),
    [
        ("8.0 9.0a 12.0+PTX", "8.0 9.0a 12.0+PTX", ""),
        ("7.5 8.0 9.0a", "8.0 9.0a", "7.5 (the kernels need 8.0 or newer)"),
        ("7.0 7.5+PTX 8.0", "8.0", "7.0 and 7.5+PTX (the kernels need 8.0 or newer)"),
        ("8.0 9.0 13.0", "8.0 9.0", None),
        ("7.5 8.0 8.0a", "8.0", "7.5 (the kernels need 8.0 or newer) and 8.0a (unknown to nvcc 13.0)"),
    ],
)
def test_what_cannot_be_compiled_is_named_and_left_out(archs, kept, left_out):
    found, said = supported_archs(archs.split(), TOOLKIT, nvcc_knows("75", "80", "90", "90a", "120"))
    assert found == kept.split()
    left_out = "13.0 (unknown to nvcc 13.0)" if left_out is None else left_out
    assert said == (f"; TORCH_CUDA_ARCH_LIST without {left_out}" if left_out else "")


@pytest.mark.parametrize("archs", ["7.5", "6.0 7.5+PTX", "13.0"])
def test_a_list_of_which_nothing_can_be_compiled_is_refused(archs):
    with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST is .*; wanted compute capabilities of at least 8\.0"):
        supported_archs(archs.split(), TOOLKIT, nvcc_knows("75", "80", "90"))


TOOLKITS, _ = find_toolkits(os.environ)


@pytest.mark.skipif(not TOOLKITS, reason="no CUDA toolkit")
def test_nvcc_itself_is_asked():
    kept, said = supported_archs(["7.5", "8.0", "9.0a", "8.0a", "9.9"], TOOLKITS[0])
    assert kept == ["8.0", "9.0a"]
    assert "8.0a and 9.9 (unknown to nvcc" in said


def test_gencode_flags():
    assert gencode_flags(["9.0a", "12.0+PTX"]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


def test_a_variable_whose_toolkit_torch_cannot_use_is_named(tmp_path):
    old, new = make_toolkit(tmp_path / "cuda-12.8"), make_toolkit(tmp_path / "cuda-13.0")

    def run(command):
        release = "12.8" if str(old) in command[0] else "13.0"
        return nvcc_says(release)(command)

    _, looked = find_toolkits({"CUDA_HOME": str(old), "CUDA_PATH": str(new)}, [], run)
    assert ignored_variables(looked, 13) == f"; CUDA_HOME={old}: CUDA 12.8 in {old}, so it is ignored"
    assert ignored_variables(looked, 12) == f"; CUDA_PATH={new}: CUDA 13.0 in {new}, so it is ignored"
    _, looked = find_toolkits({"CUDA_HOME": str(tmp_path)}, [new], run)
    assert ignored_variables(looked, 13).startswith(f"; CUDA_HOME={tmp_path}: no include/cuda_runtime.h")
    assert ignored_variables(["CUDA_HOME: not set", f"{old}: CUDA 12.8 in {old}"], 13) == ""
