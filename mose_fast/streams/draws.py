"""Random orders of a stream's images and classes, and the error of unusable data."""

from __future__ import annotations

import numpy as np

from mose_fast.errors import MoseFastError
from mose_fast.settings.knob import plain, shown


class StreamError(MoseFastError, ValueError):
    """Unusable data; the message names the file or argument, what it was and what was wanted."""


def draw_words(n: int, seed: int, purpose: int) -> np.ndarray:
    """Draws random words, uint64 [n], that depend on the three arguments alone.

    They are the raw words of the counter-based generator Philox4x64-10 with key (seed, purpose).
    numpy keeps the raw words of its bit generators across versions, which it does not promise for
    ``Generator.permutation``. Raises StreamError if the seed is no integer, or does not fit into
    64 bits.
    """
    given, seed = seed, plain(seed)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise StreamError(f"seed is {shown(given)}; wanted an integer from 0 to 2**64 - 1")
    return np.random.Philox(key=np.array([seed, purpose], np.uint64)).random_raw(n)


def draw_order(n: int, seed: int, purpose: int) -> np.ndarray:
    """Draws a permutation of ``n``, int64 [n], by sorting :func:`draw_words`."""
    return np.argsort(draw_words(n, seed, purpose), kind="stable")
