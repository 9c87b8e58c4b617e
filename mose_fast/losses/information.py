"""Contrastive losses of OCM and OnPro on rotated views (InfoNCE, which bounds mutual information)
and class prototypes (docs/specification/baselines.md sections 9 and 10); in float32 at least.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mose_fast.nn.cosine import directions

# Inside the quotient, inside the logarithm, and beside a vector's length (gydpku/OCM).
_EPS = 1e-8
# Beside the length of what prototypes are made of.
_SMALLEST = 1e-12


def mixed_similarities(projections: Tensor, features: Tensor, offset: Tensor | int) -> Tensor:
    """Similarities [N, N] of projections [N, P] to projections and to a piece of the features [N,
    D]: p_i . p_j + p_i . v_j[offset : offset + P], where p and v have length 1 and the piece is not
    scaled again. ``offset`` is an int64 scalar, 0 to D - P.
    """
    p, v = directions(projections, _EPS), directions(features, _EPS)
    return p @ (p + v.index_select(1, offset + torch.arange(p.shape[1], device=p.device))).T


def _surprise(similarities: Tensor, temperature: float, itself: Tensor | None = None) -> Tensor:
    """-log of the shares in the softmax of each row, [N, N]; 18.4 for a share of 0 (``itself``)."""
    q = ((similarities - similarities.detach().amax(1, keepdim=True)) / temperature).exp()
    q = q if itself is None else torch.where(itself, 0, q)
    return -(q / (q.sum(1, keepdim=True) + _EPS) + _EPS).log()


def _mean_of_class(surprise: Tensor, labels: Tensor) -> Tensor:
    same = labels[:, None] == labels
    return (torch.where(same, surprise, 0).sum(1) / same.sum(1)).mean()


def class_information(similarities: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The mean over rows of the mean surprise of the entries with the row's label, its own place
    included. ``similarities`` are [N, N], ``labels`` [N], any numbers.
    """
    return _mean_of_class(_surprise(similarities, temperature), labels)


def view_information(similarities: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Twice :func:`class_information`, but without a share for each row's own place, and the mean
    surprise of each row's other view. ``similarities`` are [2N, 2N], of N rows in a first view,
    then in a second; ``labels`` [2N].
    """
    count = len(similarities)
    surprise = _surprise(similarities, temperature, torch.eye(count, dtype=torch.bool, device=labels.device))
    return 2 * _mean_of_class(surprise, labels) + surprise.roll(count // 2, 1).diagonal().mean()


def class_means(projections: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The means of each class's directions in float32 at least, [2, K, P], zero for absent classes;
    of ``projections`` [2, n, P], two views of n rows with ``labels`` int64 [n].
    """
    own = labels == torch.arange(classes, device=labels.device)[:, None]
    z = directions(projections, _SMALLEST)
    return own.to(z.dtype) @ z / own.sum(1, keepdim=True).clamp_min(1)


def prototype_loss(means: Tensor, temperature: float) -> Tensor:
    """NT-Xent between the prototypes of two views, ``means`` [2, K, P], zero for absent classes:
    the mean over both views of all classes that are present of -log of the same class's share in
    the softmax over all other prototypes.
    """
    p = directions(means, _SMALLEST).flatten(0, 1)
    present = (means != 0).any(2).flatten()
    itself = torch.eye(len(p), dtype=torch.bool, device=p.device)
    similarities = (p @ p.T / temperature).masked_fill(itself | ~present, -math.inf)
    same = similarities.roll(len(p) // 2, 1).diagonal()
    each = torch.where(present, similarities.logsumexp(1) - torch.where(present, same, 0), 0)
    return each.sum() / present.sum().clamp_min(1)
