"""``mose-fast doctor``: what is found, what is missing, and a fix for each thing missing."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mose_fast import _dali, _loader, streams
from mose_fast.app import doctor
from mose_fast.app.doctor import Finding, diagnose, serves_gpu


def by_thing(findings):
    return {finding.thing: finding for finding in findings}


@pytest.mark.parametrize(
    ("capability", "archs", "serves"),
    [
        ((9, 0), ["9.0"], True),
        ((8, 6), ["8.0"], True),  # same major, newer minor
        ((8, 0), ["8.6"], False),
        ((9, 0), ["8.0", "8.9+PTX"], True),
        ((8, 9), ["9.0+PTX"], False),
        ((13, 0), ["12.0+PTX"], True),
        ((9, 0), ["9.0a"], True),
        ((10, 3), ["10.0a"], False),
        ((10, 3), ["10.0f"], True),
        ((9, 0), [], False),
    ],
)
def test_serves_gpu(capability, archs, serves):
    assert serves_gpu(capability, archs) is serves


def test_everything_missing_has_a_fix(tmp_path):
    findings = diagnose(str(tmp_path))
    things = [finding.thing for finding in findings]
    assert len(set(things)) == len(things)
    assert {finding.mark for finding in findings} <= {"ok", "--"}  # the tests run here, so a run is possible
    for finding in findings:
        assert finding.found
        assert bool(finding.fix) == (finding.mark != "ok"), finding
    found = by_thing(findings)
    for thing in (
        "Python",
        "torch",
        "packages",
        "CUDA of torch",
        "NVIDIA driver",
        "native library",
        "C++ compiler",
        "ninja",
        "nvcc",
    ):
        assert thing in found
    assert found["Python"].found.startswith(".".join(map(str, sys.version_info[:2])))
    assert torch.__version__ in found["torch"].found
    if not torch.cuda.is_available():
        assert found["precision"] == Finding("ok", "precision", "fp32 (auto: on the CPU)")
    assert set(things) >= {f"data: {name}" for name in streams.names()}


def test_data_sets_are_looked_for_in_the_folder(tmp_path):
    before = by_thing(diagnose(str(tmp_path)))["data: split-cifar100"]
    assert before.mark == "--"
    assert str(tmp_path) in before.found
    assert "cifar100.npz" in before.fix
    np.savez(tmp_path / "cifar100.npz", x_train=np.zeros(1))
    after = by_thing(diagnose(str(tmp_path)))["data: split-cifar100"]
    assert after == Finding("ok", "data: split-cifar100", str(tmp_path / "cifar100.npz"))


def test_command_prints_columns_and_a_verdict(call, tmp_path):
    code, out, _ = call("doctor", "--data-dir", tmp_path)
    assert code == 0
    lines = out.splitlines()
    column = lines[0].index(".".join(map(str, sys.version_info[:2])))
    listed = lines[: lines.index("")]
    for line in listed:
        assert re.match(r"(ok  |--  )  \S| +-> \S", line), line
        assert line[column - 1] == " " != line[column], line
    assert sum(line.startswith("--") for line in listed) == sum(line.lstrip().startswith("->") for line in listed)
    assert lines[-1] == "A run is possible: mose-fast run --stream digits --width 16 --memory 500 --seed 0"


def test_missing_package_makes_a_run_impossible(call, monkeypatch):
    importable = doctor._importable
    monkeypatch.setattr(doctor, "_importable", lambda name: name not in ("sklearn", "matplotlib") and importable(name))
    code, out, _ = call("doctor")
    assert code == 1
    assert re.search(r"^FAIL  packages +missing: sklearn, matplotlib$", out, re.MULTILINE)
    assert "-> pip install scikit-learn matplotlib" in out
    assert out.splitlines()[-1] == "No run is possible until this is fixed: packages"


@pytest.mark.slow
def test_doctor_works_where_a_package_is_missing():
    # None in sys.modules makes an import fail as a package that is not installed does.
    code = (
        "import sys; sys.modules.update(sklearn=None, tensorboard=None); from mose_fast.app.cli import main;"
        " sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1, done.stdout
    assert "missing: sklearn, tensorboard" in done.stdout


def test_bare_environment_names_what_building_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(executable=str(tmp_path / "python")))
    monkeypatch.setattr(doctor, "_nvcc_release", lambda environment: None)
    found = by_thing(doctor._build_tools({"PATH": str(tmp_path)}))
    assert found["C++ compiler"] == Finding("--", "C++ compiler", "none on PATH", found["C++ compiler"].fix)
    assert "build-essential" in found["C++ compiler"].fix
    assert "pip install ninja" in found["ninja"].fix
    assert "toolkit or set CUDA_HOME" in found["nvcc"].fix
    broken = by_thing(doctor._build_tools({"PATH": str(tmp_path), "CXX": "/none/g++"}))["C++ compiler"]
    assert broken.found == "CXX=/none/g++ does not run"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_names_no_toolkit_is_named(tmp_path, variable):
    (found,) = [
        line for line in doctor._build_tools({variable: str(tmp_path / "none"), "PATH": ""}) if line.thing == variable
    ]
    assert found.mark == "--"
    assert "which is ignored: it has no bin/nvcc and no include/cuda_runtime.h" in found.found


def test_a_data_folder_that_does_not_exist_is_refused(tmp_path, call):
    code, _, err = call("doctor", "--data-dir", tmp_path / "none")
    assert code == 2
    assert err.endswith("which is not a folder; wanted the folder with the data sets' files\n")


@pytest.mark.parametrize(("release", "mark"), [("12.8", "--"), ("13.1", "ok")])
def test_nvcc_must_have_the_major_release_of_torch(monkeypatch, tmp_path, release, mark):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = by_thing(doctor._build_tools({"CUDA_HOME": str(tmp_path), "PATH": ""}))["nvcc"]
    assert found.mark == mark
    assert release in found.found
    assert ("CUDA 13 toolkit" in found.fix) == (mark == "--")


def test_gpus_are_held_against_the_compiled_archs(monkeypatch):
    gpu = SimpleNamespace(name="Imagined 5000", total_memory=24 * 2**30, major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
    monkeypatch.setattr(_loader, "record", {"archs": ["8.0"]})
    (served,) = doctor._gpus()
    assert served == Finding("ok", "GPU 0", "Imagined 5000, 24 GiB, compute capability 8.6")
    monkeypatch.setattr(_loader, "record", {"archs": ["9.0"]})
    (other,) = doctor._gpus()
    assert other.mark == "--"
    assert "compiled for 9.0 only" in other.found
    assert "TORCH_CUDA_ARCH_LIST=8.6" in other.fix

    def no_kernel(*size, device):
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(torch, "ones", no_kernel)
    (unusable,) = doctor._gpus()
    assert "torch cannot use it (no kernel image is available)" in unusable.found


def test_native_library(monkeypatch):
    record = {
        "backend": "cuda",
        "cuda": "13.0",
        "archs": ["9.0"],
        "torch": "2.14.1+cu130",
        "commit": "0123456789abcdef",
    }
    monkeypatch.setattr(_loader, "native", SimpleNamespace())
    monkeypatch.setattr(_loader, "record", record)
    assert doctor._native() == Finding(
        "ok", "native library", "cuda 13.0 for 9.0, compiled against torch 2.14.1+cu130, commit 0123456789ab"
    )
    monkeypatch.setattr(_loader, "record", {**record, "backend": "cpu", "cuda": None, "archs": [], "commit": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor._native() == Finding(
        "ok", "native library", "cpu, compiled against torch 2.14.1+cu130, commit unknown"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "MOSE_FAST_BACKEND=cuda" in doctor._native().fix
    monkeypatch.setattr(_loader, "record", {**record, "backend": "emulated", "cuda": None, "archs": []})
    monkeypatch.setenv("MOSE_FAST_NATIVE", "build/emulated/mose_fast")
    found = (
        "emulated, compiled against torch 2.14.1+cu130, commit 0123456789ab; runs the CUDA kernels on the CPU, slowly"
    )
    assert doctor._native() == Finding("--", "native library", found, "only for tests; unset MOSE_FAST_NATIVE")
    monkeypatch.delenv("MOSE_FAST_NATIVE")
    assert doctor._native().fix == f"only for tests; {_loader.REBUILD}"


@pytest.mark.slow
@pytest.mark.parametrize("switched_off", [True, False])
def test_missing_native_library_says_why(tmp_path, switched_off):
    environment = {**os.environ, "MOSE_FAST_NATIVE": "0" if switched_off else str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "mose_fast", "doctor"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reason = "it is switched off by MOSE_FAST_NATIVE=0" if switched_off else f"there is no native library in {tmp_path}"
    assert re.search(
        rf"^--    native library +not used: {re.escape(reason)}; pure PyTorch is used", done.stdout, re.MULTILINE
    )
    assert ("-> unset MOSE_FAST_NATIVE" in done.stdout) == switched_off


@pytest.mark.skipif(_dali.obstacle() is not None, reason="DALI is not installed")
@pytest.mark.parametrize(("gpu", "feed"), [(False, "fused"), (True, "dali")])
def test_dali_and_what_makes_the_views(monkeypatch, gpu, feed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert doctor._feed() == Finding("ok", "DALI (optional)", f"{_dali.version()}; --feed auto is {feed} here")


@pytest.mark.parametrize("gpu", [False, True])
def test_without_dali_the_views_are_fused(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    found = doctor._feed()
    assert (found.mark, found.fix) == ("--", _dali.INSTALL)
    assert found.found == "DALI is not installed; --feed auto is fused here"
