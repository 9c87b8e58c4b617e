"""Builds ``mose_fast._C``. The decisions are in build_tools, sources and flags in csrc/sources.cmake, the rest in pyproject.toml."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_tools import cuda, plan  # noqa: E402
from build_tools.sources import read_sources  # noqa: E402

REQUIREMENTS = [
    "torchvision", "numpy", "scikit-learn", "matplotlib", "tensorboard", "tqdm", "safetensors", "tomli; python_version < '3.11'",
    "tomli-w",
]  # fmt: skip


class WithoutTorch(build_ext):
    """Metadata and source distributions need no torch; compiling does."""

    def run(self) -> None:
        raise SystemExit(f"mose_fast: torch is not installed in the build environment. First: pip install '{plan.MINIMUM_TORCH}'")


def native_build() -> tuple[Extension, type[build_ext], dict]:
    """Returns the extension, the command that builds it, and the record that goes beside it."""
    import torch

    wanted = os.environ.get("MOSE_FAST_BACKEND") or "auto"
    compiled = (torch.__version__, torch.version.cuda)
    plan.check_same_torch(compiled, plan.installed_torch([sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]))
    toolkits, looked = cuda.find_toolkits(os.environ)
    toolkit, reason = plan.choose_backend(wanted, torch.version.cuda, toolkits, looked)
    archs = []
    if toolkit:
        archs = cuda.parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(cuda.default_archs(toolkit.version)))
        # Before cpp_extension is imported: its own search takes a wrapper's folder for the toolkit.
        os.environ["CUDA_HOME"] = str(toolkit.root)
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(archs)
    meminfo = Path("/proc/meminfo")
    free = plan.free_gib(meminfo.read_text() if meminfo.exists() else "")
    jobs = plan.job_count(len(os.sched_getaffinity(0)), free, os.environ.get("MAX_JOBS"))
    os.environ["MAX_JOBS"] = str(jobs)
    print(f"mose_fast: {reason}; torch {torch.__version__}, archs {' '.join(archs) or '-'}, {jobs} jobs", file=sys.stderr)

    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    record = plan.build_record(plan.git_commit(ROOT), torch.__version__, torch.version.cuda, toolkit, archs)

    class BuildWithRecord(BuildExtension):
        def run(self) -> None:
            super().run()
            # One by one: the library of a finished build, and its copy in the source tree where the install is editable.
            libraries = [Path(self.build_lib) / "mose_fast"] + ([ROOT / "mose_fast"] if self.inplace else [])
            for folder in libraries:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "_build.json").write_text(json.dumps(record, indent=2) + "\n")

    lists = read_sources(ROOT / "csrc")
    names = lists["MOSE_FAST_CPU_SOURCES"] + lists["MOSE_FAST_TORCH_SOURCES"] + (lists["MOSE_FAST_CUDA_SOURCES"] if toolkit else [])
    extension = (CUDAExtension if toolkit else CppExtension)(
        "mose_fast._C",
        [f"csrc/{name}" for name in names],
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("MOSE_FAST_WITH_CUDA", None)] if toolkit else [],
        extra_compile_args={"cxx": lists["MOSE_FAST_CXX_FLAGS"], "nvcc": lists["MOSE_FAST_NVCC_FLAGS"]},
        extra_link_args=["-fopenmp"],
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".h", ".cuh", ".cmake")],
    )
    return extension, BuildWithRecord, record


try:
    extension, command, record = native_build()
    requirement = plan.torch_requirement(record["torch"], exact=False)
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    extension, command, requirement = Extension("mose_fast._C", []), WithoutTorch, plan.MINIMUM_TORCH
except (plan.BuildError, ValueError) as error:
    raise SystemExit(f"mose_fast: {error}") from None

setup(ext_modules=[extension], cmdclass={"build_ext": command}, install_requires=[requirement, *REQUIREMENTS])
