"""ASER: when its memory chooses, what is minimised, and that choosing leaves no trace."""

from __future__ import annotations

import pytest

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
