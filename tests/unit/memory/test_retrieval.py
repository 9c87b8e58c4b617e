"""Retrieval by value."""

from __future__ import annotations

import torch

from mose_fast.memory.retrieval import highest


def test_the_highest_are_taken_in_the_order_in_which_they_were_drawn():
    slots, scores = torch.tensor([7, 3, 9, 1]), torch.tensor([0.5, 2.0, -1.0, 3.0])
    assert highest(slots, scores, 2).tolist() == [3, 1]
    assert highest(slots, scores, 3).tolist() == [7, 3, 1]
    assert highest(slots, scores, 4).tolist() == highest(slots, scores, 9).tolist() == [7, 3, 9, 1]
    assert highest(slots[:0], scores[:0], 2).tolist() == []


def test_of_equals_the_first_are_taken():
    assert highest(torch.arange(10, 16), torch.tensor([0.0, 1, 0, 1, 0, 1]), 2).tolist() == [11, 13]
