"""One process a folder: a lock that the kernel takes back when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path
from types import TracebackType

import psutil

from mose_fast.train.files import LOCK, RunError

__all__ = ["FolderLock", "FolderLocked"]

# Seconds that the children of a killed holder get to notice it.
_PATIENCE = 15.0

# What flock says where a file system has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLocked(RunError):
    """Another process works in the folder."""


class FolderLock:
    """Holds a folder for this process and for the children that inherit :attr:`descriptor`.

    The kernel drops the lock when the last of them ends, however it ends, so no child of a killed
    sweep can still write when the next sweep starts. Where the file system has no locks, a warning
    says so; a holder on this machine that still lives is refused even then.

    Args:
        folder: Exists.
        work: What works in it, for messages: ``run``, ``sweep``, ``export``, ``report``.

    Raises:
        FolderLocked: Another process holds it; the message names the process and its machine.
        RunError: The folder cannot be written.
    """

    def __init__(self, folder: Path, work: str) -> None:
        self.path, self.work = folder / LOCK, work
        deadline = time.monotonic() + _PATIENCE
        while not self._take():
            holder = self._holder()
            self._close()
            if _alive(holder) or time.monotonic() > deadline:
                raise self._refusal(holder)
            time.sleep(0.1)
        os.ftruncate(self.descriptor, 0)
        note = {"process": os.getpid(), "machine": socket.gethostname(), "work": work}
        os.pwrite(self.descriptor, json.dumps(note).encode(), 0)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def release(self) -> None:
        """Lets go; children that still live keep holding it."""
        self._close()

    def remove(self) -> None:
        """Lets go and takes the file away, for a holder without children."""
        # While it is held: whoever opened the file before finds that it is gone and opens a new
        # one.
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._close()

    def _take(self) -> bool:
        """Opens the file and locks it; False where another process holds it."""
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(
                f"cannot write into the folder {self.path.parent}: {error.strerror}; choose another --out"
            ) from error
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunError(f"cannot lock {self.path}: {error.strerror}; choose another --out") from error
            holder = self._holder()
            if _alive(holder) and _here(holder) and holder["process"] != os.getpid():
                self._close()
                raise self._refusal(holder) from error
            warnings.warn(
                f"the file system of {self.path.parent} has no file locks ({error.strerror}); nothing keeps a second"
                " run, sweep or export out of this folder: let only one machine work in it",
                stacklevel=4,
            )
            return True
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.descriptor), os.stat(self.path)):
                return True
        # Its holder took the file away after this process had opened it.
        self._close()
        return self._take()

    def _close(self) -> None:
        os.close(self.descriptor)

    def _holder(self) -> dict | None:
        try:
            holder = json.loads(os.pread(self.descriptor, 4096, 0))
            return holder if {"process", "machine"} <= holder.keys() else None
        except (ValueError, AttributeError):
            return None  # it has not yet written who it is

    def _refusal(self, holder: dict | None) -> FolderLocked:
        who = f"process {holder['process']} on {holder['machine']}" if holder else "another process"
        work = holder.get("work", self.work) if holder else self.work
        return FolderLocked(
            f"{'an' if work[0] in 'aeiou' else 'a'} {work} works in {self.path.parent} already ({who}); wait for its"
            " end, stop it, or choose another --out"
        )


def _here(holder: dict) -> bool:
    return holder["machine"] == socket.gethostname()


def _alive(holder: dict | None) -> bool:
    """Whether the process that took the lock lives; one on another machine is assumed to."""
    return holder is not None and (not _here(holder) or psutil.pid_exists(holder["process"]))
