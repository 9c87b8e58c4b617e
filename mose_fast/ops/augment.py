"""A step's views in one pass: rows are gathered from uint8 sources, turned, augmented by drawn
parameters and normalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops.checks import check_choice, check_tensor, require
from mose_fast.reference import augment as reference
from mose_fast.reference.augment import GREY_WEIGHTS, MIRROR, orient

__all__ = ["GREY_WEIGHTS", "MIRROR", "augment", "orient"]

_MAX_SOURCES, _MAX_SIDE = 4, 1024
_DTYPES = (torch.float32, torch.bfloat16)


def _check_sources(sources: Sequence[Tensor]) -> None:
    if not 1 <= len(sources) <= _MAX_SOURCES:
        raise ValueError(f"sources has {len(sources)} tensors; wanted 1 to {_MAX_SOURCES}")
    for i, source in enumerate(sources):
        name = f"sources[{i}]"
        check_tensor(name, source, (torch.uint8,), ("rows", "H", "W", 3), beside=("sources[0]", sources[0]))
        if source.shape[1:] != sources[0].shape[1:]:
            raise ValueError(
                f"{name} has shape {tuple(source.shape)}; wanted images like those of sources[0],"
                f" {tuple(sources[0].shape)}"
            )
    height, width = sources[0].shape[1:3]
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE):
        raise ValueError(f"sources hold images of {height}x{width} pixels; wanted sides of 1 to {_MAX_SIDE}")


def augment(
    sources: Sequence[Tensor],
    rows: Tensor,
    layout: Tensor,
    codes: Tensor,
    factors: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    jitter_normalised: bool = False,
    dtype: torch.dtype = torch.float32,
    channels: int = 3,
    plain: bool = False,
) -> Tensor:
    """Makes views of images: one launch on CUDA, one pass over the views on the CPU.

    Each view shows one row in one of sixteen fixed orientations. If it has drawn parameters, it is
    then mirrored, cropped and resized (bilinear, reflection at the borders), colour-jittered
    (before normalisation, or after it as released), normalised and made grey, as they say; else it
    is only normalised. The same in PyTorch::

        images = torch.cat(sources)[rows][layout[:, 0]].permute(0, 3, 1, 2) / 255
        images = orient(images, layout[:, 1])
        views = apply_views(images, codes[layout[:, 2]], factors[layout[:, 2]], mean, std)

    Arithmetic is float32, whatever autocast says, rounded once to ``dtype``. Nothing is
    differentiated. Before that rounding, native code is within 1e-5 (1 + abs(value)) of
    :func:`mose_fast.reference.augment.augment` in float64. The reference in float32, which serves
    where there is no native code and with ``plain``, is within max(1e-5, 2**-21 side / std)
    (1 + abs(value)), with the longer side and the smallest std: PyTorch rounds the positions at
    which a crop samples by a few units in the last place of the side, and from pixel to pixel a
    normalised value changes by up to 1 / std.

    Args:
        sources: 1 to 4 tensors uint8 [rows, H, W, 3] on one device, such as stream buffer and
            replay memory; H, W up to 1,024.
        rows: int64 [R], the step's rows, numbered through all sources, those of the first source
            first; -1: padding.
        layout: int32 [V, 3], what each view shows: position in ``rows``, orientation code
            (:func:`mose_fast.reference.augment.orient`), row of ``codes`` and ``factors`` or -1 for
            a view that is not augmented.
        codes: int32 [D, 6] from :func:`mose_fast.ops.augment_parameters.draw_augment_parameters`.
        factors: float32 [D, 4] from the same call.
        mean: Mean of each of the 3 channels of images in [0, 1].
        std: Standard deviation of each channel.
        jitter_normalised: Jitter normalised images, clamping them to [0, 1].
        dtype: float32 or bfloat16.
        channels: 3, or 4 or 8 for channels of zeros behind the three.
        plain: Use plain PyTorch, also where there is native code.

    Returns:
        ``dtype`` [V, channels, H, W], contiguous in channels_last order. Views of padding are zero.

    Raises:
        TypeError: A dtype is not the one above.
        ValueError: A shape, a device, an orientation code or ``channels`` does not fit.
        IndexError: A number in ``rows`` or ``layout`` is out of range. On CUDA, where looking would
            wait for the GPU, such a view is all NaN instead, and so is every loss computed from
            it.

    Source: docs/specification/mose.md section 5.3.
    """
    _check_sources(sources)
    beside = ("sources[0]", sources[0])
    check_tensor("rows", rows, (torch.int64,), ("n",), beside=beside)
    check_tensor("layout", layout, (torch.int32,), ("n", 3), beside=beside)
    check_tensor("codes", codes, (torch.int32,), ("n", 6), beside=beside)
    check_tensor("factors", factors, (torch.float32,), ("n", 4), beside=beside)
    if len(codes) != len(factors):
        raise ValueError(
            f"codes has shape {tuple(codes.shape)} and factors {tuple(factors.shape)}; wanted as many rows in both"
        )
    for name, numbers in (("mean", mean), ("std", std)):
        require(len(numbers) == 3, name, numbers, "3 numbers")
    if dtype not in _DTYPES:
        raise TypeError(f"dtype is {dtype}; wanted float32 or bfloat16")
    check_choice("channels", channels, (3, 4, 8))
    arguments = (list(sources), rows, layout, codes, factors, list(mean), list(std), jitter_normalised, dtype)
    if plain or not _loader.serves("augment", sources[0]):
        return reference.augment(*arguments, channels)
    views = _loader.ops().augment(*arguments)
    if channels == 3:
        return views
    wide = _new_views(sources, layout, channels, dtype).zero_()
    wide[:, :3] = views
    return wide


def _new_views(sources: Sequence[Tensor], layout: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    height, width = sources[0].shape[1:3]
    return sources[0].new_empty(layout.shape[0], height, width, channels, dtype=dtype).permute(0, 3, 1, 2)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::augment")
    def _fake(sources, rows, layout, codes, factors, mean, std, jitter_normalised, dtype):
        return _new_views(sources, layout, 3, dtype)
