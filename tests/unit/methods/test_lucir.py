"""LUCIR: imprinted weights, weights that stay, and where its terms are switched off."""

from __future__ import annotations

import pytest
import torch

from mose_fast.methods.lucir import feature_distillation, margin_ranking


def weights(learner) -> torch.Tensor:
    return learner.network.classifier1.weight.detach().clone()


@pytest.mark.parametrize(("old", "new"), [([], [2, 3]), ([0, 1], [])])
def test_without_old_rows_or_new_classes_there_is_no_margin(old, new):
    cosines = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    masks = [torch.isin(torch.arange(4), torch.tensor(classes)) for classes in (old, new)]
    loss = margin_ranking(cosines, torch.tensor([0, 1, 2]), *masks, 2, 0.5)
    loss.backward()
    assert loss.item() == 0 and not cosines.grad.any()


def test_only_directions_are_distilled():
    """docs/specification/baselines.md appendix G.8."""
    features = torch.rand(5, 8, generator=torch.Generator().manual_seed(1)) + 0.1
    lengths = torch.tensor([1.0, 7, 30, 2, 4])[:, None]
    assert float(feature_distillation(features, lengths * features)) == pytest.approx(0, abs=1e-4)
    assert float(feature_distillation(features, -features)) == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_adam_does_not_move_the_weights_of_old_classes(make, batch, teach, kernels):
    learner = teach(make("lucir", kernels=kernels, options={"weight_decay": 0.1}))
    learner.end_task()
    before = weights(learner)
    for step in range(3):
        learner.observe(*batch([4, 5] * 5, seed=step), task=2)
    moment = learner.model.optimiser.state[learner.network.classifier1.weight]["exp_avg"]
    assert moment[:4].abs().sum() > 0  # it would move them
    assert torch.equal(weights(learner)[:4], before[:4])
    assert (weights(learner)[4:] != before[4:]).all()


def test_a_class_is_imprinted_without_moments(make, batch, teach):
    """With classes known beforehand its row was a rival before its first image came."""
    learner = teach(make("lucir", options={"current_classes": "task"}), tasks=())
    for task, labels in enumerate(([0, 1], [2, 3])):
        learner.begin_task(task, labels)
        for step in range(4):
            learner.observe(*batch((labels if step == 3 else labels[:1]) * 5, seed=step), task)
            moment = learner.model.optimiser.state[learner.network.classifier1.weight]["exp_avg"]
            if step == 2:
                before = moment[labels[1]].clone()
    # One step's gradient at most, where the steps before would have left nine tenths of theirs.
    after = moment[3]
    assert before.norm() > 0 and (after @ before) / (after.norm() * before.norm()) < 0.9


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_a_step_that_is_not_taken_imprints_nothing(make, batch, teach, kernels):
    learner = teach(make("lucir", kernels=kernels))
    learner.end_task()
    before = weights(learner)
    learner.network.classifier1.scale.data.fill_(torch.inf)
    losses = learner.observe(*batch([4, 5] * 5), task=2)
    assert not losses["loss"].isfinite() and torch.equal(weights(learner), before)


def test_a_class_is_imprinted_once_also_after_a_resumption(make, batch, teach):
    learner, copy = teach(make("lucir")), make("lucir")
    learner.observe(*batch([4] * 10), task=2)
    tensors, values = learner.state()
    copy.load_state({name: tensor.clone() for name, tensor in tensors.items()}, values)
    imprinted, imprint = [], copy.imprint
    copy.imprint = lambda rows: (imprinted.append(rows.extras["fresh"].nonzero().flatten().tolist()), imprint(rows))[1]
    for labels in ([4] * 10, [4, 5] * 5, [4, 5] * 5):
        copy.observe(*batch(labels), task=2)
    assert imprinted == [[5]]


def test_the_first_task_and_rows_of_memory_alone_are_only_classified(make, batch, teach):
    learner = make("lucir")
    assert learner.observe(*batch([0, 1] * 5), task=0).keys() == {"loss", "incoming"}
    teach(learner, tasks=(1,))
    before = weights(learner)
    terms = {"loss", "incoming", "replayed", "distillation", "ranking"}
    assert learner.observe(*batch([2, 3] * 5), task=1).keys() == terms
    learner.end_task()
    assert learner.rehearse(torch.arange(12)).keys() == {"loss", "replayed"}
    assert (weights(learner)[:4] != before[:4]).all()
