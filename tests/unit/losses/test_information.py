"""OCM's and OnPro's contrastive losses and prototypes against loops, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.losses.information import (
    class_information,
    class_means,
    mixed_similarities,
    prototype_loss,
    view_information,
)

TAU = 0.3


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def surprises(s: torch.Tensor, skip_self: bool) -> list[list[float]]:
    found = []
    for i, row in enumerate(s.tolist()):
        q = [math.exp((value - max(row)) / TAU) for value in row]
        q = [0.0 if skip_self and i == j else value for j, value in enumerate(q)]
        found.append([-math.log(value / (sum(q) + 1e-8) + 1e-8) for value in q])
    return found


def mean_of_class(r: list[list[float]], labels: list[int]) -> float:
    means = []
    for row, label in zip(r, labels, strict=True):
        own = [value for value, other in zip(row, labels, strict=True) if other == label]
        means.append(sum(own) / len(own))
    return sum(means) / len(means)


def test_similarities_by_a_loop():
    p, v, offset = normal(4, 3), normal(4, 8, seed=1), 2
    found = mixed_similarities(p, v, torch.tensor(offset))
    for i in range(4):
        for j in range(4):
            a, b, c = p[i] / p[i].norm(), p[j] / p[j].norm(), v[j] / v[j].norm()
            assert float(found[i, j]) == pytest.approx(float(a @ b + a @ c[offset : offset + 3]), abs=1e-7)


def test_similarities_are_float32_whatever_the_network_ran_in():
    p, v = normal(4, 3).bfloat16(), normal(4, 8, seed=1).bfloat16()
    found = mixed_similarities(p, v, torch.tensor(5))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, mixed_similarities(p.double(), v.double(), 5).float())


def test_class_information_by_a_loop():
    s, labels = normal(6, 6), [3, 1, 1, 3, 2, 1]
    wanted = mean_of_class(surprises(s, False), labels)
    assert float(class_information(s, torch.tensor(labels), TAU)) == pytest.approx(wanted)


def test_view_information_by_a_loop():
    s, labels = normal(6, 6), [3, 1, 1] * 2
    r = surprises(s, True)
    wanted = 2 * mean_of_class(r, labels) + sum(r[i][(i + 3) % 6] for i in range(6)) / 6
    assert float(view_information(s, torch.tensor(labels), TAU)) == pytest.approx(wanted)


def test_a_rows_own_place_gives_a_constant_and_no_gradient():
    """docs/specification/baselines.md appendix G.11."""
    s, labels = normal(6, 6).requires_grad_(), torch.tensor([0, 1, 2] * 2)
    (gradient,) = torch.autograd.grad(view_information(s, labels, TAU), s)
    assert gradient.diagonal().tolist() == [0.0] * 6 and gradient.abs().sum(1).min() > 0
    alone = view_information(torch.zeros(2, 2), torch.tensor([0, 1]), TAU)
    # Each row's label is its own alone, and all others' shares go to the other view.
    assert float(alone) == pytest.approx(2 * -math.log(1e-8), rel=1e-6)


def test_the_largest_similarity_of_a_row_changes_nothing():
    """Differences count, so that no temperature makes an exponential overflow."""
    s, labels = normal(6, 6), torch.tensor([0, 1, 2] * 2)
    for loss in (class_information, view_information):
        torch.testing.assert_close(loss(s + 1e4, labels, TAU), loss(s, labels, TAU))
        assert loss(1e3 * s.float(), labels, 0.01).isfinite()


# Prototypes


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
