"""Draws a positive and a negative for each anchor (Caccia et al., ICLR 2022;
docs/specification/baselines.md section 6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.ops.draws import Purpose, random_words, unit


def draw_pairs(
    labels: Tensor, stored: Tensor, negatives: Tensor, seed: int, sequence: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws for each anchor one item of its own label, never itself, and one of another among
    ``negatives``, bool [K], uniformly from the stored samples and all anchors. ``labels``, int64
    [B], are the anchors', ``stored``, int64 [F], the samples'.

    Returns int64 [n] each: the anchors that have a positive and a negative, n <= B; their positives
    and their negatives, positions in [stored samples; anchors].
    """
    pool = torch.cat([stored, labels])
    same = labels[:, None] == pool
    others = ~same & negatives[pool]
    itself = torch.arange(len(labels), device=labels.device)
    same[itself, len(stored) + itself] = False
    first, second, _, _ = random_words(seed, sequence, len(labels), Purpose.PAIR, labels.device)
    anchors = (same.any(1) & others.any(1)).nonzero().flatten()
    return anchors, choose(same[anchors], first[anchors]), choose(others[anchors], second[anchors])


def choose(allowed: Tensor, words: Tensor) -> Tensor:
    """Position of a uniformly drawn True in each row of ``allowed``: bool [n, P], no row empty."""
    rank = allowed.cumsum(1)
    chosen = (unit(words) * rank[:, -1]).to(torch.int64)
    return torch.searchsorted(rank, chosen[:, None] + 1).flatten()
