"""OCM's sixteen rotations of an image (docs/specification/baselines.md section 9)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(images: Tensor, count: int = 16) -> Tensor:
    """Rotates images [R, H, W, 3], W even: neither, one or both of the left and right halves by 180
    degrees in place, and the result by 0, 90, 180 and 270 degrees. Only natural images keep their
    labels.

    Returns [count * R, H, W, 3]: all images in one rotation after the other, the first without
    change. ``count`` is 16; 4: without the second rotation; 1: the images alone. Raises ValueError
    if the images are not square and ``count`` is 16, or ``count`` has another value.
    """
    if count == 1:
        return images
    if count not in (4, 16):
        raise ValueError(f"count is {count}; wanted 1, 4 or 16")
    height, width = images.shape[1:3]
    if count == 16 and height != width:
        raise ValueError(f"images have {height}x{width} pixels; wanted square ones, or count 4 or 1")
    left, right = ((half, half.flip(1, 2)) for half in images.chunk(2, dim=2))
    halves = torch.cat([torch.cat([one, other], dim=2) for one in left for other in right])
    return halves if count == 4 else torch.cat([halves.rot90(turns, (1, 2)) for turns in range(4)])
