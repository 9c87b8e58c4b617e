"""ER-AML: its loss, its pairs, and ER where its parts are switched off."""

from __future__ import annotations

import pytest
import torch

from mose_fast.nn import CosineClassifier


def observed_rows(learner, x, y, task):
    """Feeds a batch as ``observe`` does, and returns the rows of its step."""
    planned, plan = [], learner.plan
    learner.plan = lambda x, y: planned.append(plan(x, y)) or planned[0]
    learner.observe(x, y, task)
    learner.plan = plan
    return planned[0]


def test_the_rows_of_a_step(make, batch, teach):
    learner = teach(make("er-aml"), tasks=(0,))
    x, y = batch([2, 3, 2, 3, 4], seed=9)  # label 4 has no positive
    stored = learner.memory.labels.clone()
    rows = observed_rows(learner, x, y, 1)
    assert rows.sizes == (4, 4, 4, 12)
    assert torch.equal(rows.images[:4], x[:4])
    incoming, positives, negatives, replayed = rows.labels.split(rows.sizes)
    assert torch.equal(positives, incoming) and (negatives != incoming).all() and set(negatives.tolist()) <= {2, 3, 4}
    assert set(replayed.tolist()) == {0, 1}
    # Positives are other images than their anchors; here all of them can only come from the batch
    # itself.
    assert (rows.images[4:8] != rows.images[:4]).flatten(1).any(1).all()
    assert all((image == x).flatten(1).all(1).any() for image in rows.images[4:12])
    assert rows.slots[:8].tolist() == [-1] * 8 and torch.equal(stored[rows.slots[8:]], replayed)


def test_pairs_come_from_memory_too(make, batch, teach):
    learner = teach(make("er-aml", memory=12), tasks=(0,), steps=6)
    stored = learner.memory.images.clone()
    taken = 0
    for seed in range(5):
        rows = observed_rows(learner, *batch([0, 1] * 5, seed=50 + seed), 1)
        slots = rows.slots[: 2 * rows.sizes[0]]
        where = slots >= 0
        taken += int(where.sum())
        assert torch.equal(rows.images[rows.sizes[0] :][: len(slots)][where], stored[slots[where]])
        stored = learner.memory.images.clone()
    # Of 12 stored and 10 incoming of two labels, about 5.5 of 10 draws.
    assert 30 < taken < 80


def test_negatives_of_the_current_task(make, batch, teach):
    learner = teach(make("er-aml", options={"negatives": "task"}), tasks=(0, 1))
    rows = observed_rows(learner, *batch([2] * 10, seed=9), 1)
    assert rows.sizes[:3] == (10, 10, 10) and set(rows.labels[20:30].tolist()) == {3}
    rows = observed_rows(learner, *batch([4] * 10, seed=9), 2)
    assert rows.sizes == (0, 0, 0, 12)


def test_a_batch_of_one_label_trains_on_memory_alone(make, batch, teach):
    learner = teach(make("er-aml"), tasks=(0,))
    losses = learner.observe(*batch([2] * 10, seed=9), task=1)
    assert set(losses) == {"loss", "replayed"} and losses["loss"] == losses["replayed"]


def test_the_first_batch_is_learned_by_cross_entropy_over_all_classes(make, batch):
    learner = make("er-aml", options={"augment": "none"})
    x, y = batch([0, 1] * 5)
    with torch.no_grad():
        logits = learner.network.train().classify(learner.network.features(learner.views.normalise(x)))[0]
    learner.model = learner.build_model()  # batch norm's statistics again
    losses = learner.observe(x, y, task=0)
    assert set(losses) == {"loss", "incoming"}
    assert float(losses["incoming"]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)


def test_incoming_rows_do_not_move_the_classifier(make, batch, teach):
    """The asymmetry: the metric loss reaches the features, only replayed rows reach the
    classifier.
    """
    learner = teach(make("er-aml", options={"replay_from": "others"}), tasks=(0,))
    assert isinstance(learner.network.classifier1, CosineClassifier)
    learner.retrieve = lambda x, y: y[:0]
    before = learner.network.classifier1.weight.detach().clone()
    losses = learner.observe(*batch([2, 3] * 5, seed=9), task=1)
    assert set(losses) == {"loss", "incoming"}
    assert learner.network.classifier1.weight.grad is None and torch.equal(learner.network.classifier1.weight, before)
    assert learner.network.stem.conv.weight.grad.abs().sum() > 0


def test_without_its_parts_it_is_er_bit_for_bit(make, teach):
    plain = teach(make("er", seed=3), tasks=(0, 1, 2))
    learner = teach(make("er-aml", seed=3, options={"incoming": "cross_entropy", "head": "linear"}), tasks=(0, 1, 2))
    assert learner.weights_hash() == plain.weights_hash()
    assert teach(make("er-aml", seed=3), tasks=(0, 1, 2)).weights_hash() != plain.weights_hash()


def test_a_cosine_head_costs_what_a_linear_one_does(make):
    """K x D multiply-accumulates; only the K biases are missing among the parameters."""
    for cosine, linear in zip(
        *(make("er-aml", width=8, options={"head": head}).costs() for head in ("cosine", "linear")), strict=True
    ):
        assert cosine.macs == linear.macs and cosine.parameters == linear.parameters - 6
