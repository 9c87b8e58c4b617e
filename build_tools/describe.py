"""Gathers what this machine and environment have and decides the build: the part that setup.py and
CMake share.

Run as a script by CMake, it prints ``set(...)`` lines and writes the record that goes beside the
library.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_tools import cuda, plan

ROOT = Path(__file__).resolve().parent.parent

#: What the package knows of itself without being imported.
OF_TREE: dict[str, Callable[[Path], Any]] = runpy.run_path(str(ROOT / "mose_fast" / "_version.py"))


@dataclass(frozen=True)
class Build:
    """A decided build: ``backend`` (``cpu``, ``cuda`` or ``emulated``), the toolkit (None for
    ``cpu``; an emulated build takes its headers alone), the compute capabilities to compile for
    (none unless ``cuda``), a sentence on why, and the content of ``_build.json``.
    """

    backend: str
    toolkit: cuda.Toolkit | None
    archs: list[str]
    reason: str
    record: dict[str, Any]


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def jobs() -> int:
    """How many compilers this machine may run at once; ``MAX_JOBS`` decides where it is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = "/sys/fs/cgroup/memory."
    free = plan.available_gib(_text("/proc/meminfo"), _text(group + "max"), _text(group + "current"))
    return plan.job_count(cores, free, os.environ.get("MAX_JOBS"))


def archs_for(toolkit: cuda.Toolkit | None) -> tuple[list[str], str]:
    """``TORCH_CUDA_ARCH_LIST``, else the release list of this toolkit, without what cannot be
    compiled; and a text that says what that was. Neither without a toolkit.
    """
    if toolkit is None:
        return [], ""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(cuda.default_archs(toolkit.version))
    return cuda.supported_archs(cuda.parse_archs(wanted), toolkit)


def decide(torch_version: str, torch_cuda: str | None) -> Build:
    """Decides the build against this torch; ``torch_cuda`` is its ``torch.version.cuda``. Raises
    BuildError if it cannot give a library that loads, ValueError if ``TORCH_CUDA_ARCH_LIST`` is
    malformed, or names nothing that can be compiled.
    """
    here = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    plan.check_same_torch((torch_version, torch_cuda), plan.installed_torch(here))
    wanted, clang = os.environ.get("MOSE_FAST_BACKEND") or "auto", shutil.which(plan.EMULATOR)
    backend, toolkit, reason = plan.choose_backend(wanted, torch_cuda, *cuda.find_toolkits(os.environ), clang)
    archs, left_out = archs_for(toolkit if backend == "cuda" else None)
    commit, sources = OF_TREE["git_commit"](ROOT), OF_TREE["source_hash"](ROOT, backend)
    record = plan.build_record(backend, commit, sources, torch_version, torch_cuda, toolkit, archs)
    return Build(backend, toolkit, archs, reason + left_out, record)


def cmake_lines(values: dict[str, str | list[str]]) -> str:
    """One ``set(NAME [[value]])`` a value; lists are joined by semicolons, as CMake wants them."""
    return "".join(
        f"set({name} [[{value if isinstance(value, str) else ';'.join(value)}]])\n" for name, value in values.items()
    )


def _describe(folder: Path, with_torch: bool) -> dict[str, str | list[str]]:
    if not with_torch:  # only the .cu files are to be compiled
        toolkits, looked = cuda.find_toolkits(os.environ)
        if not toolkits:
            raise plan.BuildError("no CUDA toolkit to compile the .cu files with. Looked in:\n  " + "\n  ".join(looked))
        archs, left_out = archs_for(toolkits[0])
        print(f"mose_fast: kernels for {' '.join(archs)}{left_out}", file=sys.stderr)
        return {"MOSE_FAST_CUDA_ROOT": str(toolkits[0].root), "MOSE_FAST_ARCHS": cuda.cmake_archs(archs)}

    import torch

    build = decide(torch.__version__, torch.version.cuda)
    if build.backend == "emulated":
        raise plan.BuildError("MOSE_FAST_BACKEND=emulated is built by setup.py alone: see docs/building.md")
    if build.toolkit:
        os.environ["CUDA_HOME"] = str(build.toolkit.root)  # before cpp_extension is imported: see setup.py
    from torch.utils import cpp_extension

    device = "cuda" if build.toolkit else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_build.json").write_text(json.dumps(build.record, indent=2) + "\n")
    print(f"mose_fast: {build.reason}", file=sys.stderr)
    return {
        "MOSE_FAST_CUDA_ROOT": str(build.toolkit.root) if build.toolkit else "",
        "MOSE_FAST_ARCHS": cuda.cmake_archs(build.archs),
        "MOSE_FAST_INCLUDES": [*cpp_extension.include_paths(device_type=device), sysconfig.get_path("include")],
        "MOSE_FAST_LIBRARY_DIRS": cpp_extension.library_paths(device_type=device),
        "MOSE_FAST_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        # torch's headers want C++20 since 2.12; ours compile as either.
        "MOSE_FAST_CXX_STANDARD": "20" if [int(n) for n in torch.__version__.split(".")[:2]] >= [2, 12] else "17",
    }


if __name__ == "__main__":
    try:
        described = _describe(Path(sys.argv[2]), with_torch=sys.argv[1] == "module")
        described["MOSE_FAST_JOBS"] = str(jobs())
    except (plan.BuildError, ValueError) as error:
        raise SystemExit(f"mose_fast: {error}") from None
    print(cmake_lines(described), end="")
