"""The losses against hand-worked values, independent formulas and fp64 gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from mose_fast.losses import ExpertLosses
from mose_fast.methods.mose import MoseOptions
from mose_fast.nn import ExpertNetwork
from mose_fast.reference.expert_losses import contrastive_loss, expert_losses, masked_cross_entropy, self_distillation


def double(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    ).requires_grad_()


# Supervised contrastive


def test_contrastive_loss_by_hand():
    """Three unit vectors at 0, 90 and 180 degrees, the first two of one class, temperature 1:
    similarities 0, -1, 0.
    """
    z = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    first = -(0 - math.log(math.exp(0) + math.exp(-1)))
    second = -(0 - math.log(math.exp(0) + math.exp(0)))
    assert contrastive_loss(z, torch.tensor([0, 0, 1]), 1.0).item() == pytest.approx((first + second) / 2, rel=1e-6)


def test_contrastive_loss_against_the_definition():
    z, labels, temperature = double(9, 5).detach(), torch.tensor([0, 1, 0, 2, 1, 0, 3, 3, 4]), 0.2
    unit = z / z.norm(dim=1, keepdim=True)
    anchors = []
    for i in range(9):
        others = [j for j in range(9) if j != i]
        log_partition = math.log(sum(math.exp(unit[i] @ unit[j] / temperature) for j in others))
        positives = [j for j in others if labels[j] == labels[i]]
        if positives:
            anchors.append(
                -sum((unit[i] @ unit[p] / temperature).item() - log_partition for p in positives) / len(positives)
            )
    assert len(anchors) == 7
    assert contrastive_loss(z, labels, temperature).item() == pytest.approx(sum(anchors) / 7, rel=1e-12)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0], []])
def test_without_positives_contrastive_loss_is_zero_with_zero_gradient(labels):
    z = double(len(labels), 3)
    loss = contrastive_loss(z, torch.tensor(labels, dtype=torch.int64), 0.07)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 1, 0], [0] * 6, [0, 1, 2, 3, 4, 4]])
def test_contrastive_loss_gradcheck(labels):
    z = double(6, 4)
    assert torch.autograd.gradcheck(lambda z: contrastive_loss(z, torch.tensor(labels), 0.3), z)


def test_contrastive_loss_of_identical_views_and_zero_rows_is_finite():
    z = torch.zeros(4, 3)
    z[2:] = torch.tensor([1.0, 2.0, 3.0])
    z.requires_grad_()
    loss = contrastive_loss(z, torch.tensor([0, 0, 1, 1]), 0.07)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all()


def test_similarities_are_float32_for_bfloat16_projections():
    z = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    labels = torch.arange(32) % 4
    with torch.autocast("cpu", torch.bfloat16):
        loss = contrastive_loss(z, labels, 0.07)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(contrastive_loss(z.double(), labels, 0.07).item(), rel=1e-5)


def test_contrastive_loss_refuses_a_temperature_of_zero():
    with pytest.raises(ValueError, match="temperature is 0"):
        contrastive_loss(torch.rand(2, 2), torch.tensor([0, 0]), 0)


# Cross-entropy


def test_masked_cross_entropy_by_hand():
    """Class 1 is outside the mask: the softmax runs over logits 0 and log 3 alone, so the losses
    are log 4 and log 4 - log 3.
    """
    logits = torch.tensor([[0.0, 100.0, math.log(3)], [0.0, -7.0, math.log(3)]], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss = masked_cross_entropy(logits, torch.tensor([0, 2]), mask)
    assert loss.item() == pytest.approx((math.log(4) + math.log(4) - math.log(3)) / 2, rel=1e-6)
    loss.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.75, 0, 0.75], [0.25, 0, -0.25]]) / 2)


def test_masked_cross_entropy_equals_reindexed_cross_entropy():
    """The released code re-indexes labels within the current classes, in order of appearance."""
    logits, labels, order = double(7, 6), torch.tensor([4, 1, 1, 4, 3, 4, 3]), [4, 1, 3]
    mask = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(order), True)
    reindexed = torch.tensor([order.index(y) for y in labels.tolist()])
    torch.testing.assert_close(masked_cross_entropy(logits, labels, mask), F.cross_entropy(logits[:, order], reindexed))
    assert torch.autograd.gradcheck(lambda x: masked_cross_entropy(x, labels, mask), logits)


def test_cross_entropy_of_no_rows_is_zero():
    logits = double(0, 4)
    loss = masked_cross_entropy(logits, torch.empty(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0 and logits.grad.shape == (0, 4)


# Self-distillation


def test_distillation_by_hand():
    """Rows at right angles and rows that agree: distances sqrt 2 and 0."""
    student, teacher = torch.tensor([[3.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.1], [2.0, 2.0]])
    assert self_distillation(student, teacher, "frobenius").item() == pytest.approx(math.sqrt(2), rel=1e-6)
    assert self_distillation(student, teacher, "mean_of_norms").item() == pytest.approx(math.sqrt(2) / 2, rel=1e-6)


@pytest.mark.parametrize("reduction", ["frobenius", "mean_of_norms"])
def test_distillation_gradients(reduction):
    student, teacher = double(5, 4), double(4, 5).detach().T
    assert torch.autograd.gradcheck(lambda s: self_distillation(s, teacher, reduction), student)
    same = double(5, 4)
    distance = self_distillation(same, same.detach().clone(), reduction)
    distance.backward()
    assert distance.item() == 0 and torch.equal(same.grad, torch.zeros_like(same))


def test_an_unknown_reduction_is_named():
    with pytest.raises(ValueError, match="sum"):
        self_distillation(torch.rand(1, 2), torch.rand(1, 2), "sum")


# All together


@pytest.fixture
def outputs():
    experts, rows = 4, 10
    values = [double(experts, rows, 7), double(experts, rows, 5), double(experts, rows, 6), double(rows, 6)]
    labels = torch.tensor([0, 1, 0, 1, 2, 3, 4, 2, 3, 4])
    mask = torch.tensor([True, True, False, False, False])
    return *values, labels, 4, mask


def test_terms_of_a_later_task(outputs):
    projections, logits, features, student, labels, new, mask = outputs
    terms = expert_losses(*outputs)
    for e in range(4):
        assert torch.equal(terms[e, 0], contrastive_loss(projections[e], labels, 0.07))
        cross_entropy = masked_cross_entropy(logits[e, :new], labels[:new], mask) + 2 * F.cross_entropy(
            logits[e, new:], labels[new:]
        )
        torch.testing.assert_close(terms[e, 1], cross_entropy)
        rsd = torch.zeros((), dtype=torch.float64) if e == 3 else self_distillation(student, features[e], "frobenius")
        assert torch.equal(terms[e, 2], rsd)


def test_task_0_is_one_cross_entropy_over_everything(outputs):
    terms = expert_losses(*outputs[:6], None)
    for e in range(4):
        torch.testing.assert_close(terms[e, 1], F.cross_entropy(outputs[1][e], outputs[4]))


def test_who_gets_gradients(outputs):
    """RSD: the student alone, teachers are detached.

    SD: every other expert, and the teacher's adapter.
    """
    _, _, features, student, *_ = outputs
    expert_losses(*outputs, cross_entropy="off", distillation="rsd").sum().backward()
    contrastive = student.grad.clone()
    assert features.grad is None and contrastive.abs().sum() > 0
    student.grad = None
    expert_losses(*outputs, cross_entropy="off", distillation="sd").sum().backward()
    assert [features.grad[e].abs().sum().item() > 0 for e in range(4)] == [True, True, True, False]
    assert student.grad.abs().sum() > 0


@pytest.mark.parametrize("which", ["off", "last", "all"])
def test_switches_of_the_supervised_losses(outputs, which):
    wanted = {"off": [False] * 4, "last": [False] * 3 + [True], "all": [True] * 4}[which]
    terms = expert_losses(*outputs, cross_entropy=which, contrastive="all", distillation="off")
    assert [t.item() > 0 for t in terms[:, 1]] == wanted
    terms = expert_losses(*outputs, cross_entropy="all", contrastive=which, distillation="off")
    assert [t.item() > 0 for t in terms[:, 0]] == wanted
    assert (terms[:, 2] == 0).all()


@pytest.mark.parametrize("student", [0, 2])
def test_any_student(outputs, student):
    terms = expert_losses(*outputs, student_index=student)
    assert [e for e in range(4) if terms[e, 2] == 0] == [student]


@pytest.mark.parametrize("distillation", ["rsd", "sd"])
def test_padding_changes_nothing_and_gets_no_gradient(outputs, distillation):
    inputs = [x.detach().clone().requires_grad_() for x in outputs[:4]]
    terms = expert_losses(*inputs, *outputs[4:], distillation=distillation)
    terms.sum().backward()

    def pad(x, dim):
        shape = [3 if d == dim else size for d, size in enumerate(x.shape)]
        return torch.cat([x.detach(), torch.full(shape, math.nan, dtype=x.dtype)], dim).requires_grad_()

    padded = [pad(x, x.dim() - 2) for x in inputs]
    labels = torch.cat([outputs[4], torch.tensor([-1, 99, 0])])
    counts = torch.tensor(4, dtype=torch.int32), torch.tensor(10, dtype=torch.int32)
    with_padding = expert_losses(
        *padded, labels, counts[0], outputs[6], valid_rows=counts[1], distillation=distillation
    )
    with_padding.sum().backward()
    assert torch.equal(with_padding, terms)
    for x, y in zip(inputs, padded, strict=True):
        if x.grad is None:
            assert y.grad is None
            continue
        assert torch.equal(y.grad.narrow(-2, 0, 10), x.grad)
        assert (y.grad.narrow(-2, 10, 3) == 0).all()


def test_rows_without_direction_get_zero_gradient():
    z = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]], requires_grad=True)
    contrastive_loss(z, torch.tensor([0, 0, 0]), 0.5).backward()
    assert (z.grad[0] == 0).all() and (z.grad[1:] != 0).all()


def test_module_applies_the_switches_and_runs_outside_autocast():
    network = ExpertNetwork(6, width=4, student=1).train()
    labels = torch.arange(8) % 3
    mask = torch.tensor([True, True, True, False, False, False])
    options = MoseOptions(student=2, buffer_weight=0.5, rsd_reduction="mean_of_norms", temperature=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = network(torch.randn(8, 3, 32, 32))
        terms = ExpertLosses(options)(outputs, labels, 4, mask)
    assert terms.dtype == torch.float32 and outputs.logits.dtype == torch.bfloat16
    expected = expert_losses(
        *outputs, labels, 4, mask, temperature=0.3, buffer_weight=0.5, rsd_reduction="mean_of_norms", student_index=1
    )
    torch.testing.assert_close(terms, expected)
    together = ExpertLosses(MoseOptions(separate_cross_entropy=False))(outputs, labels, 4, mask)
    torch.testing.assert_close(together[3, 1], F.cross_entropy(outputs.logits[3].float(), labels))
