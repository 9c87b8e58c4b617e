"""OnPro's choice of rows to mix: pairs of classes, shares, and the rows themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mose_fast.memory.feedback import close_pairs, feedback, symmetric_beta

#: Four classes of six have prototypes: 0 and 1 are close, 4 and 5 are far.
PROTOTYPES = torch.tensor([[0.0, 1.0], [0.25, 1.0], [0, 0], [0, 0], [2.0, 0.0], [0.0, -2.0]])
PAIRS = [(0, 1), (0, 4), (0, 5), (1, 4), (1, 5), (4, 5)]


def probabilities() -> list[float]:
    distances = [float((PROTOTYPES[a] - PROTOTYPES[b]).norm()) for a, b in PAIRS]
    weights = [math.exp(1 / d) for d in distances]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_numbers_of_pairs_are_the_softmax_of_inverse_distances_rounded(count):
    for sequence in range(5):
        pairs, numbers = close_pairs(PROTOTYPES, count, 3, sequence)
        found = list(zip(*pairs.tolist(), strict=True))
        assert len(found) == len(numbers) == count and set(found) <= set(PAIRS)
        assert [PAIRS[n] for n in numbers.tolist()] == found
        wanted = [round(count * p) for p in probabilities()]
        off = [found.count(pair) - number for pair, number in zip(PAIRS, wanted, strict=True)]
        assert max(off) - min(off) <= 1 and sum(off) == count - sum(wanted)


def test_what_rounding_leaves_goes_to_random_pairs():
    prototypes = torch.eye(6)  # fifteen pairs at one distance: none has 7 / 15 of a row
    met = set()
    for sequence in range(40):
        pairs, _ = close_pairs(prototypes, 7, 0, sequence)
        found = list(zip(*pairs.tolist(), strict=True))
        assert len(set(found)) == 7
        met |= set(found)
    assert len(met) == 15
    # Twenty rows on fifteen pairs are 1.33 each, rounded to 1; 23 are 1.53, rounded to 2.
    for count, most in ((20, 2), (23, 2)):
        pairs, _ = close_pairs(prototypes, count, 0, 0)
        found = list(zip(*pairs.tolist(), strict=True))
        assert {found.count(pair) for pair in found} == {1, most} and len(found) == count


def test_coinciding_prototypes_take_all_and_nothing_overflows():
    pairs, _ = close_pairs(torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]]), 9, 0, 0)
    assert pairs.tolist() == [[0] * 9, [1] * 9]


def test_shares_of_the_beta_distribution():
    """Against the distribution's own function, integrated: no point is off by five standard
    errors.
    """
    count, a = 20_000, 0.4
    drawn = symmetric_beta(a, 1, 2, count, 2, torch.device("cpu"))
    assert drawn.dtype == torch.float64 and drawn.min() >= 0 and drawn.max() <= 1
    # x = t ** (1 / a) removes the density's pole at 0.
    t = (np.arange(200_000) + 0.5) / 200_000 * 0.5**a
    x, density = t ** (1 / a), (1 - t ** (1 / a)) ** (a - 1)
    cumulative = 0.5 * np.cumsum(density) / density.sum()
    for point in (0.001, 0.01, 0.1, 0.3, 0.5):
        wanted = float(np.interp(point, x, cumulative))
        error = (wanted * (1 - wanted) / count) ** 0.5
        assert abs(float((drawn < point).double().mean()) - wanted) < 5 * error
        assert abs(float((drawn > 1 - point).double().mean()) - wanted) < 5 * error


STORED = torch.tensor([0, 1, 4, 5] * 10)


def test_the_rows_of_a_step():
    drawn = torch.arange(40).flip(0)[:20]
    slots, partners, shares = feedback(drawn, STORED, PROTOTYPES, 0.5, 1.0, 7, 3)
    assert slots.shape == partners.shape == shares.shape == (20,) and shares.dtype == torch.float32
    # The first half: those drawn, each with another of them.
    assert torch.equal(slots[:10], drawn[:10]) and sorted(partners[:10].tolist()) == sorted(drawn[:10].tolist())
    assert shares[:10].min() > 0 and shares[:10].max() < 0.6 and len(set(shares[:10].tolist())) == 10
    # The others: pairs of classes, most often the close one.
    pairs = list(zip(STORED[slots[10:]].tolist(), STORED[partners[10:]].tolist(), strict=True))
    assert set(pairs) <= set(PAIRS) and pairs.count((0, 1)) >= 8 and len(set(slots[10:].tolist())) > 3
    again = feedback(drawn, STORED, PROTOTYPES, 0.5, 1.0, 7, 3)
    assert all(torch.equal(a, b) for a, b in zip(again, (slots, partners, shares), strict=True))
    assert not torch.equal(feedback(drawn, STORED, PROTOTYPES, 0.5, 1.0, 7, 4).slots, slots)


def test_the_probability_counts_twice_for_rows_drawn_and_once_for_pairs():
    drawn, whole, each, within = torch.arange(40), 0, [], []
    for sequence in range(300):
        shares = feedback(drawn, STORED, PROTOTYPES, 0.5, 0.3, 0, sequence).shares
        mixed = shares[:20] > 0
        whole += bool(mixed.any())
        each += [float(mixed.double().mean())] if mixed.any() else []
        within.append(float((shares[20:] > 0).double().mean()))
    assert abs(whole / 300 - 0.3) < 0.08 and abs(sum(each) / len(each) - 0.3) < 0.06
    # All rows of a pair are mixed or none, and the close pair has nearly all.
    assert abs(sum(within) / 300 - 0.3) < 0.09
    assert not feedback(drawn, STORED, PROTOTYPES, 0.5, 0.0, 0, 0).shares.any()


def test_a_class_without_a_sample_is_replaced_by_any():
    stored = torch.tensor([4, 5] * 20)
    slots, partners, _ = feedback(torch.arange(20), stored, PROTOTYPES, 0.0, 1.0, 0, 1)
    assert set(stored[slots].tolist()) == set(stored[partners].tolist()) == {4, 5}
    assert len(set(slots.tolist())) > 5


@pytest.mark.parametrize("known", [0, 1])
def test_fewer_than_two_prototypes_choose_nothing(known):
    drawn = torch.arange(20).flip(0)
    slots, partners, shares = feedback(drawn, STORED, PROTOTYPES * (torch.arange(6) < known)[:, None], 0.5, 1.0, 0, 0)
    assert torch.equal(slots, drawn) and torch.equal(partners[10:], drawn[10:]) and not shares[10:].any()
    assert shares[:10].min() > 0
