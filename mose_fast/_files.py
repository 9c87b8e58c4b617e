"""Files that are replaced as a whole. Imports no torch: the command line needs it at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Replaces ``path`` by ``content`` in one move; the content is on disk before the name changes.
    Raises OSError if the disk is full or the folder unwritable; ``path`` is unchanged.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0))  # there is no other way to ask for it
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
