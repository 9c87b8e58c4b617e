"""Class means (docs/specification/mose.md section 7, paper section 5.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class ClassMeans:
    """The prototypes of all experts: for each class the normalised mean of its normalised features.

    A class without a sample has no prototype and is never predicted (the released code draws a
    random one). ``features`` are float [E, N, D], the experts' aligned features of the replay
    memory, in evaluation mode, ``labels`` int64 [N].

    Attributes:
        means: float32 [E, K, D]; rows of classes without samples are zero.
        known: bool [K], the classes that have a prototype.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        features = F.normalize(features.float(), dim=-1)
        counts = torch.bincount(labels, minlength=classes)
        if len(counts) > classes:
            raise ValueError(f"labels reach {len(counts) - 1}; wanted labels below classes, {classes}")
        # A product, whose bits are always the same: on a GPU, index_add_ adds in any order.
        of_class = labels == torch.arange(classes, device=labels.device).unsqueeze(1)
        sums = of_class.to(features.dtype) @ features
        self.known = counts > 0
        # Asked once, since on a GPU each question waits.
        self._any_known = bool(self.known.any())
        self.means = F.normalize(sums / counts.clamp_min(1).unsqueeze(-1), dim=-1)

    def distances(self, features: Tensor) -> Tensor:
        """Squared Euclidean distances between normalised ``features`` [E, N, D] and the prototypes:
        float64 [E, N, K], infinite for classes without a prototype. Raises ValueError if no class
        has one.
        """
        self.check_filled()
        return squared_distances(features, self.means, self.known)

    def check_filled(self) -> None:
        """Raises ValueError if no class has a prototype."""
        if not self._any_known:
            raise ValueError(
                "the replay memory is empty, so no class has a mean; wanted at least one stored sample before"
                " predicting"
            )

    def scores(self, features: Tensor) -> Tensor:
        """Minus the :meth:`distances`."""
        return -self.distances(features)


def squared_distances(features: Tensor, means: Tensor, known: Tensor) -> Tensor:
    """Those of normalised ``features`` [..., N, D] and ``means`` [..., K, D], float64 [..., N, K],
    infinite where bool [K] ``known`` is False; in operations that ONNX has.
    """
    # In float64, since means of an untrained network lie within 1e-4 of each other: |a|^2 + |m|^2 -
    # 2am would cancel.
    features, means = F.normalize(features.float(), dim=-1).double(), means.double()
    squares = features.square().sum(-1, keepdim=True) + means.square().sum(-1).unsqueeze(-2)
    return (squares - 2 * features @ means.transpose(-2, -1)).masked_fill(~known, float("inf"))
