"""A replay memory that holds as many samples of every class as of any other (Prabhu et al., GDumb,
ECCV 2020, algorithm 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mose_fast.memory.replay import ReplayMemory
from mose_fast.ops.draws import Purpose, random_words

__all__ = ["BalancedMemory"]


class BalancedMemory(ReplayMemory):
    """Greedy class balance: an item is kept if its class is new or has less than its share; a
    random one of the largest class leaves.

    The share of a class is M / classes stored, a fraction as in the paper: rounded down, the first
    classes would keep more than one slot more than the last. A batch is decided as a whole, with
    the same counts as item by item up to ties between classes.

    Args:
        capacity: Slots M.
        image_size: (H, W) of the images.
        classes: Number of classes K of the stream.
        seed: The run's seed.
        device: Device of the slots.
    """

    def __init__(
        self, capacity: int, image_size: tuple[int, int], *, classes: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(capacity, image_size, seed=seed, device=device)
        self.classes = classes
        self._filled = 0

    @property
    def filled(self) -> int:
        # Not min(seen, capacity): a class with its share is refused even while slots are free.
        return self._filled

    def insert(self, x: Tensor, y: Tensor, task: int, index: Tensor) -> Tensor:
        accepted = self._accept(y)
        stored = self.labels[: self._filled]
        if self._filled + int(accepted.sum()) > self.capacity:
            kept = self._keep_smallest(stored, y, accepted)
        else:
            kept = torch.cat([torch.ones_like(stored, dtype=torch.bool), accepted])
        kept_stored, kept_new = kept.split([len(stored), len(y)])
        # Slots that nothing holds any more, in order: those left by others, then those never used.
        free = torch.ones(self.capacity, dtype=torch.bool, device=y.device)
        free[: len(stored)] = ~kept_stored
        slots = torch.full_like(y, -1)
        slots[kept_new] = free.nonzero().flatten()[: int(kept_new.sum())]
        self.write(slots, x, y, task, index)
        self._filled = int(kept.sum())
        return slots

    def draw(self, count: int, *, only: int | None = None, others: int | None = None) -> Tensor:
        # What draws takes the first state[2] slots for filled.
        seen = self.state[2].clone()
        self.state[2] = self._filled
        slots = super().draw(count, only=only, others=others)
        self.state[2] = seen
        return slots

    def _accept(self, y: Tensor) -> Tensor:
        """Which items of a batch algorithm 1 lets in, bool [B]."""
        counts = torch.bincount(self.labels[: self._filled], minlength=self.classes)
        earlier = (y[:, None] == y).tril(-1).sum(1)  # items of the same class before it in the batch
        new = (counts[y] == 0) & (earlier == 0)
        classes_before = (counts > 0).sum() + new.cumsum(0) - new.long()
        # Shares only shrink, so that whoever is let in finds all earlier items of its class let in
        # as well.
        return new | ((counts[y] + earlier) * classes_before < self.capacity)

    def _keep_smallest(self, stored: Tensor, y: Tensor, accepted: Tensor) -> Tensor:
        """Chooses M of the stored samples and the accepted items, bool [filled + B], by taking from
        the largest classes at random.

        Samples of a class are stacked in random order; what lies highest leaves, equal heights in
        random order.
        """
        labels = torch.cat([stored, torch.where(accepted, y, self.classes)])
        within, between, _, _ = random_words(self.seed, self.seen, len(labels), Purpose.BALANCE, labels.device)
        order = torch.argsort((labels << 32) | within, stable=True)
        sizes = torch.bincount(labels, minlength=self.classes + 1)
        heights = torch.empty_like(labels)
        heights[order] = torch.arange(len(labels), device=labels.device) - (sizes.cumsum(0) - sizes)[labels[order]]
        heights = torch.where(labels == self.classes, len(labels), heights)
        kept = torch.zeros_like(labels, dtype=torch.bool)
        kept[torch.argsort((heights << 32) | between, stable=True)[: self.capacity]] = True
        return kept

    def load(self, tensors: dict[str, Any]) -> None:
        super().load(tensors)
        self._filled = int((self.labels >= 0).sum())
