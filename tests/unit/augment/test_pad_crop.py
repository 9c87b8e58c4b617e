"""The padded crop against a loop over images, and the law of its offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy import stats

from mose_fast.augment.pad_crop import pad_crop
from mose_fast.ops.draws import Purpose, permutation, random_words, unit


def numbered(count: int, size: int = 16) -> torch.Tensor:
    """Images whose red is the row, green the column, both from 1, and blue the image."""
    images = torch.empty(count, size, size, 3, dtype=torch.uint8)
    images[..., 0] = torch.arange(1, size + 1)[None, :, None]
    images[..., 1] = torch.arange(1, size + 1)[None, None, :]
    images[..., 2] = torch.arange(count)[:, None, None] % 256
    return images


def places(cropped: torch.Tensor) -> list[tuple[int, int, bool]]:
    """(down, right, mirrored) of every crop of :func:`numbered`, read from its centre."""
    middle = cropped.shape[1] // 2
    down = cropped[:, middle, middle, 0].int() - middle - 1
    step = cropped[:, middle, middle + 1, 1].int() - cropped[:, middle, middle, 1].int()
    left = (
        torch.where(
            step > 0, cropped[:, middle, middle, 1].int() - middle, cropped[:, middle, middle, 1].int() - middle + 1
        )
        - 1
    )
    return list(zip(down.tolist(), left.tolist(), (step < 0).tolist(), strict=True))


def test_equals_numpy_image_by_image():
    images = numbered(40)
    cropped = pad_crop(images, 7, 3, mirror=True)
    for image, crop, (down, right, mirrored) in zip(images.numpy(), cropped.numpy(), places(cropped), strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        wanted = padded[4 + down : 20 + down, 4 + right : 20 + right]
        assert np.array_equal(crop, wanted[:, ::-1] if mirrored else wanted)


def test_offsets_are_uniform_and_mirrors_even():
    found = np.array(places(pad_crop(numbered(9000), 1, 2, mirror=True)))
    for column in (0, 1):
        counts = np.unique(found[:, column], return_counts=True)
        assert counts[0].tolist() == list(range(-4, 5)) and stats.chisquare(counts[1]).pvalue > 1e-4
    assert 4300 < found[:, 2].sum() < 4700
    assert abs(np.corrcoef(found.T)[np.triu_indices(3, 1)]).max() < 0.05


def test_where_mirroring_changes_labels_nothing_is_mirrored():
    found = places(pad_crop(numbered(200), 1, 2, mirror=False))
    assert not any(mirrored for *_, mirrored in found)


def test_the_same_step_gives_the_same_crops():
    images = numbered(20)
    assert torch.equal(pad_crop(images, 1, 2, mirror=True), pad_crop(images, 1, 2, mirror=True))
    assert not torch.equal(pad_crop(images, 1, 2, mirror=True), pad_crop(images, 1, 3, mirror=True))
    assert not torch.equal(pad_crop(images, 1, 2, mirror=True), pad_crop(images, 2, 2, mirror=True))


@pytest.mark.slow
def test_permutations_are_uniform():
    drawn = np.array([permutation(5, step, 4, Purpose.REVIEW).tolist() for step in range(6000)])
    assert (np.sort(drawn, axis=1) == np.arange(4)).all()
    assert stats.chisquare(np.unique(drawn, axis=0, return_counts=True)[1]).pvalue > 1e-4
    assert len(np.unique(drawn, axis=0)) == 24


def test_brightness_is_that_of_pillow():
    """One factor for each image, between 1 - 0.3 and 1 + 0.3, after the crop that it has without
    it; rounded as torchvision's ColorJitter does on Pillow's images.
    """
    images = torch.randint(0, 256, (200, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain, changed = (pad_crop(images, 5, 1, mirror=True, brightness=b) for b in (0.0, 0.3))
    factors = 1 + 0.3 * (2 * unit(random_words(5, 1, 200, Purpose.SHIFT)[3]) - 1)
    for image, found, factor in zip(plain, changed, factors.tolist(), strict=True):
        assert 0.7 <= factor <= 1.3
        wanted = ImageEnhance.Brightness(Image.fromarray(image.numpy())).enhance(factor)
        assert np.abs(np.asarray(wanted).astype(int) - found.numpy()).max() <= 1
        assert (np.asarray(wanted) == found.numpy()).mean() > 0.99
    assert stats.kstest((factors - 0.7) / 0.6, "uniform").pvalue > 1e-3
