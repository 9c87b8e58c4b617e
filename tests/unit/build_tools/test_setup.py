"""setup.py and the build back end on machines that lack something, in processes of their own;
nothing is compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mose_fast import __version__
from tests.paths import ROOT


def bare_environment(tmp_path: Path, **changes: str) -> dict[str, str]:
    """An environment with git and no nvcc on PATH, without CUDA variables."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    if shutil.which("git"):
        (tools / "git").symlink_to(shutil.which("git"))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUDA", "MOSE_FAST", "TORCH_CUDA", "MAX_JOBS"))
    }
    return kept | {"PATH": str(tools)} | changes


def run_setup(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_version_needs_no_cuda(tmp_path):
    done = run_setup(["--version"], bare_environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == __version__
    assert "mose_fast: CUDA build" in done.stderr or "mose_fast: CPU-only build" in done.stderr


def test_cpu_backend_is_announced(tmp_path):
    done = run_setup(["--version"], bare_environment(tmp_path, MOSE_FAST_BACKEND="cpu"))
    assert done.returncode == 0, done.stderr
    assert "mose_fast: CPU-only build: MOSE_FAST_BACKEND=cpu; torch " + torch.__version__ in done.stderr


def test_version_needs_no_torch(tmp_path):
    done = run_setup(["--version"], bare_environment(tmp_path) | {"PYTHONPATH": str(without_torch(tmp_path))})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == __version__


def test_compiling_without_torch_says_what_to_install(tmp_path):
    environment = bare_environment(tmp_path) | {"PYTHONPATH": str(without_torch(tmp_path))}
    done = run_setup(["build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)], environment)
    assert done.returncode != 0
    assert "torch is not installed in the build environment. First: pip install 'torch>=2.11'" in done.stderr
    assert "Traceback" not in done.stderr


def without_torch(tmp_path: Path) -> Path:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MOSE_FAST_BACKEND": "gpu"}, "MOSE_FAST_BACKEND is 'gpu'; wanted 'auto', 'cpu', 'cuda' or 'emulated'"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS is 'many'; wanted a positive integer"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(tmp_path, changes, message):
    done = run_setup(["--version"], bare_environment(tmp_path, **changes))
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == f"mose_fast: {message}"


@pytest.mark.slow
def test_an_isolated_build_asks_for_the_torch_that_is_installed():
    ask = (
        "from build_tools import backend; print(backend.get_requires_for_build_wheel(),"
        " backend.get_requires_for_build_editable())"
    )
    environment = {**os.environ, "MOSE_FAST_BACKEND": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"'torch=={torch.__version__.split('+')[0]}'") == 2
    assert done.stdout.count("'ninja'") == 2


def test_build_tools_never_import_torch():
    modules = "build_tools.cuda, build_tools.plan, build_tools.sources, build_tools.describe"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0
