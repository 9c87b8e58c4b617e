"""OCM's rotations."""

from __future__ import annotations

import pytest
import torch

from mose_fast.augment.rotations import rotations
from mose_fast.reference.augment import orient


def square(count: int = 3, side: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_every_pixel_by_a_loop():
    images = square(2, 4)
    found = rotations(images).view(16, 2, 4, 4, 3)
    for turns in range(4):
        for halves in range(4):
            for y in range(4):
                for x in range(4):
                    # The pixel of the image with turned halves that lies at (y, x) after the turns.
                    row, column = y, x
                    for _ in range(turns):
                        row, column = column, 3 - row
                    left = column < 2
                    if halves & (2 if left else 1):
                        row, column = 3 - row, 1 - column if left else 5 - column
                    assert torch.equal(found[4 * turns + halves, :, y, x], images[:, row, column])


def test_the_first_is_the_image_and_all_sixteen_differ():
    images = square()
    found = rotations(images).view(16, 3, 8, 8, 3)
    assert torch.equal(found[0], images)
    assert all((found[a] != found[b]).flatten(1).any(1).all() for a in range(16) for b in range(a))
    assert torch.equal(rotations(images, 4), rotations(images)[:12]) and rotations(images, 1) is images


def test_four_of_them_are_among_moses_sixteen_views():
    images = square()
    ours = [orient(images.permute(0, 3, 1, 2), code).permute(0, 2, 3, 1) for code in range(16)]
    theirs = rotations(images).view(16, 3, 8, 8, 3)
    assert sum(any(torch.equal(a, b) for b in ours) for a in theirs) == 4


def test_what_cannot_be_rotated_is_refused():
    with pytest.raises(ValueError, match="images have 8x16 pixels; wanted square ones"):
        rotations(torch.zeros(1, 8, 16, 3))
    assert rotations(torch.zeros(1, 8, 16, 3), 4).shape == (4, 8, 16, 3)
    with pytest.raises(ValueError, match="count is 2; wanted 1, 4 or 16"):
        rotations(square(), 2)
