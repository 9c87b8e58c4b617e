"""Builds ``mose_fast._C``.

The decisions are in build_tools, sources and flags in csrc/sources.cmake, the rest in
pyproject.toml.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

from setuptools import Extension, __version__, setup
from setuptools.command.build_ext import build_ext

# A fresh virtual environment of Python 3.10 or 3.11 holds setuptools 65, whose own error would be
# hard to understand.
if int(__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"mose_fast: setuptools {__version__} is too old to build this. First: pip install 'setuptools>=77' ninja"
    )

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from build_tools import cuda, describe, plan  # noqa: E402
from build_tools.sources import emulated_sources, read_sources  # noqa: E402

REQUIREMENTS = [
    "torchvision",
    "numpy",
    "scikit-learn>=1.6",
    "matplotlib",
    "tensorboard",
    "tqdm",
    "safetensors",
    "tomli; python_version < '3.11'",
    "pandas",
    "scipy",
    "joblib",
    "psutil",
]


class WithoutTorch(build_ext):
    """Metadata and source distributions need no torch; compiling does."""

    def run(self) -> None:
        raise SystemExit(
            f"mose_fast: torch is not installed in the build environment. First: pip install '{plan.MINIMUM_TORCH}'"
        )


def native_build() -> tuple[Extension, type[build_ext], str]:
    """Returns the extension, the command that builds it, and the package's requirement on torch."""
    import torch

    build = describe.decide(torch.__version__, torch.version.cuda)
    os.environ["MAX_JOBS"] = str(describe.jobs())
    if build.backend == "emulated":
        os.environ["CXX"] = plan.EMULATOR
    if build.backend == "cuda":
        # Before cpp_extension is imported: its own search takes the folder of an nvcc wrapper for
        # the toolkit.
        os.environ["CUDA_HOME"] = str(build.toolkit.root)
    archs = " ".join(build.archs) or "none"
    print(
        f"mose_fast: {build.reason}; torch {torch.__version__}, archs {archs}, {os.environ['MAX_JOBS']} jobs",
        file=sys.stderr,
    )

    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    class BuildWithRecord(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # ninja decides what is out of date. Objects of another torch, of another back end or
            # with flags that nvcc takes from the environment never mix, and an editable install,
            # for which setuptools takes a fresh folder each time, finds its own again.
            self.force = True
            tag = f"{build.backend}-torch{torch.__version__}-{sys.implementation.cache_tag}"
            tag += os.environ.get("NVCC_APPEND_FLAGS", "").replace(" ", "").replace("/", "")
            self.build_temp = str(ROOT / "build" / f"objects-{tag}")

        def run(self) -> None:
            Path(self.build_temp).mkdir(parents=True, exist_ok=True)
            with open(
                Path(self.build_temp) / "lock", "w"
            ) as lock:  # two ninjas in one folder would spoil each other's objects
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().run()
            # Beside the finished library, and beside its copy in the source tree where the install
            # is editable.
            for folder in [Path(self.build_lib) / "mose_fast"] + ([ROOT / "mose_fast"] if self.inplace else []):
                folder.mkdir(parents=True, exist_ok=True)
                library = folder / Path(self.get_ext_filename("mose_fast._C")).name
                record = build.record | {"library": describe.OF_TREE["file_facts"](library)}
                (folder / "_build.json").write_text(json.dumps(record, indent=2) + "\n")

    lists = read_sources(ROOT / "csrc")
    sources = [f"csrc/{name}" for name in lists["MOSE_FAST_CPU_SOURCES"] + lists["MOSE_FAST_TORCH_SOURCES"]]
    macros, flags, link = [], lists["MOSE_FAST_CXX_FLAGS"], ["-fopenmp"]
    if build.backend == "cuda":
        sources += [f"csrc/{name}" for name in lists["MOSE_FAST_CUDA_SOURCES"]]
        macros = [("MOSE_FAST_WITH_CUDA", None)]
    elif build.backend == "emulated":
        sources += emulated_sources(ROOT, lists["MOSE_FAST_CUDA_SOURCES"])
        macros = [("MOSE_FAST_WITH_CUDA", None), ("MOSE_FAST_EMULATED", None)]
        flags, link = [*lists["MOSE_FAST_EMULATED_FLAGS"], f"-isystem{build.toolkit.root / 'include'}"], []
    extension = (CUDAExtension if build.backend == "cuda" else CppExtension)(
        "mose_fast._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros,
        extra_compile_args={"cxx": flags, "nvcc": lists["MOSE_FAST_NVCC_FLAGS"] + cuda.gencode_flags(build.archs)},
        extra_link_args=link,
    )
    return extension, BuildWithRecord, plan.torch_requirement(torch.__version__, exact=False)


try:
    extension, command, requirement = native_build()
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    extension, command, requirement = Extension("mose_fast._C", []), WithoutTorch, plan.MINIMUM_TORCH
except (plan.BuildError, ValueError) as error:
    raise SystemExit(f"mose_fast: {error}") from None

setup(ext_modules=[extension], cmdclass={"build_ext": command}, install_requires=[requirement, *REQUIREMENTS])
