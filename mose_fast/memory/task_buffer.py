"""The images of the current task that a method for offline streams keeps until the task ends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.device import upload


class BufferRecord(NamedTuple):
    """What :meth:`TaskBuffer.restore` needs."""

    tensors: dict[str, Tensor]
    filled: int


class TaskBuffer:
    """Images of the current task in the order in which they came. It grows as needed; 5,000 images
    of CIFAR-100 take 15 MB. What decisions are made by is on the host, so that making them never
    waits for a GPU.
    """

    def __init__(self, image_size: tuple[int, int], device: torch.device | str = "cpu") -> None:
        self._image_size, self._device = tuple(image_size), device
        self.clear()

    # Of each image, [filled, ...]: images uint8 [H, W, 3], labels and indices (in the original
    # stream) int64; on the host classes, the labels again, held_out, bool, for validation, and
    # priorities, int64: of two images of a class, the one with the lower number is kept.
    images, labels, indices, classes, held_out, priorities = (
        property(lambda self, name=name: self._rows[name][: self.filled])
        for name in ("images", "labels", "indices", "classes", "held_out", "priorities")
    )

    def clear(self) -> None:
        """Removes all images."""
        # New tensors, so that a record may go on reading the old ones.
        self._rows = {
            "images": torch.empty(0, *self._image_size, 3, dtype=torch.uint8, device=self._device),
            "labels": torch.empty(0, dtype=torch.int64, device=self._device),
            "indices": torch.empty(0, dtype=torch.int64, device=self._device),
            "classes": torch.empty(0, dtype=torch.int64),
            "held_out": torch.empty(0, dtype=torch.bool),
            "priorities": torch.empty(0, dtype=torch.int64),
        }
        self.filled = 0

    def append(self, **rows: Tensor) -> None:
        """Adds a batch: every attribute above, each [B, ...]."""
        needed = self.filled + len(rows["images"])
        for name, tensor in self._rows.items():
            if needed > len(tensor):
                grown = tensor.new_empty(max(needed, 2 * len(tensor)), *tensor.shape[1:])
                grown[: self.filled] = tensor[: self.filled]
                self._rows[name] = tensor = grown
            tensor[self.filled : needed] = rows[name]
        self.filled = needed

    def keep(self, rows: Tensor) -> None:
        """Keeps some images alone: int64 [n], their numbers in the order of their new places."""
        if not torch.equal(rows, torch.arange(len(rows))):
            there = upload(rows, self._device)
            # New tensors, as in clear.
            self._rows = {name: t[rows if t.device.type == "cpu" else there] for name, t in self._rows.items()}
        self.filled = len(rows)

    def record(self) -> BufferRecord:
        """What :meth:`restore` needs to undo all that comes after."""
        return BufferRecord(dict(self._rows), self.filled)

    def restore(self, record: BufferRecord) -> None:
        """Undoes all that came since :meth:`record`. Restore the newest record first."""
        # Rows below a record's count are never written again.
        self._rows, self.filled = dict(record.tensors), record.filled

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint must contain."""
        return {name: tensor[: self.filled] for name, tensor in self._rows.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copies the result of :meth:`tensors`."""
        self.clear()
        self.append(**tensors)
