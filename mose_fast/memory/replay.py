"""A replay memory filled by reservoir sampling (Vitter 1985, algorithm R; mose.md section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.ops.reservoir import SlotFilter, draw, insert

__all__ = ["ReplayMemory"]


class ReplayMemory:
    """Slots of image, label, task and original stream index, each stream item kept with equal probability.

    Its randomness is counter-based: decisions depend on (seed, counters) alone, so that every device makes the same ones and a
    restored memory continues as if it had never stopped.

    Args:
        capacity: Slots M.
        image_size: (H, W) of the images.
        seed: Of the run.
        device: Where the slots live.

    Attributes:
        images: uint8 [M, H, W, 3]; labels, tasks, indices: int64 [M]. The first ``filled`` slots hold samples.
        state: int64 [3]: seed, number of draws so far, number of items seen.
    """

    def __init__(self, capacity: int, image_size: tuple[int, int], *, seed: int, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; wanted a replay memory of at least 1 slot")
        self.capacity = capacity
        self.images = torch.zeros(capacity, *image_size, 3, dtype=torch.uint8, device=device)
        self.labels, self.tasks, self.indices = (torch.full((capacity,), -1, dtype=torch.int64, device=device) for _ in range(3))
        self.state = torch.tensor([seed, 0, 0], dtype=torch.int64, device=device)
        # The host's twin of state[2], so that the fill level is known without asking the device.
        self.seen = 0

    @property
    def filled(self) -> int:
        """Number of slots that hold a sample."""
        return min(self.seen, self.capacity)

    def insert(self, x: Tensor, y: Tensor, task: int, index: Tensor) -> Tensor:
        """Offers a batch, item by item.

        Args:
            x: uint8 [B, H, W, 3]; y: int64 [B]; index: int64 [B], positions in the original stream; all on the memory's device.
            task: The task they came in.

        Returns:
            int64 [B]: the slot in which each item lies now, -1 where it was not kept.
        """
        slots = insert(self.images, self.labels, self.tasks, self.indices, self.state, x, y, task, index)
        self.seen += len(x)
        return slots

    def draw(self, count: int, *, only: int | None = None, others: int | None = None) -> Tensor:
        """Draws slots uniformly without replacement.

        Args:
            count: Slots wanted.
            only: Restrict to this task.
            others: Restrict to all tasks but this one.

        Returns:
            int64 [n], n = min(count, slots that qualify), in random order.
        """
        if only is not None and others is not None:
            raise ValueError(f"only is {only} and others is {others}; wanted at most one of them")
        if only is not None:
            slots = draw(self.tasks, self.state, count, SlotFilter.ONLY, only)
        elif others is not None:
            slots = draw(self.tasks, self.state, count, SlotFilter.OTHERS, others)
        else:
            slots = draw(self.tasks, self.state, count, SlotFilter.ALL, 0)
        return slots[slots >= 0]

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        return {"images": self.images, "labels": self.labels, "tasks": self.tasks, "indices": self.indices, "state": self.state}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what :meth:`tensors` gave, in place.

        Raises:
            ValueError: A tensor has another shape than this memory's.
        """
        for name, own in self.tensors().items():
            if own.shape != tensors[name].shape:
                raise ValueError(f"memory.{name} has shape {tuple(tensors[name].shape)}; wanted {tuple(own.shape)}")
            own.copy_(tensors[name])
        self.seen = int(tensors["state"][2])
