"""Every kernel and launcher of csrc/cuda, run on the CPU against csrc/cpu: four schedules that
agree, under sanitizers, memory poisoned.

Each tests/kernels/cases_<stem>.cpp is a program of its own; kernel_case.h says how to write one.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from build_tools.cuda import find_toolkits
from build_tools.sources import read_sources

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
STEMS = sorted(path.stem.removeprefix("cases_") for path in HERE.glob("cases_*.cpp"))
SANITIZERS = {
    # Looking for uses of a local after its function has returned would map memory for every fiber,
    # at ten times the cost of all the rest. What "null" and "object-size" look for stops under
    # "address" as well; compiling them takes a third of the time.
    "address and undefined": (
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,object-size",
        "-fno-sanitize-recover=all",
        "-fsanitize-address-use-after-return=never",
    ),
    "thread": ("-fsanitize=thread",),
}
#: GCC 12's ThreadSanitizer misses races between fibers.
COMPILER = "clang++-19"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns ``program(stem, sanitizer)``, compiled at its first use."""
    toolkits, looked = find_toolkits(os.environ)
    if shutil.which(COMPILER) is None or not toolkits:
        pytest.skip(
            f"needs {COMPILER} (apt-get install clang-19 libclang-rt-19-dev) and a CUDA toolkit's headers:"
            f" {'; '.join(looked)}"
        )

    folder = tmp_path_factory.mktemp("kernels")
    flags = [
        *("-std=c++17", "-fno-strict-aliasing", "-gline-tables-only", "-Wall", "-Wextra", "-Werror"),
        *(
            "-Wno-unknown-pragmas",
            "-Wno-unused-parameter",
            "-Wno-unused-variable",
        ),  # OpenMP's pragmas and what only they use
        *(f"-I{CSRC}", f"-I{HERE}", "-DMF_KERNELS_ON_CPU", "-x", "c++"),
    ]
    as_kernels = ["-isystem", toolkits[0].root / "include", "-include", CSRC / "emulated" / "cuda_on_cpu.h"]

    def call(*arguments: str | Path) -> None:
        command = [COMPILER, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"

    @functools.cache
    def compile(source: Path, sanitizer: str) -> Path:
        output = folder / f"{source.name}-{source.parent.name}-{sanitizer.split()[0]}.o"
        # Kernels and their twins take the time of a run, the cases that of the compiler.
        call(
            "-O0" if source.parent == HERE else "-O1",
            *flags,
            *SANITIZERS[sanitizer],
            *(as_kernels if source.parent.name != "cpu" else ()),
            "-c",
            source,
            "-o",
            output,
        )
        return output

    @functools.cache
    def link(stem: str, sanitizer: str) -> Path:
        output = folder / f"{stem}-{sanitizer.split()[0]}"
        twin = (
            CSRC / "cpu" / f"{stem}.cpp"
        )  # not there where PyTorch's own operations serve the CPU: the cases then hold a twin
        # The optimised ones first: of a function that several hold, the first is linked.
        sources = [
            CSRC / "cuda" / f"{stem}.cu",
            *([twin] if twin.exists() else ()),
            HERE / f"cases_{stem}.cpp",
            HERE / "kernel_check.cpp",
        ]
        call(*SANITIZERS[sanitizer], *(compile(source, sanitizer) for source in sources), "-o", output)
        return output

    return link


def with_headers(path: Path) -> set[Path]:
    """A source and the headers of csrc/cuda that it includes, directly or not."""
    included = {CSRC / name for name in re.findall(r'#include "(cuda/\w+\.cuh)"', path.read_text())}
    return {path}.union(*map(with_headers, included))


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Of a missing barrier one race is enough.
    settings = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, env=settings)


def test_every_kernel_has_cases():
    assert {Path(name).stem for name in read_sources(CSRC)["MOSE_FAST_CUDA_SOURCES"]} == set(STEMS)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("stem", STEMS)
def test_cases_hold(program, stem, sanitizer):
    done = run(program(stem, sanitizer))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    cases = len(re.findall(r"^KERNEL_CASE\(", (HERE / f"cases_{stem}.cpp").read_text(), re.MULTILINE))
    assert [line[:5] for line in lines[:-1]] == ["ok   "] * cases
    assert lines[-1] == f"0 of {cases} cases failed"


@pytest.mark.slow
@pytest.mark.parametrize("stem", STEMS)
def test_every_missing_barrier_is_caught(program, stem):
    """Both by the schedules and by ThreadSanitizer; the cases named small_...

    must reach every barrier that the others reach.
    """

    def barriers(*names: str) -> set[str]:
        return set(
            re.findall(
                r"^barrier (\S+)$", run(program(stem, "address and undefined"), "--sites", *names).stdout, re.MULTILINE
            )
        )

    small = [] if "small_" not in (HERE / f"cases_{stem}.cpp").read_text() else ["small_"]
    sites = barriers(*small)
    assert sites == barriers()
    assert bool(sites) == any(
        "__syncthreads" in path.read_text() for path in with_headers(CSRC / "cuda" / f"{stem}.cu")
    )
    for site in sites:
        by_schedules = run(program(stem, "address and undefined"), "--without", site, *small)
        assert by_schedules.returncode == 1, f"no schedule showed that the barrier in {site} was missing"
        by_sanitizer = run(program(stem, "thread"), "--without", site, *small)
        # Or the access that a place read too early led to, if that comes first.
        assert re.search("ThreadSanitizer: (data race|SEGV)", by_sanitizer.stderr), (
            f"ThreadSanitizer did not miss the barrier in {site}"
        )
