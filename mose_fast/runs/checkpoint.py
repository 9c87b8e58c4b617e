"""Checkpoints: safetensors files with arrays and JSON text, which cannot execute code."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mose_fast.runs.files import RunError, checkpoint_files, resume_advice, write_atomically
from mose_fast.state_file import StateFileError, read_state, state_file

#: Version of the checkpoint format. Files of newer versions are refused.
FORMAT = 1

_KEPT = 2

_KIND = "mose_fast_checkpoint"


class CheckpointError(RunError):
    """A checkpoint cannot be read: damaged, foreign, or of a newer format."""


class _Place(NamedTuple):
    """A tensor's place in a :class:`Snapshot`: flat tensor, first element, shape, strides."""

    flat: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Snapshot:
    """A copy of tensors in a few ``flats``, one for each dtype and device, in the order of the
    current stream.

    A learner's state is hundreds of tensors, most of them views of a few buffers. Each piece of
    memory is copied as a whole, so that a copy on a GPU takes a few launches and a copy to the
    host a few transfers.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Of each piece of memory that holds tensors: one of them, the first used element, and the
        # element after the last; elements count from its start.
        extents: dict[tuple[Any, ...], tuple[Tensor, int, int]] = {}
        for tensor in tensors.values():
            start = end = tensor.storage_offset()
            if tensor.numel():
                end += 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            _, first, last = extents.get(_memory(tensor), (tensor, start, end))
            extents[_memory(tensor)] = (tensor, min(start, first), max(end, last))
        pieces: dict[tuple[Any, ...], list[Tensor]] = {}
        sizes: Counter[tuple[Any, ...]] = Counter()
        # What to add to the number of an element of a piece, to find it in its flat tensor.
        shifts: dict[tuple[Any, ...], int] = {}
        for memory, (tensor, start, end) in extents.items():
            kind = memory[:2]
            shifts[memory] = sizes[kind] - start
            sizes[kind] += end - start
            pieces.setdefault(kind, []).append(tensor.detach().as_strided((end - start,), (1,), start))
        self.flats = [torch.cat(parts) for parts in pieces.values()]
        flat_of = {kind: number for number, kind in enumerate(pieces)}
        self._places = {
            name: _Place(
                flat_of[_memory(tensor)[:2]],
                tensor.storage_offset() + shifts[_memory(tensor)],
                tuple(tensor.shape),
                tensor.stride(),
            )
            for name, tensor in tensors.items()
        }

    def not_finite(self) -> str | None:
        """The name of a tensor with NaN or infinity, None if there is none; waits for a GPU."""
        # A NaN makes both NaN. Unlike isfinite, this needs no memory for a flag per element.
        extremes = [
            torch.stack(torch.aminmax(flat)) for flat in self.flats if flat.is_floating_point() and flat.numel()
        ]
        if all(math.isfinite(value) for extreme in extremes for value in extreme.tolist()):
            return None
        return next((name for name, tensor in self.tensors().items() if not tensor.isfinite().all()), None)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name: views of the copies, with the strides that they had."""
        return {name: self.flats[p.flat].as_strided(p.shape, p.strides, p.start) for name, p in self._places.items()}

    def on_host(self) -> Snapshot:
        """The same snapshot on the host, in pinned memory if it was on a GPU; waits for it."""
        host = copy.copy(self)
        host.flats = [
            torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
            if flat.is_cuda
            else flat
            for flat in self.flats
        ]
        for device in {flat.device for flat in self.flats if flat.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return host


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Device, dtype and address of the piece of memory that a tensor is a part of."""
    return tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr()


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], values: dict[str, Any]) -> Path:
    """Writes ``step-<step>.safetensors`` atomically, then deletes all but the newest two. ``step``
    orders the files; tensors are on the host; values are what JSON can hold.

    Raises:
        RunError: The disk is full or the folder unwritable; older checkpoints are untouched.
    """
    path = folder / f"step-{step:09d}.safetensors"
    write_atomically(path, state_file(_KIND, FORMAT, tensors, values), resume_advice(folder.parent))
    for old in checkpoint_files(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


class CheckpointWriter:
    """Writes checkpoints one after the other: on a GPU while the run continues, on a thread and a
    stream of its own, whose error the next call raises.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        on_gpu = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "checkpoint") if on_gpu else None
        # One stream for all checkpoints: PyTorch hands out 32 streams in turn, so a new one for
        # each checkpoint would at some time be the steps' own.
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._writing: Future | None = None

    def write(self, step: int, snapshot: Snapshot, values: dict[str, Any]) -> None:
        """Like :func:`save_checkpoint`, of copies that nobody changes any more. It waits until the
        previous checkpoint is written, so that at most two copies exist.
        """
        if self._thread is None:
            save_checkpoint(self.folder, step, snapshot.tensors(), values)
            return
        self.wait()
        copied = torch.cuda.current_stream(self.device).record_event()
        self._writing = self._thread.submit(self._save, step, snapshot, values, copied)

    def wait(self) -> None:
        """Waits until the last checkpoint is written; RunError if it could not be."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Ends the thread; its last error is not raised, because the run has ended by then."""
        if self._thread is not None:
            self._thread.shutdown()

    def _save(self, step: int, snapshot: Snapshot, values: dict[str, Any], copied: torch.cuda.Event) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copied)
            host = snapshot.on_host()
        save_checkpoint(self.folder, step, host.tensors(), values)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of :func:`save_checkpoint`: tensors on the CPU, and values; CheckpointError if
    the file is missing, damaged, foreign, or of a newer format.
    """
    older = [p for p in checkpoint_files(path.parent) if p.name < path.name]
    instead = f"; the one before it is {older[-1]}: delete {path.name} to continue from there" if older else ""
    try:
        return read_state(path, _KIND, FORMAT, called="checkpoint", instead=instead)
    except StateFileError as error:
        raise CheckpointError(str(error)) from error


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder; None if it contains none."""
    return next(reversed(checkpoint_files(folder)), None)
