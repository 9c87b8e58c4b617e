"""CutMix (Yun et al., ICCV 2019): a box of each image comes from another image of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.ops.draws import Purpose, permutation, random_words, uniform_below32, unit


def cutmix(views: Tensor, probability: float, seed: int, sequence: int) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces one box, the same in all images, by the same box of a random partner. With
    probability ``1 - probability`` the box is empty.

    The box has the images' shape and a uniformly drawn share of their area (Beta(1, 1)) around a
    uniformly drawn centre, and is cut off at the edge.

    Returns the views float [N, C, H, W], the partners int64 [N], and the share of its own pixels
    that each image keeps, a float32 scalar: the weight of its own label.
    """
    count, _, height, width = views.shape
    device = views.device
    mixed, area, across, down = random_words(seed, sequence, 1, Purpose.MIX, device, lane=1)
    side = unit(area).sqrt() * (unit(mixed) < probability)
    inside = []
    for word, length in ((down, height), (across, width)):
        half = (side * length).to(torch.int64) // 2
        centre = uniform_below32(word, torch.tensor(length, device=device))
        place = torch.arange(length, device=device)
        inside.append((place >= centre - half) & (place < centre + half))
    box = inside[0][:, None] & inside[1]
    partners = permutation(seed, sequence, count, Purpose.MIX, device)
    return torch.where(box, views[partners], views), partners, 1 - box.float().mean()
