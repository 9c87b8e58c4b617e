"""Checkpoints: one safetensors file each, which holds arrays and JSON text and can execute nothing."""

from __future__ import annotations

import copy
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mose_fast.train.files import RunError, write_atomically

__all__ = ["FORMAT", "CheckpointError", "CheckpointWriter", "latest", "load_checkpoint", "save_checkpoint"]

#: Version of the checkpoint format; a reader refuses newer ones.
FORMAT = 1

_KEPT = 2


class CheckpointError(RunError):
    """A checkpoint cannot be read: damaged, foreign, or of a newer format."""


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> Path:
    """Writes ``step-<step>.safetensors`` atomically, then deletes all but the newest two.

    Args:
        folder: Of the checkpoints.
        step: A number that grows from checkpoint to checkpoint; orders the files.
        tensors: By name, on any device.
        values: Plain values that JSON can hold.

    Raises:
        RunError: The disk is full or the folder unwritable; older checkpoints are untouched.
    """
    path = folder / f"step-{step:09d}.safetensors"
    metadata = {"mose_fast_checkpoint": str(FORMAT), "values": json.dumps(values)}
    write_atomically(path, save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata))
    for old in _all(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


class CheckpointWriter:
    """Writes checkpoints one after the other; those of a run on a card while it goes on.

    There, the state is copied on the card in the order of the current stream, and a thread takes the copy to the host and into the file
    on a stream of its own. What goes wrong then is raised by the next call.

    Args:
        folder: Of the checkpoints.
        device: Where the run computes.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self._thread = ThreadPoolExecutor(1, "checkpoint") if device.type == "cuda" else None
        self._writing: Future | None = None

    def write(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Like :func:`save_checkpoint`; waits for the one before, so that at most one copy of the state exists."""
        if self._thread is None:
            save_checkpoint(self.folder, step, tensors, values)
            return
        self.wait()
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        copied = torch.cuda.current_stream(self.device).record_event()
        self._writing = self._thread.submit(self._save, step, copies, copy.deepcopy(values), copied)

    def wait(self) -> None:
        """Returns when the last checkpoint is written.

        Raises:
            RunError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Waits for the thread and ends it. What went wrong since the last call is not raised: the run has ended by then."""
        if self._thread is not None:
            self._thread.shutdown()

    def _save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any], copied: torch.cuda.Event) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            torch.cuda.current_stream(self.device).wait_event(copied)
            save_checkpoint(self.folder, step, tensors, values)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of :func:`save_checkpoint`: tensors on the CPU, and values.

    Raises:
        CheckpointError: The file is missing, damaged, not a checkpoint of this program, or of a newer format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the checkpoint {path} is truncated, damaged or no checkpoint at all ({error}){_instead(path)}") from error
    if "mose_fast_checkpoint" not in metadata:
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of mose-fast{_instead(path)}")
    try:
        found = int(metadata["mose_fast_checkpoint"])
        if found <= FORMAT:
            return tensors, json.loads(metadata["values"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: its header is unreadable ({error}){_instead(path)}") from error
    raise CheckpointError(
        f"the checkpoint {path} has format {found}, newer than {FORMAT}, the newest that this version of mose-fast reads; update mose-fast"
    )


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder, None if it holds none."""
    return next(reversed(_all(folder)), None)


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"))


def _instead(path: Path) -> str:
    older = [p for p in _all(path.parent) if p.name < path.name]
    return f"; the one before it is {older[-1]}: delete {path.name} to continue from there" if older else ""
