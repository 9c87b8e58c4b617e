"""From the raw rows of a step to its normalised views (docs/specification/mose.md section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mose_fast import _dali, _loader
from mose_fast.augment.dali import DaliLayout, DaliViews
from mose_fast.device import Choice, upload
from mose_fast.ops.augment import MIRROR, augment
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters
from mose_fast.settings.run import ConfigError

#: Random augmentations by name; ``none`` makes no augmented copies at all.
RECIPES: dict[str, Recipe | None] = {
    "ocm": Recipe(gray_p=0.25, area_low=0.3),
    "simclr": Recipe(mirror_p=0.5, gray_p=0.25, area_low=0.3),
    "scr": Recipe(
        mirror_p=0.5, gray_p=0.2, area_low=0.2, jitter_p=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1
    ),
    "gsa": Recipe(gray_p=0.2, area_low=0.6),
    "none": None,
}

#: The easy random views of a chain of views (docs/specification/baselines.md section 0.3).
_MILD = Recipe(mirror_p=0.5, area_low=0.6)

#: Orientation codes of the fixed copies, by their number: the image; also its mirror image; each
#: half mirrored or not; these in four quarter turns.
_ORIENTATIONS = {1: (0,), 2: (0, MIRROR), 4: (0, 1, 2, 3), 16: tuple(range(16))}


def choose_feed(wanted: str, device: torch.device, recipe: Recipe | None) -> Choice:
    """The back end that the setting ``feed`` (``auto``, ``dali``, ``fused`` or ``torch``) means on
    a device. Raises ConfigError if DALI is asked for and cannot be used.

    ``auto`` is ``dali`` on CUDA if DALI can be imported, else ``fused``. For recipes with colour
    jitter ``fused`` replaces ``dali``: DALI rotates hues in another colour space (YIQ, not HSV), so
    its pixels would differ.
    """
    if wanted == "auto" and device.type != "cuda":
        return Choice("fused")
    if wanted in ("auto", "dali"):
        obstacle = _dali.obstacle()
        if obstacle and wanted == "dali":
            raise ConfigError(f"feed is 'dali', but {obstacle}; wanted: {_dali.INSTALL}, or feed fused")
        if obstacle:
            return Choice("fused", f"{obstacle}: {_dali.INSTALL}")
        if recipe is not None and recipe.jitter_p > 0:
            return Choice("fused", "not dali, whose colour jitter gives other pixels")
        return Choice("dali")
    return Choice(wanted)


class ViewInputs(NamedTuple):
    """Everything that decides the views of a step, apart from its images: ``rows`` int64 [R], the
    number of each row's image, -1 for padding rows; ``layout``, ``codes`` and ``factors`` for
    :func:`mose_fast.ops.augment.augment`; ``shown`` int64 [V], the row that each view shows.
    """

    rows: Tensor
    layout: Tensor
    codes: Tensor
    factors: Tensor
    shown: Tensor


@lru_cache(maxsize=256)
def _layout_on_host(
    sizes: tuple[int, ...], orientations: tuple[int, ...], augmented: bool, capacity: int
) -> tuple[Tensor, DaliLayout]:
    """``layout`` of :class:`ViewInputs`, padded, and DALI's; cached, so never write to it."""
    entries: list[tuple[int, int, int]] = []
    first, draw = 0, 0
    for size in sizes:
        copies = [(row, code) for code in orientations for row in range(first, first + size)]
        entries += [(row, code, -1) for row, code in copies]
        if augmented:
            entries += [(row, code, draw + i) for i, (row, code) in enumerate(copies)]
        first += size
        draw += len(copies)
    # Padding views show the last row, which is a padding row if there are any.
    padding = (capacity - first) * len(orientations) * (2 if augmented else 1)
    entries += [(capacity - 1, 0, -1)] * padding
    layout = torch.tensor(entries, dtype=torch.int32).reshape(-1, 3)
    return layout, DaliLayout.of(layout, padding)


def _layout(
    sizes: tuple[int, ...], orientations: tuple[int, ...], augmented: bool, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """``rows``, ``layout`` and ``shown`` of :class:`ViewInputs`; cached, so never write to them."""
    layout, _ = _layout_on_host(sizes, orientations, augmented, capacity)
    rows = torch.arange(capacity)
    rows[sum(sizes) :] = -1
    return upload(rows, device), upload(layout, device), upload(layout[:, 0].to(torch.int64), device)


class ViewMaker:
    """Makes the views of a step: fixed copies of every set of rows, then the same copies once more
    with random augmentation; on the images' device, contiguous in channels_last order.

    Args:
        recipe: Name in :data:`RECIPES`.
        inner_views: Fixed copies of a row: 1, 2, 4 or 16.
        mirror: False if mirroring changes the label; then there are no mirrored copies and no
            random mirrors.
        mean, std: Of each channel of images in [0, 1].
        jitter_normalised: Whether colour jitter acts on normalised images, as in the released code.
        feed: What makes the same pixels from the same parameters: ``fused``, the native op
            :func:`mose_fast.ops.augment.augment`; ``torch``, its reference in plain PyTorch; or
            ``dali``, :class:`DaliViews`, which raises ValueError for a recipe with colour jitter.
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
        feed: str = "fused",
    ) -> None:
        drawn = RECIPES[recipe]
        if feed not in ("fused", "torch", "dali"):
            raise ValueError(f"feed is {feed!r}; wanted fused, torch or dali")
        if feed == "dali" and drawn is not None and drawn.jitter_p > 0:
            raise ValueError(
                f"feed is 'dali' for recipe {recipe!r}, whose colour jitter DALI computes otherwise; wanted fused or"
                " torch"
            )
        self.recipe = drawn if drawn is None or mirror else replace(drawn, mirror_p=0.0)
        self._mild = _MILD if mirror else replace(_MILD, mirror_p=0.0)
        self.orientations = _ORIENTATIONS[inner_views if mirror else 1]
        self.jitter_normalised = jitter_normalised
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.feed = feed
        #: Of the views that :meth:`apply` makes.
        self.dtype = torch.float32
        self._dali = DaliViews(self.mean, self.std) if feed == "dali" else None
        # A cache of its own: an upload is ordered by the stream that it was made on, and other
        # runs have other streams.
        self._layout = lru_cache(maxsize=256)(_layout)

    @property
    def views_per_row(self) -> int:
        """Fixed copies of each row, doubled by the random augmentation if there is one."""
        return len(self.orientations) * (1 if self.recipe is None else 2)

    @property
    def apart(self) -> bool:
        """Whether :meth:`views` makes the views, ahead and on a thread of its own."""
        return self._dali is not None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold :meth:`apply`; plain PyTorch waits for the host."""
        return self.feed == "fused" and _loader.gpu() == "cuda" and "augment" not in _loader.off

    def close(self) -> None:
        """Frees DALI's threads and buffers; the next call builds them again."""
        if self._dali is not None:
            self._dali.close()

    def normalise(self, images: Tensor) -> Tensor:
        """Normalises images for evaluations: uint8 [N, H, W, 3] to float32 [N, 3, H, W]."""
        rows = torch.arange(len(images), device=images.device)
        return self._op(images, rows, _plain_layout(len(images), images.device), *_nothing_drawn(images.device))

    def make(self, images: Tensor, sizes: Sequence[int], seed: int, sequence: int) -> tuple[Tensor, Tensor]:
        """Makes all views of a step; the same (seed, sequence) gives the same views on every
        device. ``images`` are uint8 [R, H, W, 3], the rows of all sets, one set after the other,
        ``sizes`` the rows of each set, R in all.

        Returns the views [V, 3, H, W] in :attr:`dtype` (DALI's are float32) with
        V = R * views_per_row, normalised, set by set: its fixed copies, orientation by orientation,
        then their augmented copies; and the row that each view shows, int64 [V].
        """
        return self.views(images, sizes, seed, sequence), self.shown(sizes, len(images), images.device).clone()

    def views(self, images: Tensor, sizes: Sequence[int], seed: int, sequence: int, rows: int | None = None) -> Tensor:
        """The views of :meth:`make` alone, then zero views up to those of ``rows`` rows."""
        rows = len(images) if rows is None else rows
        if self._dali is None:
            images = padded(images, rows)
            return self.apply(images, self.inputs(images, sizes, seed, sequence))
        _, layout = _layout_on_host(tuple(sizes), self.orientations, self.recipe is not None, rows)
        count = sum(sizes) * len(self.orientations)
        codes, _ = self._draw(self.recipe, images, count, seed, sequence, torch.device("cpu"))
        return self._dali(images, layout, codes)

    def shown(self, sizes: Sequence[int], rows: int, device: torch.device) -> Tensor:
        """int64 [V], the row that each view shows. Cached, so never write to it."""
        return self._layout(tuple(sizes), self.orientations, self.recipe is not None, rows, device)[2]

    def inputs(self, images: Tensor, sizes: Sequence[int], seed: int, sequence: int) -> ViewInputs:
        """Everything that :meth:`apply` needs apart from the images, which may be more than the
        sets have rows. The remaining rows are padding: they are never read, and their views, which
        come last, are zero. The other views are the same as without padding.
        """
        rows, layout, shown = self._layout(
            tuple(sizes), self.orientations, self.recipe is not None, len(images), images.device
        )
        count = len(images) * len(self.orientations)
        codes, factors = self._draw(self.recipe, images, count, seed, sequence, images.device)
        return ViewInputs(rows, layout, codes, factors, shown)

    def apply(self, images: Tensor, inputs: ViewInputs) -> Tensor:
        """Makes the normalised views [V, 3, H, W] in :attr:`dtype` that ``inputs`` describes;
        values are computed in float32 and rounded once. Nothing is drawn, so if the feed is
        :attr:`capturable`, a captured graph makes other views when other inputs are copied into the
        same tensors. Raises ValueError if this feed makes views :attr:`apart`.
        """
        if self.apart:
            raise ValueError(f"feed is {self.feed!r}, which makes views apart from the step; wanted them from views()")
        return self._op(images, *inputs[:4], dtype=self.dtype)

    def augmented(self, images: Tensor, seed: int, sequence: int) -> Tensor:
        """Makes one randomly augmented view of every image, uint8 [R, H, W, 3]; for the recipe
        ``none`` the image itself. Returns float32 [R, 3, H, W], normalised.
        """
        return self._augmented(self.recipe, images, 0, seed, sequence)

    def mild(self, images: Tensor, seed: int, sequence: int) -> Tensor:
        """Makes one easy view of every image, whatever the recipe: a crop of at least 0.6 of its
        area, and a random mirror. Arguments and result are those of :meth:`augmented`, whose views
        are drawn independently.
        """
        return self._augmented(self._mild, images, len(images), seed, sequence)

    def _augmented(self, recipe: Recipe | None, images: Tensor, first: int, seed: int, sequence: int) -> Tensor:
        """A view of every image with the parameters that are drawn from number ``first`` on."""
        device = torch.device("cpu") if self.apart else images.device
        layout = _plain_layout(len(images), device)
        if recipe is not None:
            layout[:, 2] = layout[:, 0] + first
        codes, factors = self._draw(recipe, images, first + len(images), seed, sequence, device)
        if self._dali is not None:
            return self._dali(images, DaliLayout.of(layout), codes)
        return self._op(images, torch.arange(len(images), device=device), layout, codes, factors)

    @staticmethod
    def _draw(
        recipe: Recipe | None, images: Tensor, count: int, seed: int, sequence: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        if recipe is None:
            return _nothing_drawn(device)
        return draw_augment_parameters(recipe, seed, sequence, count, *images.shape[1:3], device)

    def _op(self, images: Tensor, *parameters: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        options = {"dtype": dtype, "jitter_normalised": self.jitter_normalised, "plain": self.feed == "torch"}
        return augment([images], *parameters, self.mean, self.std, **options)


def padded(rows: Tensor, count: int) -> Tensor:
    """Images or labels with zeros appended, ``count`` rows in all."""
    return rows if count == len(rows) else torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _nothing_drawn(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(0, 6, dtype=torch.int32, device=device), torch.empty(0, 4, device=device)


def _plain_layout(images: int, device: torch.device) -> Tensor:
    """The layout of this many images, one view each, without change."""
    rows = torch.arange(images, device=device)
    nothing = torch.zeros_like(rows)
    return torch.stack([rows, nothing, nothing - 1], dim=1).to(torch.int32)
