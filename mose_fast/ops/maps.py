"""Helpers of the ops over feature maps: memory as the kernels want it, and warnings given once."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor


@functools.cache
def say_once(text: str, stacklevel: int = 4) -> None:
    """Warns with this text the first time, by default at the caller of the op that calls it through
    one function of its own; never while torch.compile traces, which looks into cached functions.
    """
    if not torch.compiler.is_compiling():
        warnings.warn(f"mose_fast: {text}", RuntimeWarning, stacklevel=stacklevel)


def _starts_aligned(x: Tensor) -> bool:
    # A compiled graph's memory has no address yet; the glue refuses it if it is not aligned.
    return torch.compiler.is_compiling() or x.data_ptr() % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """``x`` in channels_last memory aligned to 16 bytes; copied only if it is not."""
    x = x.contiguous(memory_format=torch.channels_last)
    return x if _starts_aligned(x) else x.clone(memory_format=torch.channels_last)


def aligned_row(x: Tensor) -> Tensor:
    """``x`` in contiguous memory from a multiple of 16 bytes, copied only if it is not."""
    x = x.contiguous()
    return x if _starts_aligned(x) else x.clone()


def split_rows(valid_rows: int | Tensor | None) -> tuple[Tensor | None, int | None]:
    """``valid_rows`` as native ops take it: a tensor or None, an int or None."""
    return (valid_rows, None) if isinstance(valid_rows, Tensor) else (None, valid_rows)
