"""The search for a CUDA toolkit and the architecture lists, on made-up folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.cuda import RELEASE_ARCHS, cmake_archs, default_archs, find_toolkits, parse_archs


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
    assert "7.5" not in RELEASE_ARCHS  # no native bfloat16


@pytest.mark.parametrize("text", ["8.0;9.0a;12.0+PTX", "8.0 9.0a 12.0+PTX", " 8.0, 9.0a;;12.0+PTX "])
def test_parse_archs_takes_every_separator_that_torch_takes(text):
    assert parse_archs(text) == ["8.0", "9.0a", "12.0+PTX"]


@pytest.mark.parametrize("text", ["", " ; ", "90", "Hopper", "9.0;sm_80", "9.0+ptx"])
def test_parse_archs_refuses_what_is_no_compute_capability(text):
    with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST is .* wanted compute capabilities"):
        parse_archs(text)


def test_cmake_archs():
    assert cmake_archs(["8.0", "9.0a", "12.0+PTX"]) == ["80-real", "90a-real", "120"]
