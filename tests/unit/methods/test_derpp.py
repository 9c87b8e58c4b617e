"""DER++: stored logits and the weights of its two terms."""

from __future__ import annotations

import math

import pytest
import torch


def test_without_both_terms_it_is_fine_tuning_bit_for_bit(make, teach):
    derpp = teach(make("derpp", options={"alpha": 0.0, "beta": 0.0}))
    assert derpp.weights_hash() == teach(make("finetune", options={"augment": "pad_crop"})).weights_hash()


@pytest.mark.parametrize("passes", ["joint", "separate"])
def test_without_distillation_it_is_er_bit_for_bit(make, teach, passes):
    derpp = teach(make("derpp", options={"alpha": 0.0, "beta": 1.0, "passes": passes}))
    assert derpp.weights_hash() == teach(make("er", options={"augment": "pad_crop", "passes": passes})).weights_hash()
    assert derpp.weights_hash() != teach(make("derpp", options={"passes": passes})).weights_hash()


def batches(batch):
    """Twelve batches of three tasks, as arguments of ``prepare``; the memory forgets many rows."""
    for number in range(12):
        task = number // 4
        yield batch([2 * task, 2 * task + 1] * 5, seed=number), task, torch.arange(10 * number, 10 * number + 10)


@pytest.mark.parametrize("ahead", [1, 4])
def test_stored_logits_follow_their_samples(make, batch, ahead):
    """Every slot's logits are those that its sample had in the batch in which it came, however far
    plans, which overwrite slots, are ahead of steps.
    """
    learner, given, waiting = make("derpp", memory=20), [], []
    keep = learner.after_update
    learner.after_update = lambda outputs, rows: (
        given.extend(outputs.logits[:10].detach().clone()),
        keep(outputs, rows),
    )
    for (x, y), task, index in batches(batch):
        waiting.append(learner.prepare(x, y, task, index=index))
        if len(waiting) == ahead:
            waiting.pop(0).take()
    for prepared in waiting:
        prepared.take()
    indices, stored = learner.memory.indices.tolist(), learner.memory.extras["logits"]
    assert len(set(indices)) == 20 and max(indices) > 60
    assert all(torch.equal(stored[slot], given[index]) for slot, index in enumerate(indices))


def test_plans_ahead_are_the_batches_one_by_one(make, batch):
    """Distillation too reads what was there at the step's turn. Batches that train nothing are
    stored with the logits that the network has in their turn.
    """
    alone, ahead, waiting = make("derpp", memory=20), make("derpp", memory=20), []
    for number, ((x, y), task, index) in enumerate(batches(batch)):
        how = {"index": index, "train": number % 5 != 3}
        alone.observe(x, y, task, **how)
        if number % 4 == 0:
            for prepared in waiting:
                prepared.take()
            waiting.clear()
        waiting.append(ahead.prepare(x, y, task, **how))
    for prepared in waiting:
        prepared.take()
    assert alone.weights_hash() == ahead.weights_hash()
    wanted, found = (learner.memory.tensors() for learner in (alone, ahead))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_undone_plan_leaves_the_logits_that_earlier_steps_wrote(make, batch):
    """The plan was made before those steps, and overwrites slots that they store to."""
    learner, wanted = make("derpp", memory=12), make("derpp", memory=12)
    coming = list(batches(batch))
    for (x, y), task, index in coming[:3]:
        wanted.observe(x, y, task, index=index)
    prepared = [learner.prepare(x, y, task, index=index) for (x, y), task, index in coming[:7]]
    stored = [set(one.steps[0].inputs.stored.tolist()) - {-1} for one in prepared]
    assert set.union(*stored[:3]) & set.union(*stored[3:])
    for one in prepared[:3]:
        one.take()
    for one in reversed(prepared[3:]):
        assert one.undo()
    assert learner.weights_hash() == wanted.weights_hash()
    for name, tensor in wanted.memory.tensors().items():
        assert torch.equal(learner.memory.tensors()[name], tensor), name
    # A batch that trained nothing has written logits in its turn, which undoing does not take back.
    (x, y), task, index = coming[3]
    idle = learner.prepare(x, y, task, index=index, train=False)
    idle.take()
    assert not idle.undo()


def test_a_step_that_is_not_finite_writes_no_logits(make, teach, batch):
    learner = teach(make("derpp"))
    before = learner.memory.extras["logits"].clone()
    make_views = learner.make_views
    learner.make_views = lambda rows: make_views(rows) * math.nan
    for train in (True, False):
        learner.prepare(*batch([4, 5] * 5), 2, train=train).take()
    assert learner.diverged and torch.equal(learner.memory.extras["logits"], before)


def test_samples_that_trained_nothing_are_stored_with_the_networks_own_logits(make, batch):
    learner = make("derpp")
    learner.observe(*batch([0, 1] * 5), task=0)
    x, y = batch([0, 1] * 5, seed=1)
    wanted = learner.outputs(x)[1][0]
    learner.observe(x, y, task=0, train=False)
    assert torch.equal(learner.memory.extras["logits"][10:20], wanted)


def test_stored_logits_stay_float32_in_bf16(make, batch):
    learner = make("derpp", precision="bf16")
    learner.observe(*batch([0, 1] * 5), task=0)
    assert (
        learner.memory.extras["logits"].dtype == torch.float32 and learner.memory.extras["logits"][:10].abs().min() > 0
    )


def test_a_state_without_logits_is_refused(make, teach):
    tensors, values = teach(make("er")).state()
    with pytest.raises(ValueError, match=r"memory\.extra/logits is missing"):
        make("derpp").load_state(tensors, values)
