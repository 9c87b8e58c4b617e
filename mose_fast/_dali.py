"""Whether NVIDIA DALI, an optional dependency, can be used here, and how to install it."""

from __future__ import annotations

import importlib

INSTALL = "pip install 'mose-fast[dali]' (or nvidia-dali-cuda130; Linux only)"

# Before, a result that was handed to another stream waited for the GPU when it was freed (2.1.0:
# "Improved deletion order handling"), and a thread of DALI's broke captures by waiting, too.
_OLDEST = (2, 1)


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
    if tuple(map(int, version().split(".")[:2])) < _OLDEST:
        return f"DALI {version()} is too old, wanted {'.'.join(map(str, _OLDEST))}"
    return None


def version() -> str:
    """The version of the DALI that :func:`obstacle` found."""
    return importlib.import_module("nvidia.dali").__version__
