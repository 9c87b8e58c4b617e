"""Mixtures of two images of different classes."""

from __future__ import annotations

import torch

from mose_fast.augment.class_mixing import draw_mixes, mixing_shares


def test_shares_are_those_of_a_beta_distribution():
    """Beta(20, 20) has the variance 1 / 164; 80 % of it lie in [0.4, 0.6]."""
    shares = mixing_shares(3, 5, 20000, 0.0).double()
    assert abs(shares.mean() - 0.5) < 0.003 and abs(shares.var() - 1 / 164) < 2e-4
    cut = mixing_shares(3, 5, 20000, 0.4).double()
    inside = (shares >= 0.4) & (shares <= 0.6)
    assert torch.equal(cut[inside], shares[inside]) and (cut[~inside] == 0.5).all()
    assert 0.78 < inside.double().mean() < 0.82


def test_every_pair_of_classes_has_its_number():
    """Numbers stay as they are when further classes come."""
    mixes = draw_mixes([0, 1, 2, 3] * 10, 1, 2, rounds=6, least=0.4)
    labels = torch.arange(4).repeat(10)
    pairs = {
        (min(a, b), max(a, b))
        for a, b in zip(labels[mixes.firsts].tolist(), labels[mixes.seconds].tolist(), strict=True)
    }
    numbers = {(0, 1): 0, (0, 2): 1, (1, 2): 2, (0, 3): 3, (1, 3): 4, (2, 3): 5}
    assert pairs == set(numbers)
    for first, second, number in zip(labels[mixes.firsts], labels[mixes.seconds], mixes.pairs, strict=True):
        assert numbers[min(int(first), int(second)), max(int(first), int(second))] == number


def test_each_round_pairs_every_row_once_in_another_order():
    mixes = draw_mixes(list(range(10)), 1, 2, rounds=4, least=0.4)
    assert 30 < len(mixes.pairs) <= 40
    assert torch.bincount(mixes.firsts, minlength=10).max() <= 4 and torch.bincount(mixes.seconds).max() <= 4
    again = draw_mixes(list(range(10)), 1, 2, rounds=4, least=0.4)
    other = draw_mixes(list(range(10)), 1, 3, rounds=4, least=0.4)
    assert torch.equal(again.seconds, mixes.seconds) and torch.equal(again.share, mixes.share)
    assert other.seconds.tolist() != mixes.seconds.tolist()


def test_rows_of_one_class_are_not_mixed():
    mixes = draw_mixes([2] * 5, 1, 2, rounds=4, least=0.4)
    assert len(mixes.pairs) == 0 and mixes.mix(torch.zeros(5, 3, 8, 8)).shape == (0, 3, 8, 8)
