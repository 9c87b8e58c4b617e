"""CCIL: its distillation, its head, and the choice of its exemplars."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mose_fast.methods.ccil import mean_distillation


def test_the_mean_is_the_batch_mean_over_the_number_of_old_classes():
    """Appendix G.10, against PyTorch's two reductions."""
    student, teacher = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    old = torch.tensor([True, False, True, True, False, False, True, False])
    p, q = (logits[:, old].div(2.5).log_softmax(1) for logits in (student, teacher))
    found = mean_distillation(student, teacher, old, 2.5).item()
    assert found == pytest.approx(2.5**2 * F.kl_div(p, q, reduction="mean", log_target=True).item(), rel=1e-12)
    batch_mean = 2.5**2 * F.kl_div(p, q, reduction="batchmean", log_target=True).item()
    assert found == pytest.approx(batch_mean / 4, rel=1e-12)


def test_the_head_does_not_depend_on_lengths(make, teach, batch):
    """Appendix G.8."""
    learner = teach(make("ccil"), tasks=(0, 1))
    head, features = learner.network.classifier1, 20 * torch.rand(7, 8)
    with torch.no_grad():
        logits = head(features)
        head.weight *= torch.rand(6, 1) + 50
        assert torch.allclose(head(3 * features), logits, atol=1e-4)


def test_new_classes_are_among_the_exemplars(make, teach):
    """From the second task on, as in the repository, which chooses a task's exemplars before it is
    trained: of each class as many as it has slots for.
    """
    learner = make("ccil", memory=12, options={"buffer_batch": 9})
    replayed, rows = [], learner.rows

    def noted(*given):
        replayed.append(rows(*given))
        return replayed[-1]

    learner.rows = noted
    teach(learner, steps=6)
    assert [plan.sizes[1] for plan in replayed] == [0] * 6 + [6] + [9] * 5
    labels = torch.cat([plan.labels[plan.sizes[0] :] for plan in replayed[7:]])
    assert torch.bincount(labels, minlength=4).min() > 5


def test_exemplars_are_drawn_by_the_seed(make, teach):
    kept = []
    for seed in (1, 1, 2):
        learner = teach(make("ccil", memory=12, seed=seed))
        learner.end_task()
        assert torch.bincount(learner.memory.labels).tolist() == [3] * 4
        kept.append(learner.memory.indices.tolist())
    assert kept[0] == kept[1] != kept[2]


def test_a_class_that_has_not_come_is_never_predicted(make, teach, batch):
    """No loss pushes its logit down, so that it may be the largest."""
    learner = teach(make("ccil"), tasks=(0, 1))
    x, _ = batch([0, 1, 2, 3] * 5)
    features = learner.outputs(x)[0][0]
    with torch.no_grad():
        learner.network.classifier1.weight[5] = features.mean(0)
    assert learner.model.outputs(x, lambda: None)[1][0].argmax(1).eq(5).any()
    assert set(learner.predict(x).tolist()) <= {0, 1, 2, 3}
