"""OnPro's contrast of class prototypes (docs/specification/baselines.md section 10)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mose_fast.nn.cosine import directions

__all__ = ["class_means", "prototype_loss"]

_EPS = 1e-12


def class_means(projections: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The means of each class's directions in float32 at least, [2, K, P], zero for absent classes;
    of ``projections`` [2, n, P], two views of n rows with ``labels`` int64 [n].
    """
    own = labels == torch.arange(classes, device=labels.device)[:, None]
    z = directions(projections, _EPS)
    return own.to(z.dtype) @ z / own.sum(1, keepdim=True).clamp_min(1)


def prototype_loss(means: Tensor, temperature: float) -> Tensor:
    """NT-Xent between the prototypes of two views, ``means`` [2, K, P], zero for absent classes:
    the mean over both views of all classes that are present of -log of the same class's share in
    the softmax over all other prototypes.
    """
    p = directions(means, _EPS).flatten(0, 1)
    present = (means != 0).any(2).flatten()
    itself = torch.eye(len(p), dtype=torch.bool, device=p.device)
    similarities = (p @ p.T / temperature).masked_fill(itself | ~present, -math.inf)
    same = similarities.roll(len(p) // 2, 1).diagonal()
    each = torch.where(present, similarities.logsumexp(1) - torch.where(present, same, 0), 0)
    return each.sum() / present.sum().clamp_min(1)
