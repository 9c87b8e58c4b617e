"""Plans a native build: which back end, how many jobs, which torch, and what is recorded about
it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import distributions
from typing import Any

from build_tools.cuda import Toolkit, ignored_variables

MINIMUM_TORCH = "torch>=2.11"
EMULATOR = "clang++-19"  # the compiler of an emulated build
GIB_PER_JOB = 1.5  # a translation unit of the glue takes 1.0 GiB in g++; the rest is margin
GIB_RESERVED = 2.0


class BuildError(Exception):
    """The build cannot go on; the message says what is missing and what to do."""


def choose_backend(
    wanted: str, torch_cuda: str | None, toolkits: Sequence[Toolkit], looked: Sequence[str], clang: str | None
) -> tuple[str, Toolkit | None, str]:
    """Decides between a CPU, a CUDA and an emulated build. Whether a GPU is present is never asked:
    build machines have none.

    Args:
        wanted: ``MOSE_FAST_BACKEND``: ``auto``, ``cpu``, ``cuda``, or ``emulated``, which compiles
            the kernels for the CPU.
        torch_cuda: ``torch.version.cuda`` of the torch compiled against, None for a CPU build.
        toolkits, looked: As :func:`build_tools.cuda.find_toolkits` returns them.
        clang: Path of :data:`EMULATOR`, None where there is none.

    Returns:
        The back end; the toolkit to build with (an emulated build takes its headers alone), None
        for a CPU-only build; and one sentence that says why.

    Raises:
        BuildError: ``wanted`` is unknown; or it is ``cuda`` and there is no toolkit of torch's CUDA
            major; or it is ``emulated`` and there is no toolkit or no clang.
    """
    places = "".join(f"\n  {line}" for line in looked)
    if wanted not in ("auto", "cpu", "cuda", "emulated"):
        raise BuildError(f"MOSE_FAST_BACKEND is {wanted!r}; wanted 'auto', 'cpu', 'cuda' or 'emulated'")
    if wanted == "cpu":
        return "cpu", None, "CPU-only build: MOSE_FAST_BACKEND=cpu"
    if wanted == "emulated":
        if clang is None:
            raise BuildError(
                f"MOSE_FAST_BACKEND=emulated, but there is no {EMULATOR} on PATH. To go on: apt-get install clang-19"
            )
        if not toolkits:
            reason = "no CUDA toolkit (bin/nvcc and include/cuda_runtime.h), whose headers it needs"
            raise BuildError(
                f"MOSE_FAST_BACKEND=emulated, but {reason}. Looked for it in:{places}\nTo go on, set CUDA_HOME to its"
                " folder."
            )
        return (
            "emulated",
            toolkits[0],
            f"emulated build: the kernels compiled for the CPU by {clang}, headers of {toolkits[0].root}",
        )
    if torch_cuda is None:
        reason = "the torch to compile against is a CPU build (torch.version.cuda is None)"
        advice = "install a CUDA build of torch"
    else:
        major = int(torch_cuda.split(".")[0])
        for toolkit in toolkits:
            if toolkit.version[0] == major:
                version = ".".join(map(str, toolkit.version))
                reason = (
                    f"CUDA build: nvcc {version} in {toolkit.root} for a torch with CUDA"
                    f" {torch_cuda}{ignored_variables(looked, major)}"
                )
                return "cuda", toolkit, reason
        reason = f"no CUDA {major} toolkit (bin/nvcc and include/cuda_runtime.h) for a torch with CUDA {torch_cuda}"
        advice = f"install the CUDA {major} toolkit or set CUDA_HOME to its folder"
    if wanted == "cuda":
        raise BuildError(f"MOSE_FAST_BACKEND=cuda, but {reason}. Looked for it in:{places}\nTo go on, {advice}.")
    return "cpu", None, f"CPU-only build: {reason}. Looked in:{places}"


def job_count(cores: int, free: float, max_jobs: str | None = None) -> int:
    """How many compilers may run at once: as many as ``cores`` and ``free`` memory (GiB) allow, at
    least one, or the user's own ``MAX_JOBS``. Raises BuildError if that is not a positive integer.
    """
    if max_jobs:
        if not re.fullmatch(r"0*[1-9]\d*", max_jobs):
            raise BuildError(f"MAX_JOBS is {max_jobs!r}; wanted a positive integer")
        return int(max_jobs)
    return max(1, min(cores, int((free - GIB_RESERVED) / GIB_PER_JOB)))


def available_gib(meminfo: str, limit: str = "max", used: str = "0") -> float:
    """The memory that may still be used, GiB: the machine's (``/proc/meminfo``; 4 GiB where it does
    not say), or the container's where that is less (its control group's ``memory.max``, bytes or
    ``max``, and ``memory.current``).
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    machine = int(found.group(1)) / 2**20 if found else 4.0
    return machine if limit.strip() in ("", "max") else min(machine, (int(limit) - int(used)) / 2**30)


def installed_torch(site_packages: Sequence[str]) -> tuple[str, str | None] | None:
    """(version, CUDA version or None) of the torch installed in these folders, or None; torch is
    not imported. An isolated build hides the environment it installs into, but not its folders.
    """
    for distribution in distributions(name="torch", path=list(site_packages)):
        text = distribution.locate_file("torch/version.py").read_text()
        cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
        version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return (version.group(1) if version else distribution.version), (cuda.group(1) if cuda else None)
    return None


def torch_requirement(version: str | None, *, exact: bool) -> str:
    """The requirement on torch that goes with a version such as ``2.14.1+cu130``; any supported
    torch if it is None. ``exact`` is for building (the very release that will run), else it is the
    package's own (the same minor release, within which torch keeps its C++ interface).
    """
    if version is None:
        return MINIMUM_TORCH
    public = version.split("+")[0]
    return f"torch=={public}" if exact else f"torch=={'.'.join(public.split('.')[:2])}.*"


def check_same_torch(compiled: tuple[str, str | None], target: tuple[str, str | None] | None) -> None:
    """Raises BuildError if the torch compiled against and the one installed where the package will
    run, each (version, CUDA version), differ in minor release or CUDA major: the library would not
    load.
    """
    if target is None:
        return

    def key(torch: tuple[str, str | None]) -> tuple[list[str], str | None]:
        return torch[0].split("+")[0].split(".")[:2], torch[1] and torch[1].split(".")[0]

    if key(compiled) != key(target):
        raise BuildError(
            f"this build compiles against torch {compiled[0]} (CUDA {compiled[1]}), but torch {target[0]} (CUDA"
            f" {target[1]}) is installed and would run it. Use: pip install --no-build-isolation ."
        )


def build_record(
    backend: str,
    commit: str | None,
    sources: str | None,
    torch_version: str,
    torch_cuda: str | None,
    toolkit: Toolkit | None,
    archs: Sequence[str],
) -> dict[str, Any]:
    """What ``_build.json`` beside the library says of it, before it is loaded."""
    return {
        "commit": commit,
        "sources": sources,
        "backend": backend,
        "archs": list(archs),
        "torch": torch_version,
        "torch_cuda": torch_cuda,
        "cuda": ".".join(map(str, toolkit.version)) if toolkit and backend == "cuda" else None,
    }
