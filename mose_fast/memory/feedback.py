"""OnPro's adaptive prototypical feedback: replayed rows are mixed, and those of classes with close
prototypes more often (docs/specification/baselines.md section 10).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast.memory.pairs import choose
from mose_fast.ops.draws import Purpose, permutation, random_words, unit

# Of two prototypes, where they coincide.
_SMALLEST_DISTANCE = 1e-6
# The largest share of the partner in a batch mixed at random, and the parameter of the Beta
# distribution of shares within pairs (weilllllls/OnPro).
_LARGEST_SHARE = 0.6
_BETA = 0.4
# Each trial is accepted with probability 0.84.
_TRIALS = 8


class Mixture(NamedTuple):
    """Rows to mix: (1 - share) times ``slots`` plus share times ``partners``, int64 [n] each;
    ``shares`` are float32 [n], in [0, 1); 0: the first alone.
    """

    slots: Tensor
    partners: Tensor
    shares: Tensor


def symmetric_beta(parameter: float, seed: int, sequence: int, count: int, lane: int, device: torch.device) -> Tensor:
    """Draws from Beta(parameter, parameter) by Joehnk's method, float64 [count]: the first accepted
    of eight trials, else 1/2. Uses the lanes ``lane`` to ``lane + 3`` of ``Purpose.MIX``.
    """
    words = [random_words(seed, sequence, count, Purpose.MIX, device, lane + k) for k in range(_TRIALS // 2)]
    powers = [unit(word) ** (1 / parameter) for four in words for word in four]
    x, y = torch.stack(powers).unflatten(0, (_TRIALS, 2)).unbind(1)
    total = x + y
    accepted = (total > 0) & (total <= 1)
    first = accepted.to(torch.uint8).argmax(0, keepdim=True)
    share = (x / total).gather(0, first)[0]
    return torch.where(accepted.any(0), share, 0.5)


def close_pairs(prototypes: Tensor, count: int, seed: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Draws ``count`` pairs of classes, close ones more often: each pair's number is ``count``
    times its softmax over 1 / distance, rounded, and one more or one less for random pairs until
    there are ``count``. ``prototypes`` are float [K, P], zero for classes without one; at least two
    have one.

    Returns the pairs, int64 [2, count], the smaller class first, equal pairs after each other, and
    the number of each pair among all pairs, int64 [count].
    """
    present = prototypes.any(1).nonzero().flatten()
    pairs = present[torch.triu_indices(len(present), len(present), 1, device=present.device)]
    distances = (prototypes[pairs[0]] - prototypes[pairs[1]]).norm(dim=1)
    wanted = (count * (1 / distances.clamp_min(_SMALLEST_DISTANCE)).softmax(0)).round().to(torch.int64)
    order = permutation(seed, sequence, pairs.shape[1], Purpose.PAIR, present.device)
    missing = count - wanted.sum()
    may_change = (wanted[order] > 0) | (missing > 0)
    changed = may_change & (may_change.cumsum(0) <= missing.abs())
    wanted[order] += missing.sign() * changed
    numbers = torch.repeat_interleave(wanted, output_size=count)
    return pairs[:, numbers], numbers


def feedback(
    drawn: Tensor, stored: Tensor, prototypes: Tensor, share: float, probability: float, seed: int, sequence: int
) -> Mixture:
    """Chooses the rows to replay, and what each is mixed with.

    Args:
        drawn: int64 [n], slots drawn at random.
        stored: int64 [F], the labels of the memory's samples.
        prototypes: float [K, P], zero for classes without one. If fewer than two have one, no rows
            are chosen by them, and those drawn take their place.
        share: Share of the rows that are those drawn; the others are chosen by pairs of classes.
        probability: Probability that the drawn rows are mixed at all, that each of them then is,
            and that the rows of a pair are.
    """
    device, count = drawn.device, int(share * len(drawn))
    keep, size, whole, _ = random_words(seed, sequence, max(count, 1), Purpose.MIX, device, lane=1)
    mixed = (unit(keep) < probability) & (unit(whole[:1]) < probability)
    shares = torch.where(mixed, _LARGEST_SHARE * unit(size), 0)[:count]
    partners = drawn[:count][permutation(seed, sequence, count, Purpose.MIX, device)]
    if prototypes.any(1).sum() < 2:
        rest = drawn[count:]
        return Mixture(drawn, torch.cat([partners, rest]), torch.cat([shares, shares.new_zeros(len(rest))]).float())
    rest = len(drawn) - count
    pairs, numbers = close_pairs(prototypes, rest, seed, sequence)
    of_class = pairs[:, :, None] == stored
    words = random_words(seed, sequence, rest, Purpose.PAIR, device, lane=1)
    one, other = (choose(same | ~same.any(1, keepdim=True), word) for same, word in zip(of_class, words, strict=False))
    applied = unit(random_words(seed, sequence, len(prototypes) ** 2 // 2, Purpose.PAIR, device, lane=2)[0])
    within = torch.where(applied[numbers] < probability, symmetric_beta(_BETA, seed, sequence, rest, 2, device), 0)
    return Mixture(torch.cat([drawn[:count], one]), torch.cat([partners, other]), torch.cat([shares, within]).float())
