"""A replay memory balanced over the classes (GDumb, Prabhu et al., ECCV 2020, algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mose_fast.memory.replay import ReplayMemory
from mose_fast.ops.draws import Purpose, random_words


class BalancedMemory(ReplayMemory):
    """A memory with greedy class balance: an item is stored if its class is new or has less than
    its share. If the memory is full, a random sample of the largest class is removed.

    The share of a class is M / (number of stored classes), a fraction as in the paper: if it were
    rounded down, the first classes could keep several slots more than the last. A batch is decided
    as a whole; the counts are the same as item by item, up to ties between classes.
    """

    def __init__(self, capacity: int, image_size: tuple[int, int], *, classes: int, **how: Any) -> None:
        super().__init__(capacity, image_size, **how)
        self.classes = classes

    def insert(self, x: Tensor, y: Tensor, task: int, index: Tensor) -> Tensor:
        accepted = self._accept(y)
        stored = self.labels[: self.filled]
        if self.filled + int(accepted.sum()) > self.capacity:
            kept = self._keep_smallest(stored, y, accepted)
        else:
            kept = torch.cat([torch.ones_like(stored, dtype=torch.bool), accepted])
        kept_stored, kept_new = kept.split([len(stored), len(y)])
        # Empty slots, in order: first those of removed samples, then those never used.
        free = torch.ones(self.capacity, dtype=torch.bool, device=y.device)
        free[: len(stored)] = ~kept_stored
        slots = torch.full_like(y, -1)
        slots[kept_new] = free.nonzero().flatten()[: int(kept_new.sum())]
        self.write(slots, x, y, task, index)
        return slots

    def _accept(self, y: Tensor) -> Tensor:
        """Which items of a batch algorithm 1 stores, bool [B]."""
        counts = torch.bincount(self.labels[: self.filled], minlength=self.classes)
        earlier = (y[:, None] == y).tril(-1).sum(1)  # items of the same class before it in the batch
        new = (counts[y] == 0) & (earlier == 0)
        classes_before = (counts > 0).sum() + new.cumsum(0) - new.long()
        # Shares only shrink, so if an item is stored, all earlier items of its class are, too.
        return new | ((counts[y] + earlier) * classes_before < self.capacity)

    def _keep_smallest(self, stored: Tensor, y: Tensor, accepted: Tensor) -> Tensor:
        """M of the stored samples and accepted items, fewer of large classes: bool [filled + B]."""
        labels = torch.cat([stored, torch.where(accepted, y, self.classes)])
        # The samples of each class get ranks in random order. Those with the highest ranks are
        # removed, in random order among equal ranks.
        within, between, _, _ = random_words(self.seed, self.seen, len(labels), Purpose.BALANCE, labels.device)
        order = torch.argsort((labels << 32) | within, stable=True)
        sizes = torch.bincount(labels, minlength=self.classes + 1)
        heights = torch.empty_like(labels)
        heights[order] = torch.arange(len(labels), device=labels.device) - (sizes.cumsum(0) - sizes)[labels[order]]
        heights = torch.where(labels == self.classes, len(labels), heights)
        kept = torch.zeros_like(labels, dtype=torch.bool)
        kept[torch.argsort((heights << 32) | between, stable=True)[: self.capacity]] = True
        return kept
