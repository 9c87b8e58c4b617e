"""Counter-based randomness: Philox4x32-10 in PyTorch, the definition of ``csrc/core/philox.h``.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A word is a pure function of
(seed, sequence, item, purpose, lane), so any device computes any draw in any order. Words are held
as int64 in ``[0, 2**32)``; sums and products wrap modulo ``2**64`` as in C.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """The purpose of a draw; no two share a counter. Saved runs depend on these numbers."""

    RESERVOIR = 1
    DRAW = 2
    VIEW = 3
    SHIFT = 4
    REVIEW = 5
    RETRIEVAL = 6
    POLICY = 7
    PAIR = 10
    BALANCE = 11
    MIX = 12
    FIT = 13
    PIECE = 14


def _low(value: Tensor) -> Tensor:
    return value & _MASK


def _high(value: Tensor) -> Tensor:
    return (value >> 32) & _MASK


def philox4x32_10(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Applies the bijection: ten rounds on a counter of four words under a key of two, int64
    tensors with values in ``[0, 2**32)`` whose shapes broadcast. Returns four such tensors.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(10):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = _high(product1) ^ c1 ^ key0, _low(product1), _high(product0) ^ c3 ^ key1, _low(product0)
        key0 = _low(key0 + 0x9E3779B9)
        key1 = _low(key1 + 0xBB67AE85)
    return c0, c1, c2, c3


def philox(seed: Tensor, sequence: Tensor, item: Tensor, purpose: Purpose, lane: int = 0) -> tuple[Tensor, ...]:
    """Draws four random words, int64 in ``[0, 2**32)``, for every element of the broadcast of
    ``seed``, ``sequence`` (int64, all bits count) and ``item`` (int64 in ``[0, 2**32)``). ``lane``,
    in ``[0, 2**24)``, gives further words for the same purpose.
    """
    last = torch.full_like(item, int(purpose) | lane << 8)
    return philox4x32_10((_low(sequence), _high(sequence), item, last), (_low(seed), _high(seed)))


def uniform_below(high: Tensor, low: Tensor, n: Tensor) -> Tensor:
    """Draws uniform integers in ``[0, n)`` from 64 random bits: the high half of the 128-bit
    product ``(high * 2**32 + low) * n``. ``high`` and ``low`` are int64 words in ``[0, 2**32)``,
    ``n`` int64 in ``[1, 2**63)``.
    """
    n_low, n_high = _low(n), _high(n)
    low_low, low_high, high_low = low * n_low, low * n_high, high * n_low
    carry = _high(_high(low_low) + _low(low_high) + _low(high_low))
    return high * n_high + _high(low_high) + _high(high_low) + carry


def uniform_below32(word: Tensor, n: Tensor | int) -> Tensor:
    """Uniform integers in ``[0, n)`` from one word, n at most ``2**31``: ``word * n >> 32``."""
    return word * n >> 32


def unit(word: Tensor) -> Tensor:
    """Returns a word as a float64 number in ``[0, 1)``: ``word * 2**-32``, exact."""
    return word.to(torch.float64) * 2.0**-32
