"""Views: orientations, the order of copies, recipes and the path from uint8 to normalised
floats.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mose_fast.augment import RECIPES, ViewMaker
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters
from mose_fast.reference import augment

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def images(n: int = 3, size: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def maker(recipe: str = "ocm", inner: int = 2, mirror: bool = True, **options) -> ViewMaker:
    return ViewMaker(recipe, inner, mirror=mirror, mean=MEAN, std=STD, **options)


def normalised(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(((x / 255 - np.array(MEAN)) / np.array(STD)).astype(np.float32)).permute(0, 3, 1, 2)


def test_orientations_against_numpy():
    x = images()
    chw = x.permute(0, 3, 1, 2)
    for code in range(16):
        expected = x.numpy().copy()
        if code & 1:
            expected[:, :8] = expected[:, :8, ::-1]
        if code & 2:
            expected[:, 8:] = expected[:, 8:, ::-1]
        expected = np.rot90(expected, code >> 2, axes=(1, 2))
        assert np.array_equal(augment.orient(chw, code).permute(0, 2, 3, 1).numpy(), expected)
    assert len({augment.orient(chw, code).numpy().tobytes() for code in range(16)}) == 16


def test_orientations_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="16"):
        augment.orient(torch.rand(1, 3, 8, 8), 16)
    with pytest.raises(ValueError, match="8x16"):
        augment.orient(torch.rand(1, 3, 8, 16), 4)


@pytest.mark.parametrize(
    ("inner", "mirror", "codes"),
    [(1, True, [0]), (2, True, [0, 3]), (4, True, [0, 1, 2, 3]), (2, False, [0]), (16, False, [0])],
)
def test_order_of_the_views(inner, mirror, codes):
    """Two sets: each set's fixed copies, orientation by orientation, then as many augmented ones,
    before the next set begins.
    """
    x = images(5)
    views, rows = maker(inner=inner, mirror=mirror).make(x, (3, 2), seed=1, sequence=0)
    assert len(views) == 5 * len(codes) * 2 == 5 * maker(inner=inner, mirror=mirror).views_per_row
    start = 0
    for part in (range(3), range(3, 5)):
        block = [row for _ in codes for row in part]
        assert rows[start : start + 2 * len(block)].tolist() == block * 2
        fixed = torch.cat([augment.orient(x[list(part)].permute(0, 3, 1, 2), code) for code in codes])
        torch.testing.assert_close(
            views[start : start + len(block)], normalised(fixed.permute(0, 2, 3, 1).numpy()), rtol=0, atol=1e-5
        )
        start += 2 * len(block)


def test_an_empty_set_has_no_views():
    views, rows = maker().make(images(4), (4, 0), seed=1, sequence=0)
    assert len(views) == len(rows) == 16
    views, rows = maker().make(images(4), (0, 4), seed=1, sequence=0)
    assert len(views) == len(rows) == 16


def test_recipe_none_makes_no_augmented_copies():
    views, rows = maker("none").make(images(2), (2,), seed=1, sequence=0)
    assert rows.tolist() == [0, 1, 0, 1]
    assert torch.equal(views[2:], views[:2].flip(3))


def test_views_depend_on_seed_and_sequence_alone():
    x = images(8)
    first = maker("scr").make(x, (8,), seed=1, sequence=5)[0]
    assert torch.equal(first, maker("scr").make(x, (8,), seed=1, sequence=5)[0])
    for seed, sequence in ((2, 5), (1, 6)):
        assert not torch.equal(first, maker("scr").make(x, (8,), seed=seed, sequence=sequence)[0])


def test_input_is_not_written():
    x = images(4)
    before = x.clone()
    maker("scr").make(x, (4,), seed=1, sequence=0)
    assert torch.equal(x, before)


def test_shares_of_the_recipes():
    """Grey and mirrored views occur as often as the recipe says, within 4 standard errors."""
    n = 4000
    x = images(1, size=8).expand(n, 8, 8, 3)
    for name, gray, mirror in (("ocm", 0.25, 0.0), ("simclr", 0.25, 0.5), ("scr", 0.2, 0.5), ("gsa", 0.2, 0.0)):
        # Identity normalisation, so that grey views have three equal channels.
        views = ViewMaker(name, 1, mirror=True, mean=(0, 0, 0), std=(1, 1, 1)).make(x, (n,), seed=3, sequence=0)[0][n:]
        grey = (views.amax(1) - views.amin(1)).amax((1, 2)) < 1e-6
        assert abs(grey.float().mean().item() - gray) < 4 * (gray * (1 - gray) / n) ** 0.5
        assert RECIPES[name].mirror_p == mirror


def test_ocm_never_mirrors_and_simclr_mirrors_half():
    """A left-to-right ramp stays one under any crop; a mirror turns it around."""
    n = 2000
    ramp = torch.arange(0, 256, 8, dtype=torch.uint8).view(1, 1, 32, 1).expand(n, 32, 32, 3)
    for name, share in (("ocm", 0.0), ("simclr", 0.5)):
        views = maker(name, inner=1).make(ramp, (n,), seed=3, sequence=0)[0][n:]
        mirrored = (views[:, 0, 16, 4] > views[:, 0, 16, 27]).float().mean().item()
        assert abs(mirrored - share) <= 4 * (share * (1 - share) / n) ** 0.5


def test_without_mirroring_no_view_is_mirrored():
    n = 500
    ramp = torch.arange(0, 256, 8, dtype=torch.uint8).view(1, 1, 32, 1).expand(n, 32, 32, 3)
    views = maker("simclr", inner=2, mirror=False).make(ramp, (n,), seed=3, sequence=0)[0]
    assert (views[:, 0, 16, 4] < views[:, 0, 16, 27]).all()


def test_jitter_by_hand():
    """Pure red: a third of a turn makes it green; saturation 0.5 makes it pink; value 0.5 halves
    it; contrast 0 gives the channel means.
    """
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    no = torch.tensor([False])

    def pixel(
        hue: float = 0, saturation: float = 1, value: float = 1, contrast: float = 1, x: torch.Tensor = red
    ) -> list[float]:
        return augment.jitter(x, torch.tensor([[hue, saturation, value, contrast]]), no)[0, :, 0, 0].tolist()

    assert pixel() == pytest.approx([1, 0, 0], abs=1e-6)
    assert pixel(hue=360 / 255 / 3) == pytest.approx([0, 1, 0], abs=1e-5)
    assert pixel(saturation=0.5) == pytest.approx([1, 0.5, 0.5], abs=1e-6)
    assert pixel(value=0.5) == pytest.approx([0.5, 0, 0], abs=1e-6)
    half = red.clone()
    half[..., 1] = 0
    assert pixel(contrast=0, x=half) == pytest.approx([0.5, 0, 0], abs=1e-6)


def test_jitter_before_normalisation_and_as_released():
    """The released jitter clamps normalised values to [0, 1], so dark pixels, which normalise below
    0, become 0 in every channel.
    """
    n = 400
    dark = torch.full((n, 8, 8, 3), 20, dtype=torch.uint8)
    released = maker("scr", inner=1, jitter_normalised=True).make(dark, (n,), seed=0, sequence=0)[0][n:]
    clean = maker("scr", inner=1).make(dark, (n,), seed=0, sequence=0)[0][n:]
    clamped = (released.abs().amax((1, 2, 3)) == 0).float().mean().item()
    assert abs(clamped - 0.8) < 4 * (0.8 * 0.2 / n) ** 0.5
    assert (clean < 0).any(dim=3).any(dim=2).any(dim=1).all()


@pytest.mark.parametrize("mirror", [True, False])
def test_mild_views_are_large_crops_drawn_apart_from_the_recipe_s(mirror):
    """Draws with the numbers after those of the recipe's views, applied by the reference."""
    x, recipe = images(200), Recipe(mirror_p=0.5 if mirror else 0.0, area_low=0.6)
    codes, factors = (part[200:] for part in draw_augment_parameters(recipe, 3, 4, 400, 16, 16, x.device))
    # A side is rounded to whole pixels.
    assert (codes[:, 1] * codes[:, 2]).min() >= 0.6 * 16 * 16 - 16 and codes[:, 0].any() == mirror
    pixels = x.permute(0, 3, 1, 2).double() / 255
    wanted = augment.apply_views(pixels, codes, factors.double(), *(torch.tensor(n).double() for n in (MEAN, STD)))
    views = maker("scr", mirror=mirror).mild(x, 3, 4)
    torch.testing.assert_close(views, wanted.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(views, maker("none", mirror=mirror).mild(x, 3, 4))
