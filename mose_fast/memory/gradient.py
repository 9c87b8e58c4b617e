"""A replay memory that keeps samples whose gradients differ (GSS-Greedy, Aljundi et al., NeurIPS
2019; docs/specification/baselines.md section 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mose_fast.memory.replay import ReplayMemory
from mose_fast.ops.draws import Purpose, permutation, random_words, unit


class GradientMemory(ReplayMemory):
    """A memory with a score for each slot: the largest cosine similarity of the sample's gradient
    to those of other samples when it was stored. Low scores are good. Its user computes the scores
    of samples and calls :meth:`offer`.
    """

    def __init__(self, capacity: int, image_size: tuple[int, int], **how: Any) -> None:
        super().__init__(capacity, image_size, **how)
        self.scores = self.keep("scores")

    def reference(self, count: int, size: int) -> Tensor:
        """Draws disjoint batches of slots, with whose gradients the next offered batch is compared:
        int64 [n, s] with s = min(size, filled) and n the number of full batches, at most ``count``.
        """
        size = min(size, self.filled)
        count = min(count, self.filled // size) if size else 0
        order = permutation(self.seed, self.seen, self.filled, Purpose.POLICY, self.images.device)
        return order[: count * size].view(count, size)

    def offer(self, x: Tensor, y: Tensor, task: int, index: Tensor, scores: Tensor) -> Tensor:
        """Stores a batch with its scores, float32 [B] in [-1, 1]; returns int64 [B], the slot of
        each item now, -1 if it was not stored. Free slots are filled in order, and items beyond
        them are dropped; in a full memory each item competes with one stored sample.

        The slots to compete for are drawn without replacement, with probability proportional to
        their score above the lowest score. An item takes its slot with probability P_slot / (P_item
        + P_slot), where P = (score + 1) / 2.
        """
        if self.filled < self.capacity:
            slots = torch.arange(self.filled, self.filled + len(y), device=self.images.device)
            slots = torch.where(slots < self.capacity, slots, -1)
        else:
            slots = self._challenge(scores)
        self.write(slots, x, y, task, index)
        self.write_extra("scores", slots, scores)
        return slots

    def _challenge(self, scores: Tensor) -> Tensor:
        device = self.images.device
        stored = self.scores.double()
        weights = (stored - stored.min()) / (stored.max() - stored.min() + 0.01)
        high, low, *_ = random_words(self.seed, self.seen, self.capacity, Purpose.POLICY, device, lane=1)
        # An exponential race: its first arrivals are a weighted draw without replacement. Slots of
        # the lowest score have weight 0; a tiny one lets them be drawn if there are no others.
        arrival = -torch.log1p(-unit(high)) / weights.clamp_min(1e-12)
        challenged = torch.sort(arrival, stable=True).indices[: len(scores)]
        item = (scores[: len(challenged)].double() + 1) / 2
        slot = (stored[challenged] + 1) / 2
        wins = unit(low[: len(challenged)]) * (item + slot) < slot
        slots = torch.full((len(scores),), -1, dtype=torch.int64, device=device)
        slots[: len(challenged)] = torch.where(wins, challenged, -1)
        return slots
