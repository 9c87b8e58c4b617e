"""DER++: stored logits and the weights of its two terms."""

from __future__ import annotations

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


def test_the_two_draws_are_independent_and_as_large_as_the_memory_allows(make, teach, batch):
    learner = teach(make("derpp", memory=12))
    rows = learner.plan(*batch([4, 5] * 5))
    first, second = rows.slots.split([12, 12])
    assert rows.sizes == (10, 12, 12) and sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert first.tolist() != second.tolist()


def test_stored_logits_are_those_of_the_step_before_its_update(make, batch):
    learner, twin = make("derpp"), make("derpp")
    x, y = batch([0, 1] * 5)
    rows = twin.plan(x, y)
    wanted = twin.forward(twin.make_views(rows)).logits.detach()
    learner.observe(x, y, task=0)
    assert torch.equal(learner.memory.extras["logits"][:10], wanted) and wanted.dtype == torch.float32
    assert learner.memory.extras["logits"][10:].abs().max() == 0


def test_stored_logits_follow_their_samples(make, teach, batch):
    """Every slot's logits are those that its sample had in the batch in which it came."""
    learner, given = make("derpp", memory=20), {}
    for step in range(12):
        task = step // 4
        x, y = batch([2 * task, 2 * task + 1] * 5, seed=step)
        index = torch.arange(10 * step, 10 * step + 10)
        learner.observe(x, y, task, index=index)
        given |= dict(zip(index.tolist(), learner._incoming_logits, strict=True))
    stored = learner.memory.extras["logits"]
    assert len(set(learner.memory.indices.tolist())) == 20 and learner.memory.indices.max() > 60
    assert all(torch.equal(stored[slot], given[index]) for slot, index in enumerate(learner.memory.indices.tolist()))


def test_the_terms(make, teach, batch):
    """By hand: the squared error is averaged over rows and all classes, seen or not."""
    learner = teach(make("derpp", options={"alpha": 0.3, "beta": 0.7}))
    rows = learner.plan(*batch([4, 5] * 5))
    logits = learner.forward(learner.make_views(rows)).logits.detach().double()
    each = torch.stack([-row.log_softmax(0)[label] for row, label in zip(logits, rows.labels, strict=True)])
    squares = [
        (logits[10 + i, k] - learner.memory.extras["logits"][rows.slots[i], k].double()) ** 2
        for i in range(12)
        for k in range(6)
    ]
    losses = learner.step(learner.inputs(rows))
    assert losses["incoming"].item() == pytest.approx(each[:10].mean().item(), rel=1e-5)
    assert losses["distillation"].item() == pytest.approx(0.3 * sum(squares).item() / 72, rel=1e-4)
    assert losses["replayed"].item() == pytest.approx(0.7 * each[22:].mean().item(), rel=1e-5)


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
