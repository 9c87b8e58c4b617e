"""The distance between two softmaxes, of which one teaches the other."""

from __future__ import annotations

import torch
from torch import Tensor


def distillation(
    student: Tensor, teacher: Tensor, temperature: float, *, classes: Tensor | None = None, views: Tensor | None = None
) -> Tensor:
    """Computes T^2 KL(p_t || p_s) with the softmaxes p of logits / T in float32, or in float64 for
    such logits: the mean over the views, summed over what stands before them (experts).

    Args:
        student, teacher: Logits [..., V, K]; only the student's receive a gradient.
        temperature: T, above 0.
        classes: bool [K], the classes of the softmaxes, at least one; None: all.
        views: bool [V], the views that count, 0 for none; None: all.

    Source: Hinton et al., arXiv 1503.02531, section 2.1.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    logits = [given.to(wide) / temperature for given in (student, teacher.detach())]
    if classes is not None:
        # Finite, so that the product of no probability and its logarithm is 0.
        logits = [given.masked_fill(~classes, -1e30) for given in logits]
    log_student, log_teacher = (given.log_softmax(-1) for given in logits)
    each = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    means = each.mean(-1) if views is None else torch.where(views, each, 0).sum(-1) / views.sum().clamp_min(1)
    return temperature**2 * means.sum()
