"""Depthwise 3x3 and pointwise 1x1 convolution with the norms around them, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.reference.batch_norm import Norm, norm_state, normalised, without_padding


class AlignedMap(NamedTuple):
    """``y``: a convolution's result before its norm, [N, O, H', W']; ``state``: the state [4, O] of
    that norm, which the next convolution takes as its prologue.
    """

    y: Tensor
    state: Tensor


def align_conv(
    x: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    norm: Norm,
    *,
    stride: int = 1,
    prologue: Tensor | None = None,
    gate: Tensor | None = None,
    valid_rows: int | Tensor | None = None,
) -> AlignedMap:
    """Computes y = pointwise(depthwise(x')) with x' = relu(prologue(x)) sigmoid(up(gate)), without
    the factors that are None, and the state of norm(y).

    Norms, up-sampling and sigmoid are computed in float32 (float64 for float64); x' and y are
    rounded to the type of ``x``, as they are under autocast.
    """
    with torch.autocast(x.device.type, enabled=False):
        given = without_padding(x, valid_rows)
        wide = given if prologue is None else normalised(given, prologue)
        if gate is not None:
            upsampled = F.interpolate(
                without_padding(gate, valid_rows).to(torch.promote_types(gate.dtype, torch.float32)),
                scale_factor=2,
                mode="bilinear",
                align_corners=False,
            )
            wide = wide * upsampled.sigmoid()
        # Once more, because the norm of zero is not zero.
        entered = given if wide is given else without_padding(wide, valid_rows).to(x.dtype)
        m = F.conv2d(entered, depthwise.to(x.dtype), stride=stride, padding=1, groups=x.shape[1])
        y = without_padding(F.conv2d(m, pointwise.to(x.dtype)), valid_rows)
        return AlignedMap(y, norm_state(y, norm, valid_rows))
