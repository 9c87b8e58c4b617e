"""Decoded images, kept beside the files that they were decoded from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mose_fast.streams.decoding import Decoding, Source, decode_images
from mose_fast.streams.draws import StreamError
from mose_fast.streams.npz import read_npz

# In seconds.
_DAY = 86400.0

# Images that a killed process loses at most.
_BLOCK = 1000


def stamp(file: Path) -> str:
    """Size and date of a file, which tell whether it is still the one that was decoded. Raises
    StreamError if it cannot be read.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise StreamError(f"cannot read {file}: {error.strerror}") from error
    return f"{status.st_size} {status.st_mtime_ns}"


def arrays_of_parts(labelled: Mapping[str, Sequence[tuple[Any, int]]], images: Any) -> dict[str, Any]:
    """The arrays of some parts, whose images follow one another in an array or in files, given the
    pairs of file and label of each part.
    """
    arrays: dict[str, Any] = {}
    for part, found in labelled.items():
        arrays[f"x_{part}"], images = images[: len(found)], images[len(found) :]
        arrays[f"y_{part}"] = np.array([label for _, label in found], np.int64)
    return arrays


def decoded_once(
    cache: Path,
    stamps: Mapping[str, str],
    decode: Callable[[Path], dict[str, Any]],
    splits: Sequence[str],
    names: Sequence[str],
) -> dict[str, Any]:
    """What ``decode`` returns, arrays and texts by their ``names``, or the copy of it that an
    earlier call has kept.

    The copy is made anew when the files have changed or it is damaged. A process that is killed
    leaves what it has decoded to the next one. Where the folder is read-only or the disk is full,
    nothing is kept. Training images alone have a copy of their own, so that no test image is read
    for them.

    Args:
        cache: The copy's file, an ``.npz``; for training images alone, ``.train.npz``.
        stamps: Size and date, or a checksum, of each file by its path.
        decode: Decodes the files, given the file in which :func:`decode_resumably` keeps images
            until all are decoded.
    """
    cache = cache if "test" in splits else cache.with_suffix(".train.npz")
    lines = "\n".join(f"{path} {stamp}" for path, stamp in sorted(stamps.items()))
    fingerprint = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
    unfinished = cache.with_name(f".{cache.name}.{fingerprint[:16]}")
    if cache.is_file():
        with contextlib.suppress(StreamError):  # a damaged copy is made anew
            if str(read_npz(cache, ("fingerprint",))["fingerprint"]) == fingerprint:
                held = read_npz(cache, names)
                _remove_leftovers(cache, set())
                return {name: held[name].tolist() if held[name].dtype.kind == "U" else held[name] for name in names}
    _remove_leftovers(cache, {unfinished})
    decoded = decode(unfinished)
    contents = decoded | {"fingerprint": fingerprint}
    written = _write(cache, contents)
    with contextlib.suppress(OSError):
        unfinished.unlink()
        if not written:  # the disk may have room for the copy now
            _write(cache, contents)
    return decoded


def decode_resumably(files: Sequence[Source], decoding: Decoding, side: int, unfinished: Path) -> np.ndarray:
    """Decodes files of images of one size: uint8 [N, side, side, 3]; keeps them in a file
    meanwhile, so that a process that is killed does not decode them again. Raises StreamError as
    :func:`decode_images` does, or if an image of the official data has another size.

    The file holds blocks of images, each with its checksum. Where it cannot be written, or another
    process writes it, nothing is kept.
    """
    images = np.empty((len(files), side, side, 3), np.uint8)
    with contextlib.ExitStack() as stack:
        kept = None
        with contextlib.suppress(OSError):
            opened = stack.enter_context(unfinished.open("a+b"))
            _lock(opened)
            kept = opened
        start = 0 if kept is None else _read_blocks(kept, images)
        for row, image in enumerate(decode_images(files, decoding, start), start):
            if image.shape != images.shape[1:]:
                raise StreamError(
                    f"{files[row][0]} is {image.shape[0]}x{image.shape[1]}; wanted {side}x{side} as in the official"
                    " data"
                )
            images[row] = image
            if kept is not None and (row % _BLOCK == _BLOCK - 1 or row == len(images) - 1):
                block = images[row - row % _BLOCK : row + 1]
                try:
                    kept.write(block.data)
                    kept.write(_checksum(block))
                    kept.flush()
                except OSError:
                    kept = None
    return images


def _read_blocks(file: BinaryIO, images: np.ndarray) -> int:
    """Reads the whole blocks of a file and cuts off what follows them; returns the images read."""
    file.seek(0)
    for first in range(0, len(images), _BLOCK):
        block = images[first : first + _BLOCK]
        place = file.tell()
        if file.readinto(block.data.cast("B")) < block.nbytes or file.read(4) != _checksum(block):
            file.truncate(place)
            return first
    return len(images)


def _checksum(block: np.ndarray) -> bytes:
    return zlib.crc32(block.data).to_bytes(4, "little")


def _write(cache: Path, arrays: Mapping[str, Any]) -> bool:
    """Writes the copy in one step, or not at all; returns whether it did."""
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        try:
            with temporary.open("wb") as file:
                with contextlib.suppress(OSError):
                    _lock(file)
                np.savez(file, **arrays)
            os.replace(temporary, cache)
            return True
        finally:
            temporary.unlink(missing_ok=True)
    return False


def _remove_leftovers(cache: Path, kept: set[Path]) -> None:
    """Deletes the unfinished copies of processes that were killed while they wrote them, except
    those in ``kept``: a process that is still writing holds the lock of its copy. Where the file
    system has no locks, those that have not grown for a day.
    """
    for path in set(cache.parent.glob(f".{cache.name}.*")) - kept:
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
    """BlockingIOError: another process holds the lock; OSError: there are no locks."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
