"""The package's version and commit. The build reads this file, too, so it imports no package."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

__version__ = "0.1.0"


def git_commit(folder: Path) -> str | None:
    """The commit of a checkout, with ``+dirty`` if tracked files differ; None outside of one."""
    if not (folder / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", folder, "diff", "--quiet", "HEAD"], capture_output=True, check=False
        ).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+dirty" if changed else "")


_NOT_BUILT = {"cpu": ("cuda", "emulated"), "cuda": ("emulated",), "emulated": ()}


def source_hash(folder: Path, backend: str) -> str | None:
    """A hash of the sources in ``folder / "csrc"`` that a library of this back end (cpu, cuda or
    emulated) is built from; None if there are none, as for an installed package.
    """
    csrc = folder / "csrc"
    files = sorted(
        path
        for path in csrc.rglob("*")
        if path.suffix in (".h", ".cuh", ".cu", ".cpp", ".cmake")
        and path.relative_to(csrc).parts[0] not in _NOT_BUILT[backend]
    )
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def file_facts(path: Path) -> dict[str, int | str]:
    """Size and SHA-256 of a file, as a build records them of its library."""
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
