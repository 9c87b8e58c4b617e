"""SCR: two views, one contrastive loss, nearest class mean; the review."""

from __future__ import annotations

import torch


def test_an_empty_memory_never_updates(make, batch):
    learner = make("scr")
    before = learner.weights_hash()
    assert learner.observe(*batch([0, 1] * 5), task=0) is None
    learner.end_task()
    assert learner.weights_hash() == before and learner.steps == 0 and learner.memory.seen == 10
    assert learner.observe(*batch([0, 1] * 5), task=0) is not None
    assert learner.weights_hash() != before and learner.steps == 1


def test_views_are_the_images_then_their_augmentations(make, teach, batch):
    learner = teach(make("scr"))
    rows = learner.plan(*batch([4, 5] * 5))
    views = learner.make_views(rows)
    assert views.shape == (44, 3, 8, 8)
    assert torch.equal(views[:22], learner.views.normalise(rows.images))
    assert (views[22:] != views[:22]).flatten(1).any(1).sum() > 15


def test_the_review_leaves_training_on_the_final_memory_alone(make, teach):
    learner = make("scr", options={"review": True}, train_on="final_memory")
    before = learner.weights_hash()
    learner.memory.insert(torch.zeros(20, 8, 8, 3, dtype=torch.uint8), torch.arange(20) % 2, 0, torch.arange(20))
    learner.end_task()
    assert learner.weights_hash() == before
