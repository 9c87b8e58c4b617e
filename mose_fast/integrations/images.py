"""How the image tensors of another library's benchmark become what learners take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.settings.knob import whole_number
from mose_fast.settings.run import ConfigError, shown

# How far a pixel, on the scale of 0 to 255, may lie from a whole number. In float32, normalising
# and undoing it move a pixel by less than 0.001, in float16 by more than this.
_TOLERANCE = 0.01


class Images:
    """Turns the images of a benchmark, channels first, back into raw images. ConfigError: an
    argument is unusable.

    Args:
        image_size: (H, W) of the benchmark's images in pixels.
        mean: Mean by channel, one number or three, that the benchmark's transforms subtract from
            images in [0, 1].
        std: What they divide by then. None, as the mean: images stay in [0, 1].

    Attributes:
        spec: The keywords ``image_size``, ``mean`` and ``std`` for
            :func:`mose_fast.create_learner`: the sides are padded to multiples of 8, and the
            network's input is normalised as in the benchmark, or by 0.5 where it is not.
    """

    def __init__(
        self,
        image_size: tuple[int, int] = (32, 32),
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if not isinstance(image_size, Sequence) or len(image_size) != 2:
            raise ConfigError(f"image_size is {shown(image_size)}; wanted height and width in pixels")
        if (mean is None) != (std is None):
            raise ConfigError(f"mean is {shown(mean)} and std {shown(std)}; wanted both or neither")
        self.image_size = tuple(whole_number("a side of image_size", side) for side in image_size)
        padded = tuple(-(-side // 8) * 8 for side in self.image_size)
        self.spec: dict[str, Any] = {"image_size": padded}
        if mean is not None:
            # A grey image has one of each.
            self.spec |= {"mean": tuple(mean) * (3 if len(mean) == 1 else 1)}
            self.spec |= {"std": tuple(std) * (3 if len(std) == 1 else 1)}
        (height, width), (high, wide) = self.image_size, padded
        top, left = (high - height) // 2, (wide - width) // 2
        self._padding = (left, wide - width - left, top, high - height - top)

    def raw(self, x: Tensor) -> Tensor:
        """Raw images uint8 [B, H, W, 3], sides padded with zeros to multiples of 8, equally on both
        sides (an odd pixel at the bottom or right).

        Args:
            x: [B, 3, H, W], or grey [B, 1, H, W], which becomes three equal channels; uint8, or
                floats that undoing the normalisation makes whole pixels in [0, 255].

        Raises:
            ValueError: Another shape or dtype, or values that are no pixels.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3) or tuple(x.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise ValueError(
                f"x has shape {list(x.shape)}; wanted images [B, 3, {height}, {width}], or grey ones"
                f" [B, 1, {height}, {width}]"
            )
        x = x.expand(-1, 3, -1, -1)
        if x.dtype != torch.uint8:
            x = self._pixels(x)
        return F.pad(x, self._padding).permute(0, 2, 3, 1).contiguous()

    def _pixels(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise ValueError(f"x has dtype {x.dtype}; wanted floats, or uint8")
        mean, std = (x.new_tensor(self.spec.get(k, d), dtype=torch.float32) for k, d in (("mean", [0]), ("std", [1])))
        values = (x.float() * std.view(-1, 1, 1) + mean.view(-1, 1, 1)) * 255
        whole = values.round()
        fits = ((values - whole).abs() <= _TOLERANCE) & (whole >= 0) & (whole <= 255)
        if not fits.all():
            undone = "mean and std are not given" if "mean" not in self.spec else "undone by the given mean and std"
            raise ValueError(
                f"x ({x.dtype}) cannot be turned back into pixels: {undone}, a value is {float(values[~fits][0]):g} of"
                f" 255; wanted whole numbers in [0, 255], to {_TOLERANCE} (mean and std as the benchmark normalises"
                " with, float32, and no transform that changes pixels)"
            )
        return whole.to(torch.uint8)
