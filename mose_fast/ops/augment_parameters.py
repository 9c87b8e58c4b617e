"""The random parameters of augmented views, drawn once per image, the same on every device."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops.checks import check_integer, check_tensor, require
from mose_fast.reference import augment_parameters as reference
from mose_fast.reference.augment_parameters import CONTRAST_FIRST, GRAY, JITTER, Recipe

__all__ = ["CONTRAST_FIRST", "GRAY", "JITTER", "Recipe", "draw_augment_parameters"]


def _check_recipe(recipe: Recipe) -> None:
    for field in dataclasses.fields(recipe):
        name, value = f"recipe.{field.name}", getattr(recipe, field.name)
        fits = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
        require(fits, name, value, "a number of at least 0")
        require(value <= 1 or not name.endswith("_p"), name, value, "a probability in [0, 1]")
    low, high = recipe.area_low, recipe.area_high
    require(low <= high, "recipe.area_low", low, f"at most area_high, {high!r}")


def draw_augment_parameters(
    recipe: Recipe,
    seed: int,
    sequence: int,
    count: int,
    height: int,
    width: int,
    device: torch.device | str = "cpu",
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one view's parameters for each of ``count`` images of ``height`` x ``width`` pixels.

    A crop has up to ten trials: its area is uniform in the recipe's share of the image, its log
    aspect ratio uniform in (log 3/4, log 4/3), both sides are rounded to pixels, and the first
    trial that lies inside the image is taken, else the whole image. Offsets are uniform integers.

    Args:
        recipe: Probabilities and ranges.
        seed: The run's seed, in [0, 2**63).
        sequence: The number of this draw, in [0, 2**63); the same (seed, sequence) gives the same
            views.
        count: The number of views, below 2**32.
        height: The images' height in pixels.
        width: The images' width in pixels.
        device: Where the parameters are drawn and returned.
        counter: None, or int64 of one element on ``device``, at least 0: its value is added to
            ``sequence``, then it is advanced by 1 in place. So a captured CUDA graph draws other
            views at each replay, the same as calls outside a graph would.

    Returns:
        codes: int32 [count, 6]: mirror (0 or 1), crop width w, crop height h, offset x, offset y in
            pixels, flags (:data:`GRAY`, :data:`JITTER`, :data:`CONTRAST_FIRST`: contrast before
            hue, saturation and value; without meaning unless jittered). Offset x lies in [w -
            width, width - w], offset y in [h - height, height - h]: twice the distance from the
            image's centre to the crop's, so that offset x / width is the centre in half images.
        factors: float32 [count, 4]: hue (units of the released code), saturation, value, contrast;
            0, 1, 1, 1 where not jittered.

    Raises:
        TypeError: ``counter`` is not int64.
        ValueError: A number or a field of the recipe is outside its range; ``counter`` has another
            shape or device.

    Source: docs/specification/mose.md section 5.3; mose_fast/reference/augment_parameters.py.
    """
    _check_recipe(recipe)
    check_integer("seed", seed, 0, 2**63 - 1)
    check_integer("sequence", sequence, 0, 2**63 - 1)
    check_integer("count", count, 0, 2**32 - 1)
    check_integer("height", height, 1, 2**30 - 1)
    check_integer("width", width, 1, 2**30 - 1)
    device = torch.device(device)
    if counter is not None:
        check_tensor("counter", counter, (torch.int64,))
        if counter.numel() != 1:
            raise ValueError(f"counter has shape {tuple(counter.shape)}; wanted one element")
        if counter.device.type != device.type or device.index not in (None, counter.device.index):
            raise ValueError(f"counter is on {counter.device}; wanted {device}, where the parameters are drawn")
        device = counter.device
    if not _loader.serves("augment_parameters", torch.empty(0, device=device)):
        first = sequence if counter is None else sequence + counter
        drawn = reference.draw_augment_parameters(recipe, seed, first, count, height, width, device)
        if counter is not None:
            counter += 1
        return drawn
    numbers = [float(x) for x in dataclasses.astuple(recipe)]
    return _loader.ops().augment_parameters(numbers, seed, sequence, count, height, width, str(device), counter)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::augment_parameters")
    def _fake(recipe, seed, sequence, count, height, width, device, counter=None):
        codes = torch.empty(count, 6, dtype=torch.int32, device=device)
        return codes, torch.empty(count, 4, dtype=torch.float32, device=device)
