"""The random parameters of augmented views in PyTorch: the definition of
``csrc/core/augment_parameters.h``.

The order of the float64 operations is part of the definition. PyTorch rounds after every operation,
as the native code does; constants are combined with tensors by ``+``, ``-`` and ``*`` only, because
CUDA's PyTorch divides by a constant through its reciprocal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mose_fast.reference.philox import Purpose, philox, uniform_below32, unit

#: Bits of the flags.
GRAY, JITTER, CONTRAST_FIRST = 1, 2, 4

_LOG_RATIO = -0.2876820724517809  # log(3/4) = -log(4/3)
_FIRST_LANE = 2
_TRIALS = 10


@dataclass(frozen=True)
class Recipe:
    """Probabilities and ranges from which views are drawn (docs/specification/mose.md section 5.3;
    SCR's and SimCLR's augmentations): ``_p`` are probabilities, ``area_`` the smallest and largest
    share of the image's area that a crop covers (1: no crop), the others half widths of jitter
    factors around 1, of the hue's shift around 0.
    """

    mirror_p: float = 0.0
    gray_p: float = 0.0
    area_low: float = 1.0
    area_high: float = 1.0
    jitter_p: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0


def exponential(x: Tensor) -> Tensor:
    """exp(x) for |x| <= 0.3, float64, within 2 ulp: Taylor polynomial of degree 13 by Horner."""
    p = torch.full_like(x, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        p = p * x + 1.0 / math.factorial(k)
    return p


def _draw_crops(recipe: Recipe, seed: Tensor, sequence: Tensor, items: Tensor, height: int, width: int) -> Tensor:
    """int64 [4, count]: width, height, offset_x, offset_y of each crop, in pixels."""
    crops = torch.tensor([width, height, 0, 0], device=items.device)[:, None].repeat(1, len(items))
    if recipe.area_low >= 1:
        return crops
    found = torch.zeros_like(items, dtype=torch.bool)
    pixels = float(height) * float(width)
    for trial in range(_TRIALS):
        words = philox(seed, sequence, items, Purpose.VIEW, _FIRST_LANE + trial)
        area = (recipe.area_low + (recipe.area_high - recipe.area_low) * unit(words[0])) * pixels
        ratio = exponential(_LOG_RATIO + (-_LOG_RATIO - _LOG_RATIO) * unit(words[1]))
        w = torch.floor(torch.sqrt(area * ratio) + 0.5).to(torch.int64)
        h = torch.floor(torch.sqrt(area / ratio) + 0.5).to(torch.int64)
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        offset_x = uniform_below32(words[2], 2 * (width - w) + 1) - (width - w)
        offset_y = uniform_below32(words[3], 2 * (height - h) + 1) - (height - h)
        crops = torch.where(fits & ~found, torch.stack([w, h, offset_x, offset_y]), crops)
        found |= fits
    return crops


def draw_augment_parameters(
    recipe: Recipe, seed: int, sequence: int | Tensor, count: int, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """See :func:`mose_fast.ops.augment_parameters.draw_augment_parameters`."""
    key = torch.tensor(seed, device=device)
    step = torch.as_tensor(sequence, device=device).reshape(())
    items = torch.arange(count, device=device)
    words = philox(key, step, items, Purpose.VIEW, 0)
    mirror = unit(words[0]) < recipe.mirror_p
    gray = unit(words[1]) < recipe.gray_p
    jitter = unit(words[2]) < recipe.jitter_p
    contrast_first = words[3] >> 31
    flags = GRAY * gray.to(torch.int64) + JITTER * jitter.to(torch.int64) + CONTRAST_FIRST * contrast_first
    crops = _draw_crops(recipe, key, step, items, height, width)
    codes = torch.stack([mirror.to(torch.int64), *crops, flags], dim=1).to(torch.int32)

    hue, saturation, value, contrast = (2.0 * unit(word) - 1.0 for word in philox(key, step, items, Purpose.VIEW, 1))
    around_one = ((saturation, recipe.saturation), (value, recipe.brightness), (contrast, recipe.contrast))
    drawn = torch.stack([hue * recipe.hue, *(1.0 + number * width for number, width in around_one)], dim=1)
    neutral = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64, device=device)
    factors = torch.where(jitter[:, None], drawn, neutral).to(torch.float32)
    return codes, factors
