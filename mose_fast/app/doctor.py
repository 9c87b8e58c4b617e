"""Checks what this machine has for a run, what is missing and how to install it.

Nothing is changed or downloaded, and no data file is read in full.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mose_fast import _dali, _loader, streams
from mose_fast.augment import choose_feed
from mose_fast.device import choose_precision, resolve_device
from mose_fast.self_check import SWITCH, Verdict, check, stored
from mose_fast.threads import crowding, waiting

# Packages that are imported only when used. The other requirements are met if this file can be
# imported.
_REQUIRED = ("torchvision", "sklearn", "matplotlib", "tensorboard")
_PIP_NAMES = {"sklearn": "scikit-learn"}


class Finding(NamedTuple):
    """One line of the report: ``ok``, ``--`` (missing but optional) or ``FAIL`` (missing and
    required), what was looked for, what was found, and how to fix it, if need be.
    """

    mark: str
    thing: str
    found: str
    fix: str = ""


def diagnose(data_dir: str | None = None) -> list[Finding]:
    """Checks this machine, and the data sets in ``data_dir`` or the default folder."""
    precision = Finding("ok", "precision", str(choose_precision("auto", resolve_device("auto"))))
    native = [_native(), *map(_verdict, _kinds())]
    # A Python older than 3.10 cannot import this file.
    python = Finding("ok", "Python", f"{platform.python_version()}, {sys.executable}")
    installed = [python, _torch(), _packages(), *_cuda(), *_gpus(), *native, *_build_tools(os.environ)]
    return [*installed, precision, _feed(), *_data(data_dir)]


def report(findings: Sequence[Finding]) -> str:
    """The findings in columns, each fix on a line of its own to copy, and the conclusion below."""
    width = max(len(finding.thing) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.mark:<4}  {finding.thing:<{width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    failed = [finding.thing for finding in findings if finding.mark == "FAIL"]
    if failed:
        lines.append(f"\nNo run is possible until this is fixed: {', '.join(failed)}")
    else:
        lines.append("\nA run is possible: mose-fast run --stream digits --width 16 --memory 500 --seed 0")
    return "\n".join(lines)


def serves_gpu(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether code compiled for ``archs`` (as in ``TORCH_CUDA_ARCH_LIST``) runs on a GPU of this
    compute capability, (major, minor).

    Machine code runs on GPUs of the same major compute capability and at least the same minor one,
    architecture-specific code (``9.0a``) on exactly its own; PTX (``12.0+PTX``) on every later GPU
    (CUDA programming guide, section on compute capabilities).
    """
    for arch in archs:
        number = re.match(r"(\d+)\.(\d+)([af]?)", arch)
        if number is None:
            continue
        compiled, kind = (int(number[1]), int(number[2])), number[3]
        later_minor = capability[0] == compiled[0] and capability[1] > compiled[1]
        if capability == compiled or (kind != "a" and later_minor):
            return True
        if not kind and arch.endswith("+PTX") and capability > compiled:
            return True
    return False


def _torch() -> Finding:
    how = waiting(os.environ) or "torch was imported before mose_fast, so GOMP_SPINCOUNT is not set"
    found = f"{torch.__version__}, {torch.get_num_threads()} thread(s), {how}"
    if [int(n) for n in re.findall(r"\d+", torch.__version__)[:2]] < [2, 11]:
        return Finding("FAIL", "torch", found, "pip install 'torch>=2.11', then build the native library again")
    crowded = crowding(torch.get_num_threads())
    return Finding("ok", "torch", f"{found}; {crowded}" if crowded else found)


def _packages() -> Finding:
    missing = [name for name in _REQUIRED if not _importable(name)]
    if missing:
        wanted = " ".join(_PIP_NAMES.get(name, name) for name in missing)
        return Finding("FAIL", "packages", f"missing: {', '.join(missing)}", f"pip install {wanted}")
    names = [_PIP_NAMES.get(name, name) for name in _REQUIRED]
    return Finding("ok", "packages", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def _cuda() -> Iterator[Finding]:
    if torch.version.cuda is None:
        fix = "to use a GPU, install a CUDA build of torch (pytorch.org, Get started)"
        yield Finding("--", "CUDA of torch", "none: this torch is a CPU build", fix)
    else:
        yield Finding("ok", "CUDA of torch", torch.version.cuda)
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if driver:
        yield Finding("ok", "NVIDIA driver", driver)
    else:
        fix = "if this machine has an NVIDIA GPU, install its driver"
        yield Finding("--", "NVIDIA driver", "none (nvidia-smi is missing or sees no GPU)", fix)


def _gpus() -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = str(said[0].message).splitlines()[0] if said else "torch sees none"
        fix = "if this machine has one: check that nvidia-smi lists it, and install a CUDA build of torch"
        yield Finding("--", "GPU", f"none ({why}); runs use the CPU", fix)
        return
    for index in range(torch.cuda.device_count()):
        gpu, thing = torch.cuda.get_device_properties(index), f"GPU {index}"
        found = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        archs = (_loader.record or {}).get("archs", [])
        try:
            float(torch.ones(2, device=f"cuda:{index}").sum())
        except RuntimeError as error:
            found = f"{found}; torch cannot use it ({str(error).splitlines()[0]})"
            yield Finding("--", thing, found, "install a torch that supports it, or use --device cpu")
            continue
        if archs and not serves_gpu((gpu.major, gpu.minor), archs):
            fix = f"TORCH_CUDA_ARCH_LIST={gpu.major}.{gpu.minor} {_loader.REBUILD}"
            yield Finding("--", thing, f"{found}; the native library is compiled for {' '.join(archs)} only", fix)
        else:
            yield Finding("ok", thing, found)


def _native() -> Finding:
    record = _loader.record
    if _loader.native is None:
        switched_off = os.environ.get("MOSE_FAST_NATIVE") == "0"
        fix = "unset MOSE_FAST_NATIVE" if switched_off else f"in the source folder: {_loader.REBUILD}"
        found = f"not used: {_loader.obstacle}; pure PyTorch is used, which is slower"
        return Finding("--", "native library", found, fix)
    archs = f" {record['cuda']} for {' '.join(record['archs'])}" if record["backend"] == "cuda" else ""
    commit = (record["commit"] or "unknown")[:12]
    found = f"{record['backend']}{archs}, compiled against torch {record['torch']}, commit {commit}"
    if record["backend"] == "emulated":
        fix = "unset MOSE_FAST_NATIVE" if os.environ.get("MOSE_FAST_NATIVE") else _loader.REBUILD
        found = f"{found}; runs the CUDA kernels on the CPU, slowly"
        return Finding("--", "native library", found, f"only for tests; {fix}")
    if record["backend"] == "cpu" and torch.cuda.is_available():
        fix = f"MOSE_FAST_BACKEND=cuda {_loader.REBUILD}"
        return Finding("--", "native library", f"{found}; it has no code for the GPU", fix)
    return Finding("ok", "native library", found)


def _kinds() -> list[torch.device]:
    """A GPU of each kind that the native library has kernels for."""
    kind = _loader.gpu()
    if kind == "cpu":
        return [torch.device("cpu")]
    if kind is None or not torch.cuda.is_available():
        return []
    archs = _loader.record["archs"]
    gpus = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        if serves_gpu((gpu.major, gpu.minor), archs):
            gpus.setdefault((gpu.name, gpu.major, gpu.minor), torch.device("cuda", index))
    return list(gpus.values())


def _verdict(device: torch.device) -> Finding:
    thing, again = f"self-check, {device}", "mose-fast doctor --check"
    verdict = stored(device)
    if verdict is None:
        without = f", but {SWITCH}=0 forbids it" if os.environ.get(SWITCH) == "0" else ""
        return Finding("--", thing, f"not yet: the first run does it, once{without}", f"to do it now: {again}")
    counts = f"{sum(row.passed for row in verdict.rows)} of {len(verdict.rows)} rows passed, {verdict.at}"
    if not verdict.off:
        return Finding("ok", thing, counts)
    off = f"switched off: {', '.join(verdict.off)}; PyTorch's operations or eager steps take over"
    return Finding("--", thing, f"{counts}; {off}", f"all rows, and the newest state: {again}")


def check_kernels() -> list[tuple[str, Verdict]]:
    """Runs the self-check anew on each kind of GPU that the native library has kernels for, and
    keeps its verdicts, which it returns with the GPUs' names.
    """
    return [(str(device), check(device)) for device in _kinds()]


def rows_of_check(verdict: Verdict) -> str:
    """Each row of a check with its error and its bound, in columns."""
    rows = [("", "part", "case", "error", "bound", "of")]
    for row in verdict.rows:
        numbers = ("-" if number is None else f"{number:.2g}" for number in (row.error, row.bound))
        rows.append(("ok" if row.passed else "FAIL", row.op, row.case, *numbers, row.said))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = f"; switched off: {', '.join(verdict.off)}" if verdict.off else ""
    note = f"; not checked to the end: {verdict.note}" if verdict.note else ""
    return "\n".join([*lines, f"{verdict.state} after {verdict.seconds:.1f} s{failed}{note}"])


def _build_tools(environment: Mapping[str, str]) -> Iterator[Finding]:
    compiler = environment.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    said = _first_line([compiler, "--version"]) if compiler else None
    if said:
        yield Finding("ok", "C++ compiler", said)
    else:
        found = f"CXX={compiler} does not run" if compiler else "none on PATH"
        fix = "to build the native library, install g++ 11 or newer (Debian, Ubuntu: build-essential)"
        yield Finding("--", "C++ compiler", found, fix)

    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}")
    if ninja:
        yield Finding("ok", "ninja", f"{_first_line([ninja, '--version']) or 'unknown version'}, {ninja}")
    else:
        yield Finding("--", "ninja", "none on PATH", "to build the native library: pip install ninja")

    for name in ("CUDA_HOME", "CUDA_PATH"):
        root = environment.get(name)
        missing = [
            part for part in ("bin/nvcc", "include/cuda_runtime.h") if root and not (Path(root) / part).is_file()
        ]
        if missing:
            found = f"{root}, which is ignored: it has no {' and no '.join(missing)}"
            yield Finding("--", name, found, f"unset {name}, or set it to a toolkit's folder")

    release = _nvcc_release(environment)
    wanted = torch.version.cuda.split(".")[0] if torch.version.cuda else None
    if release is None:
        which = f"CUDA {wanted}" if wanted else "CUDA"
        fix = f"to build for a GPU, install the {which} toolkit or set CUDA_HOME to its folder"
        yield Finding("--", "nvcc", "none in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda", fix)
    elif wanted and release.split(".")[0] != wanted:
        fix = f"to build for a GPU, install the CUDA {wanted} toolkit or set CUDA_HOME to its folder"
        yield Finding("--", "nvcc", f"{release}, but torch uses CUDA {torch.version.cuda}", fix)
    else:
        yield Finding("ok", "nvcc", release)


def _nvcc_release(environment: Mapping[str, str]) -> str | None:
    roots = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    candidates = [str(Path(root) / "bin" / "nvcc") for root in roots]
    candidates += [path for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc") if path]
    for nvcc in candidates:
        release = re.search(r"release (\d+\.\d+)", _output([nvcc, "--version"]))
        if release:
            return release.group(1)
    return None


def _feed() -> Finding:
    """What makes the views of a run, unless ``--feed`` says otherwise."""
    obstacle = _dali.obstacle()
    used = f"--feed auto is {choose_feed('auto', resolve_device('auto'), None).name} here"
    if obstacle:
        return Finding("--", "DALI (optional)", f"{obstacle}; {used}", _dali.INSTALL)
    return Finding("ok", "DALI (optional)", f"{_dali.version()}; {used}")


def _data(data_dir: str | None) -> Iterator[Finding]:
    for name in streams.names():
        found, where = streams.locate(name, data_dir)
        if found:
            yield Finding("ok", f"data: {name}", where)
        else:
            missing, _, fix = where.partition(": ")
            yield Finding("--", f"data: {name}", missing, fix)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a dotted name's parent
        return False


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _first_line(command: Sequence[str]) -> str | None:
    return next(iter(_output(command).splitlines()), None)
