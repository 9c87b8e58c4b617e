"""Whether NVIDIA DALI, an optional dependency, can be used here, and how to install it."""

from __future__ import annotations

import importlib

__all__ = ["INSTALL", "obstacle", "version"]

INSTALL = "pip install 'mose-fast[dali]' (or nvidia-dali-cuda130; Linux only)"


def obstacle() -> str | None:
    """Why DALI cannot be used here; None if it can.

    The first call imports it, which takes about half a second.
    """
    try:
        importlib.import_module("nvidia.dali")
    except ModuleNotFoundError as error:
        if error.name in ("nvidia", "nvidia.dali"):
            return "DALI is not installed"
        return f"DALI cannot be imported ({error})"
    except Exception as error:  # a library of another system or version fails in its own ways
        return f"DALI cannot be imported ({' '.join(str(error).split())})"
    return None


def version() -> str:
    """The version of the DALI that :func:`obstacle` found."""
    return importlib.import_module("nvidia.dali").__version__
