"""CutMix: boxes, shares and partners."""

from __future__ import annotations

import torch

from mose_fast.augment.cutmix import cutmix

# Each image is constant and shows its own number.
VIEWS = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 16, 24)


def test_each_image_is_itself_outside_one_box_and_its_partner_inside():
    boxes = set()
    for sequence in range(50):
        mixed, partners, share = cutmix(VIEWS, 1.0, seed=0, sequence=sequence)
        assert sorted(partners.tolist()) == list(range(6))
        moved = (partners != torch.arange(6)).nonzero().flatten()
        assert (mixed == mixed[:, :1]).all()
        box = (mixed != VIEWS)[moved, 0]
        assert (box == box[0]).all()
        rows, columns = box[0].any(1), box[0].any(0)
        assert torch.equal(box[0], rows[:, None] & columns)
        for line in (rows, columns):
            assert len(line.nonzero()) == 0 or line.nonzero().max() - line.nonzero().min() + 1 == line.sum()
        assert torch.equal(mixed, torch.where(box[0], partners.float().view(6, 1, 1, 1), VIEWS))
        assert share == 1 - box[0].float().mean()
        boxes.add((tuple(rows.tolist()), tuple(columns.tolist())))
    assert len(boxes) > 40


def test_a_box_has_the_images_shape_and_a_uniform_share_where_the_border_does_not_cut_it():
    sizes = []
    big = torch.arange(2.0, 8.0).view(6, 1, 1, 1).expand(6, 1, 200, 100)
    for sequence in range(150):
        mixed, partners, _ = cutmix(big, 1.0, seed=1, sequence=sequence)
        box = (mixed != big)[partners != torch.arange(6)][0, 0]
        if not box.any():
            continue
        rows, columns = box.any(1).nonzero().flatten(), box.any(0).nonzero().flatten()
        if min(rows[0], columns[0]) > 0 and rows[-1] < 199 and columns[-1] < 99:
            assert abs(len(rows) - 2 * len(columns)) <= 4
            sizes.append(len(rows) * len(columns) / 20000)
    # A box with the share s of the area is whole with probability (1 - sqrt(s))^2, so the mean
    # share of whole ones is integral(s (1 - sqrt(s))^2) / integral((1 - sqrt(s))^2) = (1/30) /
    # (1/6) = 0.2.
    assert len(sizes) > 15 and abs(sum(sizes) / len(sizes) - 0.2) < 0.12


def test_the_probability():
    mixed = [bool(cutmix(VIEWS, 0.5, seed=2, sequence=sequence)[2] < 1) for sequence in range(150)]
    # Small shares round to no box at all: those below (2/24)^2, 0.7 per cent.
    assert abs(sum(mixed) / 150 - 0.5) < 5 * (0.25 / 150) ** 0.5
    same, _, share = cutmix(VIEWS, 0.0, seed=2, sequence=7)
    assert torch.equal(same, VIEWS) and share == 1


def test_the_same_sequence_gives_the_same_mix():
    first, second, other = (cutmix(VIEWS, 1.0, seed=3, sequence=sequence) for sequence in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
