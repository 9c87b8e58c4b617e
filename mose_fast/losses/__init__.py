"""MOSE's losses: contrastive, masked cross-entropy, distillation, by :mod:`mose_fast.ops`."""

from mose_fast.losses.distillation import distillation
from mose_fast.losses.expert_losses import ExpertLosses
from mose_fast.losses.label_counts import label_counts
from mose_fast.ops.expert_losses import contrastive_loss, masked_cross_entropy, self_distillation

__all__ = [
    "ExpertLosses",
    "contrastive_loss",
    "distillation",
    "label_counts",
    "masked_cross_entropy",
    "self_distillation",
]
