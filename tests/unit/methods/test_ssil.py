"""SS-IL: softmaxes apart, distillation within tasks, exemplars and teacher at the ends of tasks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mose_fast.methods.ssil import task_wise_distillation
from mose_fast.settings.run import ConfigError


def test_the_distillation_is_a_sum_over_tasks_of_any_classes():
    """Tasks of one, two and three classes, not in order; the others belong to no old task."""
    random = torch.Generator().manual_seed(0)
    student, teacher = (4 * torch.randn(2, 5, 8, generator=random).double()).requires_grad_().unbind()
    student.retain_grad()
    tasks = torch.tensor([1, 8, 2, 1, 10, 2, 0, 2])
    total = 0
    for classes in ([0, 3], [2, 5, 7], [6]):
        q, p = teacher[:, classes] / 2.5, student[:, classes] / 2.5
        total = total + 2.5**2 * F.kl_div(p.log_softmax(1), q.log_softmax(1), reduction="batchmean", log_target=True)
    found = task_wise_distillation(student, teacher, tasks, 2.5)
    assert found.item() == pytest.approx(total.item(), rel=1e-12)
    (wanted,), (grad,) = (torch.autograd.grad(loss, [student], retain_graph=True) for loss in (total, found))
    assert torch.allclose(grad, wanted, atol=1e-12) and (grad[:, [1, 4, 6]] == 0).all()


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 5e3, 4e3]], requires_grad=True)
    loss = task_wise_distillation(logits, logits.detach().flip(1), torch.tensor([0, 0, 1, 1]), 2.0)
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()


def test_exemplars_are_those_of_earlier_tasks_and_the_teacher_is_from_their_end(make, teach, batch):
    learner = teach(make("ssil", memory=12), tasks=(0,))
    assert learner.memory.filled == 0 and learner.memory.buffer.filled == 12
    learner.end_task()
    hashes = [learner.weights_hash()]
    # The first six of each class: class 0 has the even positions, class 1 the odd ones.
    assert learner.memory.indices.tolist() == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    assert learner.memory.buffer.filled == 0
    teach(learner, tasks=(1,))
    assert all(
        torch.equal(t, learner.teacher.network.state_dict()[name])
        for name, t in learner.teacher.network.state_dict().items()
    )
    assert learner.weights_hash() != hashes[0] and learner.data.own["tasks"] == [[0, 1]]
    learner.end_task()
    assert learner.data.own["tasks"] == [[0, 1], [2, 3]]
    assert torch.bincount(learner.memory.labels).tolist() == [3, 3, 3, 3]


def test_evaluating_before_a_task_ends_is_possible_and_changes_nothing(make, teach, batch):
    """By the linear classifier at any time; by class means among the classes of ended tasks."""
    learner = teach(make("ssil"), tasks=(0,))
    x, _ = batch([0, 1, 2, 3])
    assert set(learner.predict(x).tolist()) <= set(range(6))
    with pytest.raises(ValueError, match="the replay memory is empty"):
        learner.predict(x, "ncm")
    teach(learner, tasks=(1,), steps=1)
    with pytest.warns(UserWarning, match=r"2 of 4 classes seen have no sample in the memory"):
        assert set(learner.predict(x, "ncm").tolist()) <= {0, 1}
    learner.end_task()
    assert learner.class_means().known.tolist() == [True] * 4 + [False] * 2


def test_a_stream_without_boundaries_is_refused(make, batch):
    learner = make("ssil")
    learner.observe(*batch([0, 1, 2]), 0)
    with pytest.raises(ConfigError, match=r"method 'ssil' has a softmax for each task, but 4 of 6 classes came"):
        learner.observe(*batch([3]), 0)


def test_a_new_task_can_be_undone(make, teach, batch):
    """The batch that ends a task leaves memory, buffer, map and classes as they were."""
    learner = teach(make("ssil"), tasks=(0, 1))
    before = {name: tensor.tolist() for name, tensor in learner.memory.tensors().items()}
    values = repr(learner.data.values())
    prepared = learner.prepare(*batch([4, 5] * 5), 2)
    assert repr(learner.data.values()) != values and learner.memory.buffer.filled == 10
    assert prepared.undo()
    assert {name: tensor.tolist() for name, tensor in learner.memory.tensors().items()} == before
    assert repr(learner.data.values()) == values
