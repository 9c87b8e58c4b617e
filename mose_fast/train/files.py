"""The files of a run folder: written atomically, so that a crash leaves either the old or the new content."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from mose_fast.errors import MoseFastError

__all__ = ["RunError", "RunFolder", "write_atomically"]


class RunError(MoseFastError, RuntimeError):
    """A run cannot start, continue or write its results; the message says why and what to do."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replaces ``path`` by ``content`` in one move, on disk before the name changes.

    Raises:
        RunError: The disk is full or the folder unwritable; ``path`` is as it was.
    """
    if isinstance(content, str):
        content = content.encode()
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_temporary_prefix(path.name))
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise RunError(
            f"cannot write {path} ({len(content)} bytes): {error.strerror}; what was there before is untouched. "
            "Free some space or choose another --out, then continue with: mose-fast resume"
        ) from error


def _temporary_prefix(name: str) -> str:
    return f".{name}."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class RunFolder:
    """Names of what lies in a run's folder.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.results = self.path / "results.json"
        self.accuracy = self.path / "accuracy.csv"
        self.figure = self.path / "accuracy.png"
        self.checkpoints = self.path / "checkpoints"
        self.events = self.path / "tensorboard"

    def create(self, *, overwrite: bool) -> None:
        """Makes the folder ready for a new run.

        Args:
            overwrite: Delete what an earlier run left here; other files stay.

        Raises:
            RunError: The folder is in use and ``overwrite`` is False, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            used = any(self.path.iterdir())
            if used and not overwrite:
                raise RunError(
                    f"the output folder {self.path} is already used; choose another --out, pass --overwrite to replace the run in it, "
                    f"or continue it with: mose-fast resume {self.path}"
                )
            for file in (self.config, self.results, self.accuracy, self.figure):
                file.unlink(missing_ok=True)
            for folder in (self.checkpoints, self.events):
                if folder.exists():
                    shutil.rmtree(folder)
            self._prepare()
        except OSError as error:
            raise RunError(f"cannot write into the output folder {self.path}: {error.strerror}; choose another --out") from error

    def reopen(self) -> None:
        """Makes the folder ready to continue the run in it: deletes what a killed run had half written.

        Raises:
            RunError: It cannot be written.
        """
        try:
            self._prepare()
        except OSError as error:
            raise RunError(f"cannot write into the output folder {self.path}: {error.strerror}") from error

    def _prepare(self) -> None:
        self.checkpoints.mkdir(exist_ok=True)
        for file in (self.config, self.results, self.accuracy, self.figure):
            for leftover in self.path.glob(f"{_temporary_prefix(file.name)}*"):
                leftover.unlink()
        for leftover in self.checkpoints.glob(f"{_temporary_prefix('step-*')}*"):
            leftover.unlink()
