"""Losses as modules over :mod:`mose_fast.ops`: supervised contrastive, masked cross-entropy, reverse self-distillation."""

from mose_fast.losses.expert_losses import ExpertLosses

__all__ = ["ExpertLosses"]
