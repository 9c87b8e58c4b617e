"""What this installation is: for run folders, bug reports and ``mose-fast doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mose_fast import _loader
from mose_fast._version import __version__, git_commit

__all__ = ["build_info"]


def build_info() -> dict[str, Any]:
    """Tells what was built and what is running.

    Returns:
        ``version`` of the package; ``commit`` of the running code (ending in ``+dirty`` if files differ from it): the checkout's,
        or the one recorded when the package was built, None if neither is known; ``backend`` of the library, ``"cpu"``, ``"cuda"``
        or ``"emulated"`` (the CUDA kernels, compiled for the CPU), None where there is none and pure PyTorch is used; ``archs``, the
        compute capabilities compiled for; ``torch`` and ``cuda``, the versions compiled against, None without such;
        ``torch_running`` and ``cuda_running``, the versions of the torch that runs now.
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
