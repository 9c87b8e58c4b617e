"""One sweep a folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from mose_fast.train.files import RunError

__all__ = ["FolderLock", "SweepLocked"]

# Seconds that the workers of a killed sweep get to notice it.
_PATIENCE = 15.0


class SweepLocked(RunError):
    """Another sweep works in the folder."""


class FolderLock:
    """Holds a folder for this process and for the workers that inherit :attr:`descriptor`.

    The kernel drops the lock when the last of them ends, however it ends: nothing is left to clean up, and no worker of a killed sweep
    can still write when the next sweep starts.

    Args:
        folder: Of the sweep; exists.

    Raises:
        SweepLocked: Another sweep holds it; the message names its process and machine.
        RunError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / ".lock"
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"cannot write into the sweep's folder {folder}: {error.strerror}; choose another --out") from error
        deadline = time.monotonic() + _PATIENCE
        while not self._take():
            holder = self._holder()
            if _alive(holder) or time.monotonic() > deadline:
                self.release()
                who = f"process {holder['process']} on {holder['machine']}" if holder else "another process"
                raise SweepLocked(f"a sweep works in {folder} already ({who}); wait for its end, stop it, or choose another --out")
            time.sleep(0.1)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """Lets go; workers that still live keep holding it."""
        os.close(self.descriptor)

    def _take(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> dict | None:
        try:
            return json.loads(os.pread(self.descriptor, 4096, 0))
        except ValueError:
            return None  # it has not yet written who it is


def _alive(holder: dict | None) -> bool:
    """Whether the process that took the lock lives; one on another machine is taken to."""
    if holder is None:
        return False
    if holder["machine"] != socket.gethostname():
        return True
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
