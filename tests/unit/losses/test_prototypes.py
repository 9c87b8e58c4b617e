"""OnPro's class prototypes and their loss against loops."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.losses.prototypes import class_means, prototype_loss

Z = torch.randn(2, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([3, 0, 3, 5, 0, 0, 3])


def test_means_by_a_loop():
    found = class_means(Z, LABELS, 6)
    for view in range(2):
        for c in range(6):
            rows = [Z[view, i] / Z[view, i].norm() for i in range(7) if LABELS[i] == c]
            wanted = sum(rows) / len(rows) if rows else torch.zeros(5)
            torch.testing.assert_close(found[view, c], wanted.to(torch.float64))


def test_the_loss_by_a_loop():
    means = class_means(Z, LABELS, 6)
    p = [means[view, c] / means[view, c].norm() for view in range(2) for c in (0, 3, 5)]
    total = 0.0
    for i in range(6):
        s = [math.exp(float(p[i] @ p[j]) / 0.4) for j in range(6)]
        total -= math.log(s[(i + 3) % 6] / (sum(s) - s[i])) / 6
    assert float(prototype_loss(means, 0.4)) == pytest.approx(total)


def test_absent_classes_give_no_gradient_and_no_nan():
    z = Z.float().requires_grad_()
    loss = prototype_loss(class_means(z, LABELS, 50), 0.5)
    torch.testing.assert_close(loss, prototype_loss(class_means(z, LABELS, 6), 0.5))
    (gradient,) = torch.autograd.grad(loss, z)
    assert gradient.isfinite().all() and gradient.abs().sum(2).min() > 0


def test_a_single_class_has_no_loss():
    z = Z.float().requires_grad_()
    loss = prototype_loss(class_means(z, torch.full((7,), 2), 6), 0.5)
    (gradient,) = torch.autograd.grad(loss, z)
    assert abs(loss.item()) < 1e-6 and gradient.isfinite().all()
    assert float(prototype_loss(class_means(Z[:, :0], LABELS[:0], 6), 0.5)) == 0
