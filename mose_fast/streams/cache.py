"""Decoded images, kept beside the files that they were decoded from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mose_fast.streams.npz import SPLITS, arrays_of, read_npz
from mose_fast.streams.stream import StreamError

__all__ = ["Decoded", "decoded_once"]

#: The arrays of a stream, and the names of its classes.
Decoded = tuple[dict[str, np.ndarray], list[str]]

# In seconds.
_DAY = 86400.0


def decoded_once(
    cache: Path, stamps: Mapping[str, str], decode: Callable[[], Decoded], splits: Sequence[str] = SPLITS
) -> Decoded:
    """What ``decode`` returns, or the copy of it that an earlier call has kept.

    The copy is made anew when the files have changed or it is damaged. Where its folder is
    read-only or the disk is full, none is kept. Training images alone have a copy of their own, so
    that no test image is read for them.

    Args:
        cache: The copy's file, an ``.npz``; for training images alone, ``.train.npz``.
        stamps: Size and date, or a checksum, of each file by its path.
        decode: Decodes the files.
        splits: The parts of the data set that ``decode`` returns.
    """
    cache = cache if "test" in splits else cache.with_suffix(".train.npz")
    lines = "\n".join(f"{path} {stamp}" for path, stamp in sorted(stamps.items()))
    fingerprint = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
    _remove_leftovers(cache)
    if cache.is_file():
        with contextlib.suppress(StreamError):  # a damaged copy is made anew
            if str(read_npz(cache, ("fingerprint",))["fingerprint"]) == fingerprint:
                held = read_npz(cache, (*arrays_of(splits), "class_names"))
                return {name: held[name] for name in arrays_of(splits)}, held["class_names"].tolist()
    arrays, names = decode()
    _write(cache, {**arrays, "class_names": np.array(names), "fingerprint": np.array(fingerprint)})
    return arrays, names


def _write(cache: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes the copy in one step, or not at all."""
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        try:
            with temporary.open("wb") as file:
                with contextlib.suppress(OSError):
                    _lock(file)
                np.savez(file, **arrays)
            os.replace(temporary, cache)
        finally:
            temporary.unlink(missing_ok=True)


def _remove_leftovers(cache: Path) -> None:
    """Deletes the unfinished copies of processes that were killed while they wrote them: a process
    that is still writing holds the lock of its copy.

    Where the file system has no locks, those that have not grown for a day.
    """
    for path in cache.parent.glob(f".{cache.name}.*"):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            try:
                _lock(file)
            except BlockingIOError:
                continue
            except OSError:
                if time.time() - path.stat().st_mtime < _DAY:
                    continue
            path.unlink()


def _lock(file: BinaryIO) -> None:
    """Locks a file for as long as it is open.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
