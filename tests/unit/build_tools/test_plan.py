"""Back end, job count, matching torch: the decisions of a build, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.cuda import Toolkit
from build_tools.plan import (
    BuildError,
    available_gib,
    build_record,
    check_same_torch,
    choose_backend,
    installed_torch,
    job_count,
    torch_requirement,
)

CUDA_12, CUDA_13 = Toolkit(Path("/opt/cuda-12.8"), (12, 8)), Toolkit(Path("/opt/cuda-13.0"), (13, 0))
CLANG = "/usr/bin/clang++-19"
LOOKED = ["CUDA_HOME: not set", "/usr/local/cuda: no bin/nvcc in /usr/local/cuda"]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_the_toolkit_of_torchs_own_major_is_taken(wanted):
    backend, toolkit, reason = choose_backend(wanted, "13.0", [CUDA_12, CUDA_13], [], None)
    assert backend == "cuda" and toolkit is CUDA_13
    assert reason.startswith("CUDA build: nvcc 13.0 in /opt/cuda-13.0")


def test_cpu_wins_over_a_toolkit():
    assert choose_backend("cpu", "13.0", [CUDA_13], [], CLANG) == ("cpu", None, "CPU-only build: MOSE_FAST_BACKEND=cpu")


@pytest.mark.parametrize(
    ("torch_cuda", "toolkits", "reason"),
    [
        ("13.0", [], "no CUDA 13 toolkit"),
        ("13.0", [CUDA_12], "no CUDA 13 toolkit"),
        (None, [CUDA_13], "is a CPU build"),
    ],
)
def test_what_auto_does_without_is_an_error_for_cuda_and_says_where_it_looked(torch_cuda, toolkits, reason):
    backend, toolkit, text = choose_backend("auto", torch_cuda, toolkits, LOOKED, CLANG)
    assert backend == "cpu" and toolkit is None
    assert text.startswith("CPU-only build: ") and reason in text
    with pytest.raises(BuildError) as error:
        choose_backend("cuda", torch_cuda, toolkits, LOOKED, CLANG)
    assert reason in str(error.value)
    assert all(line in str(error.value) for line in LOOKED)
    assert "To go on, install" in str(error.value)


def test_an_unknown_backend_is_refused():
    with pytest.raises(BuildError, match="MOSE_FAST_BACKEND is 'gpu'; wanted 'auto', 'cpu', 'cuda' or 'emulated'"):
        choose_backend("gpu", None, [], [], CLANG)


@pytest.mark.parametrize("torch_cuda", ["13.0", None])
def test_an_emulated_gpu_takes_the_headers_of_any_toolkit_whatever_torch_is(torch_cuda):
    backend, toolkit, reason = choose_backend("emulated", torch_cuda, [CUDA_12, CUDA_13], LOOKED, CLANG)
    assert backend == "emulated" and toolkit is CUDA_12
    assert (
        reason == "emulated build: the kernels compiled for the CPU by /usr/bin/clang++-19, headers of /opt/cuda-12.8"
    )


def test_an_emulated_gpu_without_clang_or_headers_is_an_error_that_says_what_to_install():
    with pytest.raises(BuildError) as error:
        choose_backend("emulated", "13.0", [CUDA_13], [], None)
    assert (
        str(error.value)
        == "MOSE_FAST_BACKEND=emulated, but there is no clang++-19 on PATH. To go on: apt-get install clang-19"
    )
    with pytest.raises(BuildError, match="no CUDA toolkit") as error:
        choose_backend("emulated", "13.0", [], LOOKED, CLANG)
    assert all(line in str(error.value) for line in LOOKED)
    assert str(error.value).endswith("To go on, set CUDA_HOME to its folder.")


@pytest.mark.parametrize(
    ("cores", "free", "max_jobs", "jobs"),
    [
        (2, 24.0, None, 2),  # bounded by cores
        (64, 8.0, None, 4),  # bounded by memory: (8 - 2) / 1.5
        (64, 3.5, None, 1),
        (8, 0.3, None, 1),  # never less than one
        (2, 24.0, "7", 7),  # the user decides
        (2, 24.0, "", 2),
    ],
)
def test_job_count(cores, free, max_jobs, jobs):
    assert job_count(cores, free, max_jobs) == jobs


@pytest.mark.parametrize("max_jobs", ["0", "-1", "two", "1.5"])
def test_job_count_refuses_a_wrong_max_jobs(max_jobs):
    with pytest.raises(BuildError, match=f"MAX_JOBS is '{max_jobs}'; wanted a positive integer"):
        job_count(2, 24.0, max_jobs)


def test_available_memory_is_the_machines_or_the_containers():
    meminfo = "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\n"
    assert available_gib(meminfo) == 16.0
    assert available_gib(meminfo, "max\n", "5") == 16.0
    assert available_gib(meminfo, str(6 * 2**30), f"{2**30}\n") == 5.0
    assert available_gib(meminfo, str(64 * 2**30), "0") == 16.0
    assert available_gib("") == 4.0


def fake_torch(site: Path, version: str, cuda: str | None) -> None:
    (site / "torch").mkdir(parents=True)
    lines = (
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] ="
        " None\n"
    )
    (site / "torch" / "version.py").write_text(lines)
    info = site / f"torch-{version.split('+')[0]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version.split('+')[0]}\n")


@pytest.mark.parametrize(("version", "cuda"), [("2.14.1+cu130", "13.0"), ("2.13.0+cpu", None)])
def test_installed_torch_is_read_without_importing_it(tmp_path, version, cuda):
    assert installed_torch([str(tmp_path)]) is None
    fake_torch(tmp_path, version, cuda)
    assert installed_torch([str(tmp_path)]) == (version, cuda)


def test_torch_requirement():
    assert torch_requirement(None, exact=True) == torch_requirement(None, exact=False) == "torch>=2.11"
    assert torch_requirement("2.14.1+cu130", exact=True) == "torch==2.14.1"
    assert torch_requirement("2.14.1+cu130", exact=False) == "torch==2.14.*"


@pytest.mark.parametrize("target", [None, ("2.14.0+cu131", "13.1"), ("2.14.1", "13.0")])
def test_a_torch_of_the_same_minor_release_and_cuda_major_will_do(target):
    assert check_same_torch(("2.14.1+cu130", "13.0"), target) is None


@pytest.mark.parametrize("target", [("2.13.1+cu130", "13.0"), ("2.14.1+cu128", "12.8"), ("2.14.1+cpu", None)])
def test_another_torch_is_an_error_that_says_what_to_do(target):
    with pytest.raises(BuildError) as error:
        check_same_torch(("2.14.1+cu130", "13.0"), target)
    assert "2.14.1+cu130" in str(error.value) and target[0] in str(error.value)
    assert str(error.value).endswith("Use: pip install --no-build-isolation .")


def test_record_tells_the_toolkit_that_compiled_not_only_torchs():
    record = build_record("cuda", "abc", "0123", "2.14.1+cu130", "13.0", Toolkit(Path("/opt/cuda"), (13, 1)), ["9.0"])
    assert record == {
        "commit": "abc",
        "sources": "0123",
        "backend": "cuda",
        "archs": ["9.0"],
        "torch": "2.14.1+cu130",
        "torch_cuda": "13.0",
        "cuda": "13.1",
    }
    assert build_record("cpu", None, None, "2.14.1+cu130", "13.0", None, [])["backend"] == "cpu"


def test_record_of_an_emulated_gpu_names_no_cuda_that_would_have_to_run():
    record = build_record("emulated", None, None, "2.14.1", None, CUDA_12, [])
    assert (record["backend"], record["cuda"], record["archs"]) == ("emulated", None, [])
