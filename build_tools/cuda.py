"""Finds the CUDA toolkit and chooses the architectures to compile for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Compute capabilities of a release build, oldest first.
RELEASE_ARCHS = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
#: The first compute capability with what the kernels use: the tensor cores' bfloat16 products, and
#: asynchronous copies to shared memory.
OLDEST_ARCH = "8.0"


@dataclass(frozen=True)
class Toolkit:
    """A folder that holds ``bin/nvcc`` and ``include/cuda_runtime.h``, and its nvcc's version."""

    root: Path
    version: tuple[int, int]


def run_text(command: Sequence[str]) -> str:
    """What ``command`` prints on stdout and stderr together; empty if it cannot run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _root_of_nvcc(nvcc: Path, run: Callable[[Sequence[str]], str]) -> Path:
    # An nvcc on PATH may be a script outside its toolkit; a dry run prints the folder that it
    # really works from.
    top = re.search(r"^#\$ TOP=(.+)$", run([str(nvcc), "--dryrun", "-x", "cu", "-c", "probe.cu"]), re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else nvcc.resolve().parent.parent


def find_toolkits(
    environment: Mapping[str, str],
    standard: Sequence[Path] | None = None,
    run: Callable[[Sequence[str]], str] = run_text,
) -> tuple[list[Toolkit], list[str]]:
    """Looks for CUDA toolkits: ``CUDA_HOME``, ``CUDA_PATH``, the nvcc on ``PATH``, then the
    standard folders; None means ``/usr/local/cuda``, ``/usr/local/cuda-*`` (newest first) and
    ``/opt/cuda``. Returns the toolkits in order of preference, and one line for each place that was
    looked into, saying what was there.
    """
    places: list[tuple[str, Path]] = []
    looked: list[str] = []
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            places.append((f"{name}={environment[name]}", Path(environment[name])))
        else:
            looked.append(f"{name}: not set")
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    if nvcc:
        places.append((f"nvcc on PATH ({nvcc})", _root_of_nvcc(Path(nvcc), run)))
    else:
        looked.append("nvcc on PATH: not found")
    if standard is None:
        versioned = sorted(
            Path("/usr/local").glob("cuda-*"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], reverse=True
        )
        standard = [Path("/usr/local/cuda"), *versioned, Path("/opt/cuda")]
    places += [(str(folder), folder) for folder in standard]

    toolkits: list[Toolkit] = []
    for label, root in places:
        missing = [part for part in ("include/cuda_runtime.h", "bin/nvcc") if not (root / part).is_file()]
        if missing:
            looked.append(f"{label}: no {' and no '.join(missing)} in {root}")
            continue
        release = re.search(r"release (\d+)\.(\d+)", run([str(root / "bin" / "nvcc"), "--version"]))
        if not release:
            looked.append(f"{label}: {root / 'bin' / 'nvcc'} --version tells no release")
            continue
        version = (int(release.group(1)), int(release.group(2)))
        looked.append(f"{label}: CUDA {version[0]}.{version[1]} in {root}")
        if all(toolkit.root.resolve() != root.resolve() for toolkit in toolkits):
            toolkits.append(Toolkit(root, version))
    return toolkits, looked


def ignored_variables(looked: Sequence[str], major: int) -> str:
    """Which of ``CUDA_HOME`` and ``CUDA_PATH`` hold no toolkit of torch's ``major`` version, though
    others may: who sets one wants that one. Text to put behind a sentence; may be empty.
    """
    set_here = [line for line in looked if re.match(r"CUDA_(HOME|PATH)=", line)]
    # Between two releases of one major version, the order of the places decides.
    return "".join(f"; {line}, so it is ignored" for line in set_here if f": CUDA {major}." not in line)


def default_archs(version: tuple[int, int]) -> list[str]:
    """The release architectures that a toolkit knows, the newest also as PTX."""
    known = [arch for arch in RELEASE_ARCHS if version >= (12, 8) or float(arch) < 10]  # Blackwell came with CUDA 12.8
    return [*known[:-1], known[-1] + "+PTX"]


def parse_archs(text: str) -> list[str]:
    """Splits a ``TORCH_CUDA_ARCH_LIST`` at semicolons, commas or blanks, for example ``"8.0;9.0a
    12.0+PTX"``. Raises ValueError if the list is empty or an item is not a compute capability.
    """
    archs = [item for item in re.split(r"[;,\s]+", text) if item]
    wrong = [arch for arch in archs if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch)]
    if wrong or not archs:
        raise ValueError(
            f"TORCH_CUDA_ARCH_LIST is {text!r}; wanted compute capabilities such as '9.0' or '8.0;9.0;12.0+PTX'"
            + (f", not {', '.join(map(repr, wrong))}" if wrong else "")
        )
    return archs


def supported_archs(
    archs: Sequence[str], toolkit: Toolkit, run: Callable[[Sequence[str]], str] = run_text
) -> tuple[list[str], str]:
    """Leaves out the compute capabilities that the kernels cannot be compiled for. Lists that were
    set for other packages often have some, such as 7.5; ptxas would say so after minutes. Returns
    those that remain, and text to put behind a sentence that names the others. Raises ValueError if
    none remains.
    """
    too_old = [arch for arch in archs if _number(arch) < _number(OLDEST_ARCH)]
    nvcc = [str(toolkit.root / "bin" / "nvcc"), "--dryrun", "-x", "cu", "-c", "probe.cu"]
    rest = [arch for arch in archs if arch not in too_old]
    unknown = [arch for arch in rest if "Unsupported gpu architecture" in run([*nvcc, *gencode_flags([arch])])]
    version = ".".join(map(str, toolkit.version))
    why = []
    if too_old:
        why.append(f"{' and '.join(too_old)} (the kernels need {OLDEST_ARCH} or newer)")
    if unknown:
        why.append(f"{' and '.join(unknown)} (unknown to nvcc {version})")
    kept = [arch for arch in rest if arch not in unknown]
    if not kept:
        raise ValueError(
            f"TORCH_CUDA_ARCH_LIST is {';'.join(archs)!r}; wanted compute capabilities of at least {OLDEST_ARCH} that"
            f" nvcc {version} knows, such as '9.0', or MOSE_FAST_BACKEND=cpu for a build without kernels for a GPU"
        )
    return kept, f"; TORCH_CUDA_ARCH_LIST without {' and '.join(why)}" if why else ""


def _number(arch: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", arch))


def gencode_flags(archs: Sequence[str]) -> list[str]:
    """Flags of nvcc. torch, which would do the same, knows no ``8.8`` and no ``10.0f``."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        kinds = ["sm", "compute"] if arch.endswith("+PTX") else ["sm"]
        flags += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
    return flags


def cmake_archs(archs: Sequence[str]) -> list[str]:
    """``CMAKE_CUDA_ARCHITECTURES``: ``9.0`` is ``90-real``, ``12.0+PTX`` is ``120``."""
    return [arch.removesuffix("+PTX").replace(".", "") + ("" if arch.endswith("+PTX") else "-real") for arch in archs]
