"""Batch norm, ReLU and global average pool in plain PyTorch: the definition of the native op."""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.reference.batch_norm import normalised, without_padding


def norm_pool(x: Tensor, state: Tensor | None = None, valid_rows: int | Tensor | None = None) -> Tensor:
    """Computes the mean over the pixels of relu(scale (x - mean) + shift), or of x itself, in
    float32 (float64 for float64), rounded to the dtype of ``x`` once;
    :func:`mose_fast.ops.norm_pool.norm_pool` describes the arguments.
    """
    x = without_padding(x, valid_rows)
    z = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) if state is None else normalised(x, state)
    return without_padding(z.mean(dim=(2, 3)), valid_rows).to(x.dtype)
