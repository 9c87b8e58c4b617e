"""The frozen copy that methods distil from: what it computes, its tensors, state and resumption."""

from __future__ import annotations

import pytest
import torch

from mose_fast.learner.teacher import Teacher
from mose_fast.methods import Er
from mose_fast.settings.run import ConfigError


@pytest.fixture(params=["eval", "train"])
def mode(request, monkeypatch) -> str:
    """The mode of batch norm in the teacher that ER then has."""
    monkeypatch.setattr(Er, "teacher_mode", request.param)
    return request.param


def addresses(teacher: Teacher) -> list[int]:
    return [tensor.data_ptr() for tensor in teacher.network.state_dict().values()]


def views_of(learner, batch, count: int = 10):
    return learner.views.normalise(batch([0, 1, 2, 3, 4] * 2, seed=50)[0][:count])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_it_computes_what_the_network_did_when_the_task_ended(mode, kernels, precision, make, teach, batch):
    learner = teach(make("er", kernels=kernels, precision=precision, width=8), tasks=(0,))
    assert not learner.teacher.present
    learner.end_task()
    network, views = learner.network.train(mode == "train"), views_of(learner, batch)
    with torch.no_grad(), learner.model.autocast():
        wanted = network(views.contiguous(memory_format=torch.channels_last))
    found = learner.teacher.outputs(views)
    assert found.logits.dtype == wanted.logits.dtype and learner.teacher.network.kernels == kernels
    for name in ("logits", "features", "projections"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)[0])
        assert not getattr(found, name).requires_grad
    teach(learner, tasks=(1,), steps=1)
    assert torch.equal(learner.teacher.outputs(views).logits, found.logits)


def test_another_mode_is_refused(monkeypatch, make):
    monkeypatch.setattr(Er, "teacher_mode", "ema")
    with pytest.raises(ConfigError, match=r"Er.teacher_mode is 'ema'; wanted 'eval', 'train' or None"):
        make("er")


def test_bf16_copies_give_what_the_weights_that_they_round_give(make, teach, batch):
    learner = teach(make("er", kernels="fused", precision="bf16", width=8), tasks=(0,))
    teachers = [Teacher(learner.network, half=True, shadowed=shadowed) for shadowed in (False, True)]
    for teacher in teachers:
        teacher.take(learner.network)
    assert {p.dtype for p in teachers[1].network.parameters() if p.dim() > 1} == {torch.bfloat16}
    plain, shadowed = (teacher.outputs(views_of(learner, batch)) for teacher in teachers)
    assert torch.equal(plain.logits, shadowed.logits) and torch.equal(plain.features, shadowed.features)


def test_a_new_task_and_a_loaded_state_leave_its_tensors_where_they_are(mode, make, teach):
    learner, other = teach(make("er"), tasks=(0, 1)), make("er")
    for one in (learner, other):
        before = addresses(one.teacher)
        one.load_state(*teach(make("er", seed=3), tasks=(0, 1)).state())
        one.end_task()
        teach(one, tasks=(2,))
        assert addresses(one.teacher) == before


def test_it_changes_nothing_and_shares_nothing_with_the_network(mode, make, teach, batch):
    learner = teach(make("er"), tasks=(0,))
    learner.end_task()
    before = learner.network.state_dict() | {}
    kept = {name: tensor.clone() for name, tensor in before.items()}
    state = {name: tensor.clone() for name, tensor in learner.teacher.state_dict().items()}
    learner.teacher.outputs(views_of(learner, batch))
    assert all(torch.equal(tensor, state[name]) for name, tensor in learner.teacher.state_dict().items())
    own = {tensor.untyped_storage().data_ptr() for tensor in learner.teacher.network.state_dict().values()}
    assert own.isdisjoint({tensor.untyped_storage().data_ptr() for tensor in before.values()})
    assert all(torch.equal(tensor, kept[name]) for name, tensor in learner.network.state_dict().items())
    with torch.no_grad():
        for tensor in learner.teacher.network.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in learner.network.state_dict().items())


def test_the_hash_of_the_weights_and_the_training_do_not_depend_on_it(monkeypatch, make, teach):
    plain = teach(make("er"), tasks=(0, 1))
    monkeypatch.setattr(Er, "teacher_mode", "eval")
    learner = teach(make("er"), tasks=(0, 1))
    assert learner.teacher.present and learner.weights_hash() == plain.weights_hash()


def test_it_is_state(mode, make, teach):
    tensors, values = teach(make("er"), tasks=(0, 1)).state()
    names = {f"kept/teacher/network.{name}" for name in make("er").network.state_dict()}
    assert {name for name in tensors if "/network." in name} == names
    copy = make("er", seed=9)
    copy.load_state(tensors, values)
    assert copy.teacher.present
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in copy.state()[0].items())
    copy.load_state(*teach(make("er"), tasks=(0,)).state())
    assert not copy.teacher.present
    del tensors["kept/teacher/network.stem.conv.weight"]
    with pytest.raises(ValueError, match=r"teacher/network\.stem\.conv\.weight is missing"):
        copy.load_state(tensors, values)


def test_a_state_of_another_precision_builds_it_again(monkeypatch, make, teach):
    monkeypatch.setattr(Er, "teacher_mode", "eval")
    learner = teach(make("er", precision="bf16"), tasks=(0, 1))
    copy = make("er")
    copy.load_state(*learner.state())
    assert copy.precision.name == "bf16"
    for name, tensor in learner.teacher.state_dict().items():
        assert torch.equal(copy.teacher.state_dict()[name], tensor)


def test_a_single_view(mode, make, teach, batch):
    learner = teach(make("er"), tasks=(0,))
    learner.end_task()
    assert [tuple(part.shape) for part in learner.teacher.outputs(views_of(learner, batch, 1))] == [
        (1, 6),
        (1, 8),
        (1, 8),
    ]
