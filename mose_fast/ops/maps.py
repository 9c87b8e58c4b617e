"""What ops over feature maps share: memory as the kernels want it, and warnings that are given
once.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

__all__ = ["aligned", "aligned_row", "say_once"]


@functools.cache
def say_once(text: str, stacklevel: int = 4) -> None:
    """Warns with this text the first time; by default at the caller of the op that calls it through
    one function of its own.
    """
    warnings.warn(f"mose_fast: {text}", RuntimeWarning, stacklevel=stacklevel)


def aligned(x: Tensor) -> Tensor:
    """``x`` in channels_last memory from a multiple of 16 bytes; itself where it is that
    already.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.channels_last)


def aligned_row(x: Tensor) -> Tensor:
    """``x``, which is no map, in a row from a multiple of 16 bytes; itself where it is that
    already.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
