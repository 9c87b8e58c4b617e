"""From the raw rows of a step to its normalised views (mose.md section 5, paper section on data augmentation)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mose_fast.ops.augment import MIRROR, apply_views, orient
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters

__all__ = ["RECIPES", "ViewMaker"]

#: Random augmentations by name; ``none`` makes no augmented copies at all.
RECIPES: dict[str, Recipe | None] = {
    "ocm": Recipe(gray_p=0.25, area_low=0.3),
    "simclr": Recipe(mirror_p=0.5, gray_p=0.25, area_low=0.3),
    "scr": Recipe(mirror_p=0.5, gray_p=0.2, area_low=0.2, jitter_p=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "none": None,
}

#: Orientation codes of the fixed copies, by their number: the image; its mirror; each half mirrored or not; these in four quarter turns.
_ORIENTATIONS = {1: (0,), 2: (0, MIRROR), 4: (0, 1, 2, 3), 16: tuple(range(16))}


class ViewMaker:
    """Makes the views of a step: every set of rows is copied in fixed orientations, then all of that once more, randomly augmented.

    Args:
        recipe: Name in :data:`RECIPES`.
        inner_views: Fixed copies of a row: 1, 2, 4 or 16.
        mirror: False where mirroring changes the label: no fixed copies but the image itself, no random mirror.
        mean: Of images in [0, 1], by channel.
        std: Alike.
        jitter_normalised: Colour jitter acts on normalised images, as released.
        device: Where views are made.
    """

    def __init__(
        self,
        recipe: str,
        inner_views: int,
        *,
        mirror: bool,
        mean: Sequence[float],
        std: Sequence[float],
        jitter_normalised: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        drawn = RECIPES[recipe]
        if drawn is not None and not mirror:
            drawn = Recipe(**{**vars(drawn), "mirror_p": 0.0})
        self.recipe = drawn
        self.orientations = _ORIENTATIONS[inner_views if mirror else 1]
        self.jitter_normalised = jitter_normalised
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device)
        self.std = torch.tensor(std, dtype=torch.float32, device=device)

    @property
    def views_per_row(self) -> int:
        """Views made of each row: fixed copies, doubled by the random augmentation unless the recipe is ``none``."""
        return len(self.orientations) * (1 if self.recipe is None else 2)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to normalised float32 [N, 3, H, W]."""
        return (self._unit(images) - self.mean.view(1, 3, 1, 1)) / self.std.view(1, 3, 1, 1)

    def make(self, images: Tensor, sizes: Sequence[int], seed: int, sequence: int) -> tuple[Tensor, Tensor]:
        """All views of a step.

        Args:
            images: uint8 [R, H, W, 3], the rows of all sets, one set after the other.
            sizes: Rows of each set; their sum is R.
            seed: Of the run.
            sequence: Number of this step; the same (seed, sequence) gives the same views on every device.

        Returns:
            views: float32 [V, 3, H, W] with V = R * views_per_row, normalised; a set's views lie together, sets in order: its
                fixed copies, orientation by orientation, then the augmented copies of these.
            rows: int64 [V], the row that each view shows.
        """
        unit = self._unit(images)
        rows = torch.arange(len(images), device=images.device)
        copies = [torch.cat([orient(part, code) for code in self.orientations]) for part in unit.split(list(sizes))]
        copy_rows = [part.repeat(len(self.orientations)) for part in rows.split(list(sizes))]
        views = [(part - self.mean.view(1, 3, 1, 1)) / self.std.view(1, 3, 1, 1) for part in copies]
        if self.recipe is None:
            return torch.cat(views), torch.cat(copy_rows)
        codes, factors = draw_augment_parameters(
            self.recipe, seed, sequence, len(images) * len(self.orientations), images.shape[1], images.shape[2], images.device
        )
        augmented = apply_views(torch.cat(copies), codes, factors, self.mean, self.std, jitter_normalised=self.jitter_normalised)
        interleaved = [x for pair in zip(views, augmented.split([len(part) for part in copies]), strict=True) for x in pair]
        return torch.cat(interleaved), torch.cat([part for part in copy_rows for _ in range(2)])

    def augmented(self, images: Tensor, seed: int, sequence: int) -> Tensor:
        """One randomly augmented view of every image and no other; the images themselves for the recipe ``none``.

        Args:
            images: uint8 [R, H, W, 3].
            seed: Of the run.
            sequence: Number of this step.

        Returns:
            float32 [R, 3, H, W], normalised.
        """
        if self.recipe is None:
            return self.normalise(images)
        codes, factors = draw_augment_parameters(
            self.recipe, seed, sequence, len(images), images.shape[1], images.shape[2], images.device
        )
        return apply_views(self._unit(images), codes, factors, self.mean, self.std, jitter_normalised=self.jitter_normalised)

    @staticmethod
    def _unit(images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2).to(torch.float32).contiguous() / 255
