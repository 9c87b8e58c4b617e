"""ASER: when its memory chooses, what is minimised, and that choosing leaves no trace."""

from __future__ import annotations

import pytest
import torch

from tests.unit.methods.by_hand import tensor_bits


def trained_rows(learner, x, y, task):
    caught = []
    learner.step = lambda rows: caught.append(rows)
    learner.observe(x, y, task)
    del learner.step
    return caught[0]


def test_until_the_memory_is_full_aser_is_er_with_one_mean_bit_for_bit(make, teach, batch):
    aser, er = make("aser", memory=40), make("er", memory=40, options={"replay_loss": "one_mean"})
    assert tensor_bits(teach(aser, steps=2)) == tensor_bits(teach(er, steps=2))
    for step in range(2):
        for one in (aser, er):
            one.observe(*batch([4, 5] * 5, seed=step), task=2)
    assert aser.weights_hash() != er.weights_hash()


def test_replayed_rows_are_the_memorys_choice_in_evaluation_mode_features(make, teach, batch):
    aser = teach(make("aser", options={"buffer_batch": 5}))
    x, y = batch([4, 5] * 5)
    wanted = aser.memory.retrieve(x, y, 5, "asvm", lambda images: aser.outputs(images)[0][0], aser.steps)
    before = tensor_bits(aser)
    assert torch.equal(aser.retrieve(x, y), wanted) and tensor_bits(aser) == before
    rows = trained_rows(aser, x, y, 2)
    assert rows.sizes == (10, 5) and torch.equal(rows.slots, wanted)


def test_candidates_bound_the_rows(make, teach, batch):
    """Two of each of four classes: eight rows, though twelve are asked for."""
    aser = teach(make("aser", memory=45), steps=6)
    classes = aser.memory.labels.unique(return_counts=True)
    assert (classes[1] >= 2).all()
    assert trained_rows(aser, *batch([4, 5] * 5), 2).sizes == (10, 2 * len(classes[0]))


@pytest.mark.parametrize("score", ["asvm", "asv", "neg_sv"])
def test_every_score_trains(make, teach, score):
    aser = teach(make("aser", options={"score": score, "buffer_batch": 3}, precision="bf16"), tasks=(0, 1, 2))
    assert aser.steps == 12 and all(t.isfinite().all() for t in aser.model.state().values())
    assert aser.memory.seen == 120


def test_new_classes_reach_a_full_memory(make, teach):
    aser = teach(make("aser"), tasks=(0, 1, 2))
    assert (aser.memory.tasks == 2).any() and aser.memory.filled == 30


def test_others_are_the_only_candidates_where_asked(make, teach, batch):
    aser = teach(make("aser", options={"replay_from": "others", "buffer_batch": 3}), steps=5)
    for step in range(3):
        rows = trained_rows(aser, *batch([2, 3] * 5, seed=step), 1)
        assert set(rows.labels[10:].tolist()) <= {0, 1} and len(rows.slots) > 0
