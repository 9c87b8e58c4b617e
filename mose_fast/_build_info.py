"""What this installation is: for run folders, bug reports and ``mose-fast doctor``."""

from __future__ import annotations

from typing import Any

import torch

from mose_fast import _loader
from mose_fast._version import __version__

__all__ = ["build_info"]


def build_info() -> dict[str, Any]:
    """Tells what was built and what is running.

    Returns:
        ``version`` of the package; ``commit`` that the library was built from (ending in ``+dirty`` if files differed), None
        outside a git checkout; ``backend`` of the library, ``"cpu"`` or ``"cuda"``, None where there is none and pure PyTorch is
        used; ``archs``, the compute capabilities compiled for; ``torch`` and ``cuda``, the versions compiled against, None
        without such; ``torch_running`` and ``cuda_running``, the versions of the torch that runs now.
    """
    record = _loader.record or {"commit": None, "backend": None, "archs": [], "torch": None, "cuda": None}
    return {
        "version": __version__,
        "commit": record["commit"],
        "backend": record["backend"],
        "archs": list(record["archs"]),
        "torch": record["torch"],
        "cuda": record["cuda"],
        "torch_running": torch.__version__,
        "cuda_running": torch.version.cuda,
    }
