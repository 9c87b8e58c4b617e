"""The predictions of all classifiers of all experts (docs/specification/mose.md section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast.nn.class_means import ClassMeans

__all__ = ["CLASSIFIERS", "MEAN_OF_EXPERTS", "classify"]

#: The classifiers, and what their mean of experts averages: squared distances to the class means,
#: or logits.
MEAN_OF_EXPERTS = {"ncm": "mean_distance", "linear": "mean_logit"}
CLASSIFIERS = tuple(MEAN_OF_EXPERTS)


def classify(features: Tensor, logits: Tensor, means: ClassMeans | None) -> dict[str, dict[str, Tensor]]:
    """Predicts labels by every classifier and expert: ``{"ncm": {"1": ..., "mean_distance": ...},
    "linear": {"1": ..., "mean_logit": ...}}``, int64 [N] each.

    ``features`` are float [E, N, D], ``logits`` float [E, N, K]. ``means`` is None while the memory
    is empty: ``ncm`` then predicts -1, no class.
    """
    experts = [str(e + 1) for e in range(len(features))]
    logits = logits.float()
    linear = torch.cat([logits, logits.mean(0, keepdim=True)]).argmax(-1)
    nearest = torch.full_like(linear, -1) if means is None else means.predict(features)
    rows = {"ncm": nearest, "linear": linear}
    return {c: dict(zip([*experts, MEAN_OF_EXPERTS[c]], rows[c].unbind(0), strict=True)) for c in CLASSIFIERS}
