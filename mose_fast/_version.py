"""The package's version and commit, free of imports so that the build can read them too."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["__version__", "git_commit"]

__version__ = "0.1.0"


def git_commit(folder: Path) -> str | None:
    """Returns the commit checked out in ``folder``, ending in ``+dirty`` if tracked files differ; None outside a git checkout."""
    if not (folder / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "-C", folder, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+dirty" if changed else "")
