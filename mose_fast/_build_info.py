"""Describes this installation for run folders, bug reports and ``mose-fast doctor``."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch

from mose_fast import _loader
from mose_fast._version import __version__, git_commit

# Rooms of the package that work on finished runs or start others; what they do changes no run.
_NOT_OF_A_RUN = ("app", "experiments", "export", "present")


def build_info() -> dict[str, Any]:
    """What was built and what is running: ``version`` of the package; ``commit`` of the checkout
    (ending in ``+dirty`` if files differ from it), or the one that the package was built from, None
    if neither is known; of the native library, ``backend`` (``"cpu"``, ``"cuda"`` or the
    ``"emulated"`` GPU), ``archs``, ``torch`` and ``cuda`` that it was compiled
    for, None without one; ``torch_running`` and ``cuda_running``, the versions that run now.
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
    """16 hex digits of the code of this package that computes a run: all modules but those of rooms
    that only start runs or read finished ones, and the native library's sources.
    """
    digest = hashlib.sha256(str((_loader.record or {}).get("sources") if _loader.native is not None else None).encode())
    for name, path in sorted(_modules_of_a_run().items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


@functools.cache
def _modules_of_a_run() -> dict[str, Path]:
    package = Path(__file__).parent
    paths = {path.relative_to(package): path for path in package.rglob("*.py")}
    return {name.as_posix(): path for name, path in paths.items() if name.parts[0] not in _NOT_OF_A_RUN}
