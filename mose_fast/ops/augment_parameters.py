"""The random parameters of augmented views, drawn once per image and the same on every device; back
ends only apply them.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.reference import augment_parameters as reference
from mose_fast.reference.augment_parameters import CONTRAST_FIRST, GRAY, JITTER, Recipe

__all__ = ["CONTRAST_FIRST", "GRAY", "JITTER", "Recipe", "draw_augment_parameters"]

_BELOW = 2**63


def _check(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise ValueError(f"{name} is {value!r}; wanted an integer from {low} to {high - 1}")


def _check_recipe(recipe: Recipe) -> None:
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"recipe.{field.name} is {value!r}; wanted a number of at least 0")
        if field.name.endswith("_p") and value > 1:
            raise ValueError(f"recipe.{field.name} is {value!r}; wanted a probability in [0, 1]")
    if recipe.area_low > recipe.area_high:
        raise ValueError(f"recipe.area_low is {recipe.area_low!r}; wanted at most area_high, {recipe.area_high!r}")


def _check_counter(counter: Tensor, device: torch.device) -> None:
    if not isinstance(counter, Tensor) or counter.dtype != torch.int64:
        raise TypeError(f"counter is {counter!r}; wanted a torch.Tensor of int64")
    if counter.numel() != 1:
        raise ValueError(f"counter has shape {tuple(counter.shape)}; wanted one element")
    if counter.device.type != device.type or device.index not in (None, counter.device.index):
        raise ValueError(f"counter is on {counter.device}; wanted {device}, where the parameters are drawn")


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

    Crops: up to ten trials; area uniform in the recipe's share of the image, log aspect ratio
    uniform in (log 3/4, log 4/3), both sides rounded to pixels; the first trial inside the image
    counts, else the whole image. Offsets are uniform integers.

    Args:
        recipe: Probabilities and ranges.
        seed: Of the run, in [0, 2**63).
        sequence: Number of this draw, in [0, 2**63); the same (seed, sequence) gives the same
        views.
        count: Views, below 2**32.
        height: Pixels.
        width: Pixels.
        device: Where the parameters are drawn and returned.
        counter: None, or int64 of one element on ``device``, at least 0: its value is added to
            ``sequence``, then it is advanced by 1 in place. So a captured CUDA graph draws other
            views at each replay, the same as calls outside a graph would.

    Returns:
        codes: int32 [count, 6]: mirror (0 or 1), crop width, crop height, offset x, offset y in
            pixels, flags (:data:`GRAY`, :data:`JITTER`, :data:`CONTRAST_FIRST`: contrast before
            hue, saturation and value; without meaning unless jittered). Offsets lie in [width - W,
            W - width] and alike: twice the distance from the image's centre to the crop's, so that
            offset / W is the centre in half image sizes.
        factors: float32 [count, 4]: hue (units of the released code), saturation, value, contrast;
            0, 1, 1, 1 where not jittered.

    Raises:
        TypeError: ``counter`` is not int64.
        ValueError: A number or a field of the recipe is outside its range; ``counter`` has another
            shape or device.
    """
    _check_recipe(recipe)
    _check("seed", seed, 0, _BELOW)
    _check("sequence", sequence, 0, _BELOW)
    _check("count", count, 0, 2**32)
    _check("height", height, 1, 2**30)
    _check("width", width, 1, 2**30)
    device = torch.device(device)
    if counter is not None:
        _check_counter(counter, device)
        device = counter.device
    arguments = (
        [float(x) for x in dataclasses.astuple(recipe)],
        seed,
        sequence,
        count,
        height,
        width,
        str(device),
        counter,
    )
    if not _loader.serves(torch.empty(0, device=device)):
        first = sequence if counter is None else sequence + counter
        drawn = reference.draw_augment_parameters(recipe, seed, first, count, height, width, device)
        if counter is not None:
            counter += 1
        return drawn
    if torch.compiler.is_compiling():
        return torch.ops.mose_fast.augment_parameters(*arguments)
    return _loader.native.augment_parameters(*arguments)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::augment_parameters")
    def _fake(recipe, seed, sequence, count, height, width, device, counter=None):
        codes = torch.empty(count, 6, dtype=torch.int32, device=device)
        return codes, torch.empty(count, 4, dtype=torch.float32, device=device)
