"""Positives and negatives: what may be drawn, and how often."""

from __future__ import annotations

import torch

from mose_fast.memory import draw_pairs

STORED = torch.tensor([0, 0, 1, 2, 5])
LABELS = torch.tensor([1, 2, 1, 3])


def drawn(sequence: int, allowed=(1, 2, 3)) -> tuple[list[int], list[int], list[int]]:
    negatives = torch.zeros(6, dtype=torch.bool)
    negatives[list(allowed)] = True
    return tuple(part.tolist() for part in draw_pairs(LABELS, STORED, negatives, seed=1, sequence=sequence))


def test_every_draw_is_allowed_and_all_that_is_allowed_is_drawn_equally_often():
    # Worked by hand on the pool [0 0 1 2 5 | 1 2 1 3]; the anchor of label 3 has no partner.
    positives = {0: {2, 7}, 1: {3}, 2: {2, 5}}
    negatives = {0: {3, 6, 8}, 1: {2, 5, 7, 8}, 2: {3, 6, 8}}
    seen = {(kind, anchor): [] for kind in "+-" for anchor in range(3)}
    for sequence in range(500):
        anchors, first, second = drawn(sequence)
        assert anchors == [0, 1, 2]
        for anchor in anchors:
            seen["+", anchor].append(first[anchor])
            seen["-", anchor].append(second[anchor])
    for kind, allowed in (("+", positives), ("-", negatives)):
        for anchor, places in allowed.items():
            assert set(seen[kind, anchor]) == places
            share = 1 / len(places)
            for place in places:
                assert abs(seen[kind, anchor].count(place) / 500 - share) <= 5 * (share * (1 - share) / 500) ** 0.5


def test_an_anchor_without_positive_or_negative_is_left_out():
    assert drawn(0, allowed=(2,))[0] == [0, 2]  # nothing but label 2 may be a negative
    anchors, positives, negatives = draw_pairs(torch.tensor([4, 4]), STORED, torch.ones(6, dtype=torch.bool), 0, 0)
    assert anchors.tolist() == [0, 1] and positives.tolist() == [6, 5] and set(negatives.tolist()) <= set(range(5))
    one = torch.zeros(6, dtype=torch.bool)
    one[4] = True
    assert [len(part) for part in draw_pairs(torch.tensor([4, 4]), STORED, one, 0, 0)] == [0, 0, 0]


def test_an_empty_memory():
    anchors, positives, negatives = draw_pairs(
        torch.tensor([0, 1, 0]), STORED[:0], torch.ones(2, dtype=torch.bool), 0, 0
    )
    assert anchors.tolist() == [0, 2] and positives.tolist() == [2, 0] and negatives.tolist() == [1, 1]


def test_draws_depend_on_the_sequence_alone():
    assert drawn(3) == drawn(3)
    assert len({str(drawn(sequence)) for sequence in range(20)}) > 5
