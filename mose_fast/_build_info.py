"""Describes this installation for run folders, bug reports and ``mose-fast doctor``."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mose_fast import _loader
from mose_fast._version import __version__, git_commit

__all__ = ["build_info", "code_hash"]

# The module that runs.
_RUN = "mose_fast.train.start"

# An import of this package's modules, at any depth; and those that only type checkers see.
_IMPORT = re.compile(
    r"^[ \t]*(?:from (mose_fast[\w.]*) import (\([^)]*\)|.*)|import (mose_fast[\w.]*))", flags=re.MULTILINE
)
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)*", flags=re.MULTILINE)


def build_info() -> dict[str, Any]:
    """Describes what was built and what is running.

    Returns:
        ``version`` of the package; ``commit`` of the running code (ending in ``+dirty`` if files
        differ from it): the checkout's, or the one recorded when the package was built, None if
        neither is known; ``backend`` of the library, ``"cpu"``, ``"cuda"`` or ``"emulated"`` (the
        CUDA kernels, compiled for the CPU), None if there is no library and pure PyTorch is used;
        ``archs``, the compute capabilities compiled for; ``torch`` and ``cuda``, the versions
        compiled against, None without a library; ``torch_running`` and ``cuda_running``, the
        versions of the torch that runs now.
    """
    record = _loader.record or {}
    library = record if _loader.native is not None else {}
    return {
        "version": __version__,
        "commit": git_commit(Path(__file__).parent.parent) or record.get("commit"),
        "backend": library.get("backend"),
        "archs": list(library.get("archs", [])),
        "torch": library.get("torch"),
        "cuda": library.get("cuda"),
        "torch_running": torch.__version__,
        "cuda_running": torch.version.cuda,
    }


def code_hash() -> str:
    """A hash of the code of this package that computes a run: the modules that a run imports and
    the native library's sources. 16 hex digits.
    """
    files = sorted(_modules_of_a_run().values())
    digest = hashlib.sha256(str((_loader.record or {}).get("sources") if _loader.native is not None else None).encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


@functools.cache
def _modules_of_a_run() -> dict[str, Path]:
    """The modules that a run imports, at its start or later, and their files. Import statements are
    followed, since ``sys.modules`` has what the caller happened to import.
    """
    found: dict[str, Path] = {}
    waiting = [_RUN]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if path is None or name in found:
            continue
        found[name] = path
        waiting.append(name.rpartition(".")[0])
        for package, names, module in _IMPORT.findall(_FOR_TYPES.sub("", path.read_text(encoding="utf-8"))):
            waiting += [package, module]
            homes = _homes(package)
            for imported in re.findall(r"\w+", names):
                waiting += [f"{package}.{imported}", homes.get(imported, "")]
    return found


@functools.cache
def _homes(package: str) -> Mapping[str, str]:
    """The modules of the names that a package imports when they are first used; else empty."""
    path = _file_of(package)
    if path is None or path.name != "__init__.py":
        return {}
    return getattr(getattr(import_module(package), "__getattr__", None), "homes", {})


def _file_of(module: str) -> Path | None:
    """The file of a module of this package, without importing it; None: there is no such module."""
    path = Path(__file__).parent.parent.joinpath(*module.split("."))
    files = path / "__init__.py", path.with_suffix(".py")
    return next((file for file in files if module and file.is_file()), None)
