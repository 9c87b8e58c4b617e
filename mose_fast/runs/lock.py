"""A lock that lets one process work in a folder; the kernel releases it when that process dies."""

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

import psutil

from mose_fast.runs.files import LOCK, RunError

# Seconds in which the children of a killed holder notice that it is gone.
_PATIENCE = 15.0

# Errors of flock on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLocked(RunError):
    """Another process is working in the folder."""


class FolderLock:
    """Locks an existing folder for this process and for the children that inherit ``descriptor``;
    ``work`` says for what, in messages: ``run``, ``sweep``, ``export`` or ``report``.

    The kernel releases the lock when the last of them ends, in whatever way, so no child of a
    killed sweep can still write when the next sweep starts. If the file system has no locks, there
    is a warning; a second process on this machine is refused even then.

    Raises:
        FolderLocked: Another process holds the lock; the message names it and its machine.
        RunError: The folder cannot be written.
    """

    def __init__(self, folder: Path, work: str) -> None:
        self.path, self.work = folder / LOCK, work
        deadline = time.monotonic() + _PATIENCE
        while not self._take():
            holder = self._holder()
            self.release()
            if _alive(holder) or time.monotonic() > deadline:
                raise self._refusal(holder)
            time.sleep(0.1)
        os.ftruncate(self.descriptor, 0)
        note = {"process": os.getpid(), "machine": socket.gethostname(), "work": work}
        os.pwrite(self.descriptor, json.dumps(note).encode(), 0)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def release(self) -> None:
        """Releases the lock in this process; children that still live keep it."""
        os.close(self.descriptor)

    def remove(self) -> None:
        """Releases the lock and deletes its file, for a holder without children."""
        # While the lock is held: a process that opened the file before sees that it is gone and
        # opens a new one.
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.release()

    def _take(self) -> bool:
        """Opens the file and locks it; returns False if another process holds the lock."""
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
                self.release()
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
        # Its holder deleted the file after this process had opened it.
        self.release()
        return self._take()

    def _holder(self) -> dict | None:
        try:
            holder = json.loads(os.pread(self.descriptor, 4096, 0))
            return holder if {"process", "machine"} <= holder.keys() else None
        except (ValueError, AttributeError):
            return None  # the holder has not written its name yet

    def _refusal(self, holder: dict | None) -> FolderLocked:
        who = f"process {holder['process']} on {holder['machine']}" if holder else "another process"
        work = holder.get("work", self.work) if holder else self.work
        return FolderLocked(
            f"{'an' if work[0] in 'aeiou' else 'a'} {work} already works in {self.path.parent} ({who}); wait until it"
            " ends, stop it, or choose another --out"
        )


def _here(holder: dict) -> bool:
    return holder["machine"] == socket.gethostname()


def _alive(holder: dict | None) -> bool:
    """Whether the process that took the lock lives; one on another machine is assumed to."""
    return holder is not None and (not _here(holder) or psutil.pid_exists(holder["process"]))
