"""Views of images in plain PyTorch: applies parameters that were drawn before
(docs/specification/mose.md section 5.3).

Everything acts on float images [N, 3, H, W]. An orientation code is an int: bit 0 mirrors the upper
half of the image left-right, bit 1 the lower half (3 is the ordinary mirror), bits 2 and 3 count
quarter turns, counter-clockwise, applied afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

#: Orientation code of the full mirror.
MIRROR = 3

#: Weights of red, green and blue in a grey value (ITU-R BT.601).
GREY_WEIGHTS = (0.299, 0.587, 0.114)


def orient(images: Tensor, code: int) -> Tensor:
    """Turns images into one of the sixteen orientations. Raises ValueError if the code is
    outside 0 to 15, or turns images that are not square.
    """
    if not 0 <= code < 16:
        raise ValueError(f"orientation code is {code}; wanted 0 to 15")
    half = images.shape[2] // 2
    if code & 3 == MIRROR:
        images = images.flip(3)
    elif code & 3:
        upper, lower = images[:, :, :half], images[:, :, half:]
        images = torch.cat([upper.flip(3), lower] if code & 1 else [upper, lower.flip(3)], dim=2)
    turns = code >> 2
    if turns % 2 and images.shape[2] != images.shape[3]:
        raise ValueError(
            f"orientation code {code} turns images of {images.shape[2]}x{images.shape[3]}; wanted square images"
        )
    return images.rot90(turns, dims=(2, 3)) if turns else images


def crop(images: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Crops and resizes images [N, 3, H, W]: samples a window bilinearly at the image's own size,
    with reflection beyond the edge. ``scale`` [N, 2] is the window's width and height as fractions
    of the image's, ``offset`` [N, 2] its centre (x, y) in half image sizes, from the image's
    centre.
    """
    theta = images.new_zeros(len(images), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = scale[:, 0], scale[:, 1], offset
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def grayscale(images: Tensor) -> Tensor:
    """The grey value of each pixel in all three channels."""
    weights = images.new_tensor(GREY_WEIGHTS).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True).expand(-1, 3, -1, -1)


def _to_hsv(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue (the angle in the chromaticity plane, as released) in turns, saturation, value."""
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    turns = torch.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) / (2 * math.pi)
    saturation = torch.where(value == 0, 0, (value - low) / value.masked_fill(value == 0, 1))
    return turns.remainder(1), saturation, value


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    sextant = hue.unsqueeze(1) * 6 + hue.new_tensor([5.0, 3.0, 1.0]).view(1, 3, 1, 1)
    distance = sextant.remainder(6)
    share = torch.minimum(distance, 4 - distance).clamp(0, 1)
    value = value.unsqueeze(1)
    return value - value * saturation.unsqueeze(1) * share


def jitter(images: Tensor, factors: Tensor, contrast_first: Tensor) -> Tensor:
    """Colour jitter of images [N, 3, H, W] in [0, 1], clamped to that range. ``factors`` [N, 4] are
    hue in units of 255/360 turns (as released), then factors of saturation, value and contrast;
    ``contrast_first`` bool [N]: contrast before the others, or after them.
    """

    def contrast(x: Tensor) -> Tensor:
        mean = x.mean(dim=(2, 3), keepdim=True)
        return ((x - mean) * factors[:, 3].view(-1, 1, 1, 1) + mean).clamp(0, 1)

    def colour(x: Tensor) -> Tensor:
        hue, saturation, value = _to_hsv(x)
        hue = (hue + factors[:, 0].view(-1, 1, 1) * (255 / 360)).remainder(1)
        saturation = (saturation * factors[:, 1].view(-1, 1, 1)).clamp(0, 1)
        return _from_hsv(hue, saturation, (value * factors[:, 2].view(-1, 1, 1)).clamp(0, 1))

    first = contrast_first.view(-1, 1, 1, 1)
    return torch.where(first, colour(contrast(images)), contrast(colour(images)))


def apply_views(
    images: Tensor, codes: Tensor, factors: Tensor, mean: Tensor, std: Tensor, *, jitter_normalised: bool = False
) -> Tensor:
    """Augments images, float [N, 3, H, W] in [0, 1], by parameters drawn with
    ``draw_augment_parameters`` and normalises them: mirror, crop, jitter (before normalisation, or
    after it, clamped to [0, 1], as released), normalise, grey.

    Args:
        codes: int32 [N, 6]: mirror, crop width, crop height, offset x, offset y (pixels; offsets
            are in half pixels of the image, see ``crop``), flags (bit 0 grey, bit 1 jitter, bit 2
            contrast first).
        factors: float32 [N, 4], see :func:`jitter`.
        mean, std: float [3], of the channels of images in [0, 1].
    """
    size = images.new_tensor([images.shape[3], images.shape[2]])
    images = torch.where(codes[:, 0].view(-1, 1, 1, 1) != 0, images.flip(3), images)
    images = crop(images, codes[:, 1:3] / size, codes[:, 3:5] / size)
    flags = codes[:, 5]
    jittered = (flags & 2 != 0).view(-1, 1, 1, 1)
    contrast_first = flags & 4 != 0
    if not jitter_normalised:
        images = torch.where(jittered, jitter(images, factors, contrast_first), images)
    images = (images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    if jitter_normalised:
        images = torch.where(jittered, jitter(images, factors, contrast_first), images)
    return torch.where((flags & 1 != 0).view(-1, 1, 1, 1), grayscale(images), images)


def _gather(sources: Sequence[Tensor], rows: Tensor) -> Tensor:
    """uint8 [R, H, W, 3]: the rows of these numbers over all sources; zeros for -1."""
    images = sources[0].new_zeros(len(rows), *sources[0].shape[1:])
    first = 0
    for source in sources:
        inside = (rows >= first) & (rows < first + len(source))
        images[inside] = source[rows[inside] - first]
        first += len(source)
    if len(rows) and not -1 <= rows.min() <= rows.max() < first:
        raise IndexError(
            f"rows holds numbers from {rows.min()} to {rows.max()}; wanted -1 to {first - 1}, the rows of all sources"
        )
    return images


def augment(
    sources: Sequence[Tensor],
    rows: Tensor,
    layout: Tensor,
    codes: Tensor,
    factors: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    jitter_normalised: bool,
    dtype: torch.dtype,
    channels: int,
) -> Tensor:
    """Makes views of rows of uint8 sources; see :func:`mose_fast.ops.augment.augment`. Works in
    float32 and rounds to ``dtype``; in float64 if that is ``dtype``, as the truth that others are
    compared with. Raises IndexError if a number in ``rows`` or ``layout`` is out of range,
    ValueError if an orientation code does not fit.
    """
    gathered = _gather(sources, rows)
    limits = (("positions in rows", 0, len(rows)), ("orientation codes", 0, 16), ("draws", -1, len(codes)))
    for column, (what, low, high) in enumerate(limits):
        outside = (layout[:, column] < low) | (layout[:, column] >= high)
        if outside.any():
            error = ValueError if column == 1 else IndexError
            raise error(f"layout holds {layout[outside, column].tolist()} among its {what}; wanted {low} to {high - 1}")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    images = (gathered.permute(0, 3, 1, 2).to(work).contiguous() / 255)[layout[:, 0].to(torch.int64)]
    for code in layout[:, 1].unique().tolist():
        if code:
            turned = layout[:, 1] == code
            images[turned] = orient(images[turned], code)
    mean_tensor, std_tensor = (
        torch.tensor(numbers, dtype=torch.float32, device=images.device).to(work) for numbers in (mean, std)
    )
    draws = layout[:, 2].to(torch.int64)
    plain, drawn = (draws < 0).nonzero()[:, 0], (draws >= 0).nonzero()[:, 0]
    views = images.new_zeros(len(images), channels, *images.shape[2:]).contiguous(memory_format=torch.channels_last)
    views[plain, :3] = (images[plain] - mean_tensor.view(1, 3, 1, 1)) / std_tensor.view(1, 3, 1, 1)
    if len(drawn):
        parameters = codes[draws[drawn]], factors[draws[drawn]].to(work), mean_tensor, std_tensor
        views[drawn, :3] = apply_views(images[drawn], *parameters, jitter_normalised=jitter_normalised)
    views[rows[layout[:, 0].to(torch.int64)] < 0] = 0
    return views.to(dtype)
