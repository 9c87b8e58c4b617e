"""Co2L: its two losses, and the classifier that an evaluation fits."""

from __future__ import annotations

import pytest
import torch

from mose_fast.methods.co2l import asymmetric_contrastive_loss, relation_distillation
from mose_fast.ops.expert_losses import contrastive_loss


def projections(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_if_all_views_are_anchors_it_is_the_supervised_contrastive_loss():
    z, labels = projections(12), torch.tensor([0, 1, 2, 0, 1, 1] * 2)
    found = asymmetric_contrastive_loss(z, labels, torch.ones(12, dtype=torch.bool), 0.3)
    assert float(found.detach()) == pytest.approx(0.3 / 0.07 * contrastive_loss(z, labels, 0.3).item(), rel=1e-5)


def test_views_that_are_no_anchors_count_zero_in_the_mean():
    z, labels = projections(8), torch.tensor([0, 1, 2, 3] * 2)
    every = [labels == label for label in range(4)]
    parts = [asymmetric_contrastive_loss(z, labels, anchors, 0.5) for anchors in every]
    whole = asymmetric_contrastive_loss(z, labels, torch.ones(8, dtype=torch.bool), 0.5)
    assert whole.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
    nothing = asymmetric_contrastive_loss(z, labels, torch.zeros(8, dtype=torch.bool), 0.5)
    nothing.backward()
    assert nothing.item() == 0 and not z.grad.any()


def test_a_network_that_follows_its_teacher_has_no_gradient():
    z = projections(6)
    relation_distillation(z, 3 * z.detach(), 0.2, 0.2).backward()
    assert z.grad.abs().max() < 1e-5
    z.grad = None
    relation_distillation(z, projections(6, seed=1).detach(), 0.2, 0.2).backward()
    assert z.grad.abs().max() > 1e-3


def test_replayed_rows_are_no_anchors(make, batch, teach):
    learner = teach(make("co2l"), tasks=(0,))
    (step,) = learner.prepare(*batch([2, 3] * 5), 1).steps
    rows = step.inputs
    assert rows.sizes == (10, 12) and rows.extras["anchors"].nonzero().flatten().tolist() == [2, 3]
    assert len(rows.views) == 44 and rows.extras["distils"]


def test_rows_of_memory_alone_are_all_anchors(make, teach):
    learner = teach(make("co2l"))
    learner.end_task()
    assert learner.rehearse(torch.arange(12)).keys() == {"loss", "contrastive"}


def test_the_classifier_depends_on_what_was_learned_not_on_evaluations(make, batch, teach):
    often, once = (teach(make("co2l", seed=2), tasks=(0, 1)) for _ in range(2))
    x, _ = batch([0, 1, 2, 3] * 5, seed=9)
    for learner in (often, once):
        learner.end_task()
    for _ in range(3):
        often.predict(x)
    teach(often, tasks=(2,)), teach(once, tasks=(2,))
    assert often.steps == once.steps
    for learner in (often, once):
        learner.end_task()
    assert torch.equal(often.predict(x), once.predict(x)) and often.weights_hash() == once.weights_hash()


def test_the_classifier_knows_the_memory_and_no_class_beyond(make, batch, teach):
    learner = teach(make("co2l", width=4, options={"lr": 0.01}), steps=8)
    learner.end_task()
    learner.prepare_evaluation()
    stored = learner.memory.filled
    predicted = learner.predict(learner.memory.images[:stored])
    assert (predicted == learner.memory.labels[:stored]).float().mean() > 0.7
    assert set(learner.predict(batch(list(range(6)) * 4)[0]).tolist()) <= {0, 1, 2, 3}
    assert set(learner.predict(batch(list(range(6)) * 4)[0], "ncm").tolist()) <= {0, 1, 2, 3}


def test_evaluations_in_bf16_use_the_classifier_that_was_fitted(make, batch, teach):
    """The optimiser keeps bf16 copies of the weights, which forward passes use."""
    learner = teach(make("co2l", kernels="fused", precision="bf16"))
    learner.end_task()
    assert learner.shadowed
    learner.prepare_evaluation()
    head, (features, logits) = learner.network.classifier1, learner.outputs(batch([0, 1, 2, 3])[0])
    seen = sorted(learner.seen)  # the logits of other classes are hidden
    wanted = features[0] @ head.weight.T + head.bias
    assert torch.allclose(logits[0][:, seen], wanted[:, seen], rtol=0.05, atol=0.05)
    assert head.weight.abs().max() > 0.1


def test_training_never_moves_the_classifier(make, teach):
    learner = make("co2l")
    before = learner.network.classifier1.weight.detach().clone()
    teach(learner, tasks=(0, 1))
    assert torch.equal(learner.network.classifier1.weight, before)


def test_nothing_is_fitted_without_a_stored_row(make, batch):
    learner = make("co2l")
    learner.observe(*batch([0, 1] * 5), task=0)
    before = learner.weights_hash()
    assert learner.predict(batch([0, 1])[0]).shape == (2,) and learner.weights_hash() == before
