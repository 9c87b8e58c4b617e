"""Describes this installation for run folders, bug reports and ``mose-fast doctor``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from mose_fast import _loader
from mose_fast._version import __version__, git_commit

__all__ = ["build_info", "code_hash"]

# Code that shows, plans and describes runs, but computes no part of their results.
_COMPUTES_NOTHING = (
    "paper",
    "report",
    "self_check",
    "sweep",
    "benchmark.py",
    "cli.py",
    "doctor.py",
    "export",
    "knobs.py",
    "progress.py",
    "settings.py",
)


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
    """A hash of the code of this package that computes a run: without the parts that only show and
    plan, and with the native library's sources. 16 hex digits.
    """
    package = Path(__file__).parent
    files = [
        path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in _COMPUTES_NOTHING
    ]
    digest = hashlib.sha256(str((_loader.record or {}).get("sources") if _loader.native is not None else None).encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]
