"""Starts Python processes that import what this process imports."""

from __future__ import annotations

import os
import sys


def python(module: str, *arguments: str) -> list[str]:
    """The command for a new process that runs ``main()`` of a module, by its full name.

    ``python -m`` would look into the current folder first, where another copy of the package or a
    file named like a module of it may lie. The new process has the import path of this one instead.
    """
    # An empty entry means the current folder.
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]
