"""A replay memory that values samples by their contribution to a k-nearest-neighbour classifier
(ASER, Shim et al., AAAI 2021; docs/specification/baselines.md section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mose_fast.memory.replay import ReplayMemory, highest
from mose_fast.ops.draws import Purpose, random_words, unit


def knn_shapley(
    candidates: Tensor, candidate_labels: Tensor, points: Tensor, point_labels: Tensor, neighbours: int
) -> Tensor:
    """Shapley values of candidates for k-nearest-neighbour classification of evaluation points (Jia
    et al., VLDB 2019, theorem 1): float32 [E, N], the contribution of each candidate to each point;
    a row's sum is the value of all candidates for its point.

    The value of a set of candidates for a point is the number of its k nearest candidates that have
    the point's label, divided by k. The recursion is exact, also for fewer than k candidates.

    Args:
        candidates: float32 [N, D], features; candidate_labels: int64 [N].
        points: float32 [E, D], features; point_labels: int64 [E].
        neighbours: k.
    """
    count = len(candidates)
    if count == 0:
        return points.new_zeros(len(points), 0)
    # Not by a matrix product, whose rounding error can exceed small distances.
    distances = torch.cdist(points, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    order = torch.sort(distances, dim=1, stable=True).indices
    matches = (candidate_labels[order] == point_labels[:, None]).float()
    rank = torch.arange(1, count, device=points.device)
    gains = (matches[:, :-1] - matches[:, 1:]) / neighbours * (rank.clamp_max(neighbours) / rank)
    steps = torch.cat([gains, matches[:, -1:] / max(count, neighbours)], 1)
    # Each value is the sum of its own step and all later ones. A matrix product computes it, since
    # cumsum has no deterministic kernel on a GPU.
    values = steps @ torch.ones(count, count, device=points.device).tril()
    return torch.empty_like(values).scatter_(1, order, values)


def adversarial_scores(cooperative: Tensor, adversarial: Tensor, kind: str) -> Tensor:
    """The value of replaying candidates, float32 [N]: high for those that represent the memory and
    are close to incoming rows of other classes; from their Shapley values for points from memory,
    float32 [C, N], and for the incoming rows, [A, N]. ``kind``: ``asvm`` (mean of the first minus
    mean of the second) | ``asv`` (maximum minus minimum) | ``neg_sv`` (minus the second's sum). A
    term without any point is 0.
    """
    if kind == "neg_sv":
        return -adversarial.sum(0)
    if kind == "asvm":
        return cooperative.sum(0) / max(len(cooperative), 1) - adversarial.sum(0) / max(len(adversarial), 1)
    best = cooperative.amax(0) if len(cooperative) else adversarial.new_zeros(adversarial.shape[1])
    return best - (adversarial.amin(0) if len(adversarial) else torch.zeros_like(best))


class ShapleyMemory(ReplayMemory):
    """A memory that replays and keeps samples by their Shapley values in feature space. Until it is
    full, it stores every item.

    ``per_class`` samples are drawn from each class, rounded down; only the number of candidates of
    an update, ``per_class`` x ``classes``, uses the exact value.
    """

    def __init__(
        self, capacity: int, image_size: tuple[int, int], *, classes: int, neighbours: int, per_class: float, **how: Any
    ) -> None:
        super().__init__(capacity, image_size, **how)
        self.classes, self.neighbours, self.per_class = classes, neighbours, per_class

    def retrieve(
        self,
        x: Tensor,
        y: Tensor,
        count: int,
        kind: str,
        features: Callable[[Tensor], Tensor],
        sequence: int,
        *,
        others: int | None = None,
    ) -> Tensor:
        """The slots that are most worth replaying with an incoming batch, only from the tasks other
        than ``others``: int64, at most min(count, ``per_class`` x classes in the memory). ``kind``
        is that of :func:`adversarial_scores`; ``features`` maps uint8 [N, H, W, 3] to float32
        [N, D].
        """
        order, _ = self._orders(Purpose.RETRIEVAL, sequence)
        if others is not None:
            order = order[self.tasks[order] != others]
        rank = self._rank_in_class(order)
        per_class = int(self.per_class)
        candidates, cooperative = order[rank < per_class], order[(rank >= per_class) & (rank < 2 * per_class)]
        sizes = (len(candidates), len(cooperative), len(x))
        found, points, incoming = features(torch.cat([self.images[candidates], self.images[cooperative], x])).split(
            sizes
        )
        labels = self.labels[candidates]
        scores = adversarial_scores(
            knn_shapley(found, labels, points, self.labels[cooperative], self.neighbours),
            knn_shapley(found, labels, incoming, y, self.neighbours),
            kind,
        )
        return highest(candidates, scores, count)

    def offer(self, x: Tensor, y: Tensor, task: int, index: Tensor, features: Callable[[Tensor], Tensor]) -> Tensor:
        """Stores a batch: free slots are filled in order; further items compete with samples drawn
        from memory. Returns int64 [B]: the slot of each item now, -1 if it was not stored.

        Values are computed for a class-balanced draw from memory and for incoming items of minority
        classes, whose share of the memory is below a threshold drawn uniformly from [0, 1 /
        classes). Of the items and the drawn samples, the best are kept; each item among them
        replaces a sample that is not. ``features`` maps uint8 [N, H, W, 3] to float32 [N, D].
        """
        free = min(self.capacity - self.filled, len(x))
        sequence = self.seen
        slots = torch.arange(self.filled, self.filled + free, device=self.images.device)
        self.write(slots, x[:free], y[:free], task, index[:free])
        if free == len(x):
            return slots
        x, y, index = x[free:], y[free:], index[free:]
        won = self._compete(x, y, features, sequence)
        self.write(won, x, y, task, index)
        # A slot that was just filled may have been overwritten already.
        return torch.cat([torch.where(torch.isin(slots, won), -1, slots), won])

    def _compete(self, x: Tensor, y: Tensor, features: Callable[[Tensor], Tensor], sequence: int) -> Tensor:
        device = self.images.device
        order, other_order = self._orders(Purpose.POLICY, sequence)
        points = order[self._rank_in_class(order) < int(self.per_class)]
        drawn = other_order[~torch.isin(other_order, points)][: int(self.per_class * self.classes)]
        threshold = unit(random_words(self.seed, sequence, 1, Purpose.POLICY, device, lane=1)[0]) / self.classes
        share = torch.bincount(self.labels, minlength=self.classes) / self.capacity
        minority = share[y] < threshold

        sizes = (len(points), len(drawn), len(x))
        at_points, of_drawn, of_items = features(torch.cat([self.images[points], self.images[drawn], x])).split(sizes)
        values = knn_shapley(
            torch.cat([of_drawn, of_items]),
            torch.cat([self.labels[drawn], y]),
            torch.cat([at_points, of_items[minority]]),
            torch.cat([self.labels[points], y[minority]]),
            self.neighbours,
        ).sum(0)
        # In a tie the stored sample is kept: stored samples come first.
        kept = torch.zeros(len(values), dtype=torch.bool, device=device)
        kept[torch.sort(values, descending=True, stable=True).indices[: len(drawn)]] = True
        lost, winners = drawn[~kept[: len(drawn)]], kept[len(drawn) :]
        slots = torch.full((len(x),), -1, dtype=torch.int64, device=device)
        slots[winners] = lost
        return slots

    def _orders(self, purpose: Purpose, sequence: int) -> tuple[Tensor, Tensor]:
        """Two independent random orders of the slots that hold samples."""
        a, b, c, d = random_words(self.seed, sequence, self.filled, purpose, self.images.device)
        return torch.argsort((a << 31) | (b >> 1), stable=True), torch.argsort((c << 31) | (d >> 1), stable=True)

    def _rank_in_class(self, order: Tensor) -> Tensor:
        """How many slots of its class come before each slot of an order; int64, as long as it."""
        labels, by_class = torch.sort(self.labels[order], stable=True)
        first = torch.searchsorted(labels, labels)
        rank = torch.empty_like(order)
        rank[by_class] = torch.arange(len(order), device=order.device) - first
        return rank
