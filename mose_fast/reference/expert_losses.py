"""The losses of MOSE in plain PyTorch: the definition that every kernel is tested against.

Half-precision inputs are computed in float32, float64 stays float64. The equations are those of
docs/specification/mose.md section 5.4, with n(v) = v / max(||v||, 1e-12). A row with ||v|| <= 1e-12
has no direction: it gets zero gradient through n (the formula's would be 1e12 times the incoming
one).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normalise(x: Tensor) -> Tensor:
    constant = x.detach()
    without_direction = torch.linalg.vector_norm(constant, dim=1, keepdim=True) <= 1e-12
    return F.normalize(torch.where(without_direction, constant, x), dim=1)


def contrastive_loss(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Computes the supervised contrastive loss over one batch of views (paper eq. for L_scl; Khosla
    et al. 2020), a scalar, float32 (float64 for float64 features).

    For an anchor i with positives P(i) = {j != i, y_j = y_i}: -(1/|P(i)|) sum_p (s_ip - log sum_{j
    != i} exp s_ij), with s_ij = n(z_i) . n(z_j) / temperature; the mean over the anchors that have
    a positive. Without any positive the loss is 0 with zero gradient. ``features`` [N, P] are not
    normalised, ``labels`` int64 [N], ``temperature`` above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; wanted a number above 0")
    z = _at_least_float32(features)
    if len(z) < 2:
        return z.sum() * 0
    with torch.autocast(z.device.type, enabled=False):
        z = _normalise(z)
        similarity = z @ z.T / temperature
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    log_partition = similarity.masked_fill(itself, float("-inf")).logsumexp(1, keepdim=True)
    positives = positive.sum(1)
    anchor_loss = torch.where(positive, log_partition - similarity, 0).sum(1) / positives.clamp_min(1)
    return anchor_loss.sum() / (positives > 0).sum().clamp_min(1)


def masked_cross_entropy(logits: Tensor, labels: Tensor, classes: Tensor | None = None) -> Tensor:
    """Computes the mean cross-entropy of logits [N, K] and labels int64 [N] with the softmax over
    the ``classes`` of a mask, bool [K] on the logits' device; None: all (paper eq. for L_ce,new). A
    scalar, float32 (float64 for float64 logits); 0 with zero gradient for N = 0.
    """
    logits = _at_least_float32(logits)
    if len(logits) == 0:
        return logits.sum() * 0
    if classes is not None:
        logits = logits.masked_fill(~classes, float("-inf"))
    return F.cross_entropy(logits, labels)


def self_distillation(student: Tensor, teacher: Tensor, reduction: str) -> Tensor:
    """Computes the distance between two sets of features [N, D] on the unit sphere, neither
    detached (paper eq. RSD; docs/specification/mose.md section 9.3): a scalar, whose gradient is 0
    at distance 0.

    ``reduction`` is ``frobenius``: the norm of the whole difference, sqrt(sum_b d_b^2) (released
    code); or ``mean_of_norms``: mean_b d_b (paper).
    """
    if reduction not in ("frobenius", "mean_of_norms"):
        raise ValueError(f"reduction is {reduction!r}; wanted frobenius or mean_of_norms")
    difference = _normalise(_at_least_float32(student)) - _normalise(_at_least_float32(teacher))
    if len(difference) == 0:
        return difference.sum() * 0
    if reduction == "frobenius":
        return torch.linalg.vector_norm(difference)
    return torch.linalg.vector_norm(difference, dim=1).mean()


def expert_losses(
    projections: Tensor,
    logits: Tensor,
    features: Tensor,
    student: Tensor,
    labels: Tensor,
    new_rows: int | Tensor,
    current_classes: Tensor | None,
    *,
    valid_rows: int | Tensor | None = None,
    temperature: float = 0.07,
    buffer_weight: float = 2.0,
    cross_entropy: str = "all",
    contrastive: str = "all",
    distillation: str = "rsd",
    rsd_reduction: str = "frobenius",
    student_index: int | None = None,
) -> Tensor:
    """Computes all losses of one step, see :func:`mose_fast.ops.expert_losses.expert_losses`; here
    scalars may be on any device.
    """
    if valid_rows is not None:
        valid = int(valid_rows)
        projections, logits, features = projections[:, :valid], logits[:, :valid], features[:, :valid]
        student, labels = student[:valid], labels[:valid]
    new_rows = int(new_rows)
    experts = len(features)
    student_index = experts - 1 if student_index is None else student_index
    first = {"all": 0, "last": experts - 1, "off": experts}
    zero = _at_least_float32(logits).new_zeros(())
    rows = []
    for e in range(experts):
        supervised = contrastive_loss(projections[e], labels, temperature) if e >= first[contrastive] else zero
        if e < first[cross_entropy]:
            classified = zero
        elif current_classes is None:
            classified = masked_cross_entropy(logits[e], labels)
        else:
            new = masked_cross_entropy(logits[e, :new_rows], labels[:new_rows], current_classes)
            classified = new + buffer_weight * masked_cross_entropy(logits[e, new_rows:], labels[new_rows:])
        if distillation == "off" or e == student_index:
            distilled = zero
        elif distillation == "rsd":
            distilled = self_distillation(student, features[e].detach(), rsd_reduction)
        else:
            distilled = self_distillation(features[e], student, rsd_reduction)
        rows.append(torch.stack([supervised, classified, distilled]))
    return torch.stack(rows)
