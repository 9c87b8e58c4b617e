"""The losses of one step, all experts at once. No native kernel serves them yet: every call goes to the reference."""

from mose_fast.reference.expert_losses import expert_losses, masked_cross_entropy, self_distillation, supcon_loss

__all__ = ["expert_losses", "masked_cross_entropy", "self_distillation", "supcon_loss"]
