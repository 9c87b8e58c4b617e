"""Compiles the C++ test programs once a session."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns ``compile(source, *flags, compiler="g++", library=())``: the program of
    tests/kernels/``source`` and csrc/``library``.
    """
    programs: dict[tuple, Path] = {}

    def compile(source: str, *flags: str, compiler: str = "g++", library: tuple[str, ...] = ()) -> Path:
        if shutil.which(compiler) is None:
            pytest.skip(f"there is no {compiler} on PATH")
        key = (source, flags, compiler, library)
        if key not in programs:
            program = tmp_path_factory.mktemp("cpp") / Path(source).stem
            files = [str(HERE / source), *(str(CSRC / name) for name in library)]
            command = [compiler, "-std=c++17", *flags, f"-I{CSRC}", *files, "-o", str(program)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
            programs[key] = program
        return programs[key]

    return compile
