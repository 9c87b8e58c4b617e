"""Mixtures of two images of different classes, which are samples of a further class (IL2A;
docs/specification/baselines.md section 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.ops.draws import Purpose, permutation, random_words, unit

# Both parameters of the Beta distribution of shares (Impression2805/IL2A).
_BETA = 20


class Mixes(NamedTuple):
    """P mixed images: ``firsts`` and ``seconds`` int64 [P], the rows that are mixed; ``share``
    float32 [P] of the first one; ``pairs`` int64 [P], the number of the pair of classes, j (j - 1)
    / 2 + i for classes i < j.
    """

    firsts: Tensor
    seconds: Tensor
    share: Tensor
    pairs: Tensor

    def mix(self, views: Tensor) -> Tensor:
        """The mixed views float [P, C, H, W] of views [N, C, H, W]."""
        share = self.share.view(-1, 1, 1, 1)
        return share * views[self.firsts] + (1 - share) * views[self.seconds]


def draw_mixes(labels: Sequence[int], seed: int, sequence: int, *, rounds: int, least: float) -> Mixes:
    """Draws mixtures on the host: in each round every row is paired with another in random order,
    and pairs of different classes are mixed. ``labels`` are the class of each row, counted from 0;
    for ``least`` see :func:`mixing_shares`.
    """
    orders = (permutation(seed, sequence * rounds + n, len(labels), Purpose.MIX).tolist() for n in range(rounds))
    drawn = [(a, b) for order in orders for a, b in enumerate(order) if labels[a] != labels[b]]
    firsts, seconds = torch.tensor(drawn, dtype=torch.int64).view(-1, 2).T
    low, high = torch.tensor(labels)[torch.stack([firsts, seconds])].aminmax(dim=0)
    return Mixes(firsts, seconds, mixing_shares(seed, sequence, len(drawn), least), high * (high - 1) // 2 + low)


def mixing_shares(seed: int, sequence: int, count: int, least: float) -> Tensor:
    """The share of the first image in each of ``count`` mixtures, float32: drawn from Beta(20, 20),
    and 1/2 where one image would have less than ``least``.
    """
    words = [w for lane in range(1, 11) for w in random_words(seed, sequence, count, Purpose.MIX, lane=lane)]
    # The 20th smallest of 39 uniform numbers has this distribution.
    share = unit(torch.stack(words[: 2 * _BETA - 1])).sort(0).values[_BETA - 1]
    return torch.where((share < least) | (share > 1 - least), 0.5, share).float()
