"""The augmentation of DER++ and of most offline methods: a crop of the padded image, mirrored or
not (docs/specification/baselines.md section 12).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.ops.draws import Purpose, random_words, uniform_below32, unit

# Black pixels on every side.
_PADDING = 4


def pad_crop(images: Tensor, seed: int, sequence: int, *, mirror: bool, brightness: float = 0.0) -> Tensor:
    """Surrounds each image of uint8 [N, H, W, 3] by four black pixels on every side and cuts
    out a window of its own size at a uniformly drawn place.

    Args:
        mirror: Whether to mirror each image with probability 1/2.
        brightness: Each view's values are multiplied by a number drawn uniformly between 1 minus
            and 1 plus this one, then cut to 0 to 255 and rounded down.
    """
    count, height, width, _ = images.shape
    device = images.device
    right, down, side, light = random_words(seed, sequence, count, Purpose.SHIFT, device)
    places = 2 * _PADDING + 1
    columns = uniform_below32(right, places)[:, None] + torch.arange(width, device=device)
    if mirror:
        columns = torch.where((side >= 2**31)[:, None], columns.flip(1), columns)
    rows = uniform_below32(down, places)[:, None] + torch.arange(height, device=device)
    padded = F.pad(images, (0, 0, *[_PADDING] * 4))
    views = padded[torch.arange(count, device=device)[:, None, None], rows[:, :, None], columns[:, None, :]]
    if brightness:
        factors = 1 + brightness * (2 * unit(light) - 1)
        views = (views * factors.view(-1, 1, 1, 1)).clamp(0, 255).to(torch.uint8)
    return views
