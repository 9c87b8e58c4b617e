"""SCR: two views, one contrastive loss, nearest class mean; the review."""

from __future__ import annotations

import pytest
import torch


def weights(learner, prefix: str = "") -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.network.named_parameters() if name.startswith(prefix)}


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


@pytest.mark.parametrize(("head", "passes"), [("mlp", "joint"), ("linear", "joint"), ("mlp", "separate")])
def test_the_loss_equals_loops_over_anchors_and_positives(make, teach, batch, head, passes):
    learner = teach(make("scr", options={"head": head, "passes": passes, "temperature": 0.2}))
    rows = learner.plan(*batch([4, 5] * 5))
    views = learner.make_views(rows)
    parts = views.split(22) if passes == "separate" else [views]
    z = torch.cat([learner.forward(part).projections for part in parts]).detach().double()
    assert z.shape == (44, 128)
    z, labels = z / z.norm(dim=1, keepdim=True), rows.labels.tolist() * 2
    anchors = []
    for i in range(44):
        others = [j for j in range(44) if j != i]
        partition = sum(torch.exp(z[i] @ z[j] / 0.2) for j in others).log()
        positives = [z[i] @ z[j] / 0.2 - partition for j in others if labels[j] == labels[i]]
        anchors.append(-sum(positives) / len(positives))
    assert learner.step(learner.inputs(rows))["loss"].item() == pytest.approx((sum(anchors) / 44).item(), rel=1e-4)


def test_the_linear_classifier_is_never_trained(make, teach):
    learner, untrained = teach(make("scr")), make("scr")
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(learner, "cl").values(), weights(untrained, "cl").values(), strict=True)
    )
    assert not any(
        torch.equal(a, b)
        for a, b in zip(weights(learner, "proj").values(), weights(untrained, "proj").values(), strict=True)
    )


def test_the_nearest_class_mean_never_predicts_an_unseen_class(make, teach, batch):
    """docs/specification/baselines.md appendix G.14."""
    learner = teach(make("scr"), tasks=(1,))
    assert learner.resolve_expert() == ("ncm", "1")
    assert set(learner.predict(batch(list(range(6)) * 5)[0]).tolist()) <= {2, 3}


def test_the_review_goes_once_through_the_memory_in_whole_batches(make, teach):
    with_review, without = (teach(make("scr", options={"review": on}), tasks=(0,)) for on in (True, False))
    assert with_review.weights_hash() == without.weights_hash()
    visited, step = [], with_review.step
    with_review.step = lambda rows: (visited.append(rows), step(rows))[1]
    before = with_review.steps
    with_review.end_task(), without.end_task()
    assert with_review.weights_hash() != without.weights_hash() and without.steps == before
    assert [rows.sizes for rows in visited] == [(0, 12)] * 2  # 30 slots in batches of 12; the last 6 are left out
    slots = torch.cat([rows.slots for rows in visited]).tolist()
    assert len(set(slots)) == 24 and slots != sorted(slots)


def test_the_review_takes_a_tenth_of_the_gradient(make, teach):
    """With SGD, one review step moves the weights a tenth as far as rehearsing the same slots."""
    settings = {"preset": "official", "memory": 12, "options": {"review": True, "augment": "none"}}
    reviewed, rehearsed = (teach(make("scr", **settings), tasks=(0,)) for _ in range(2))
    before = weights(reviewed)
    reviewed.end_task()
    rehearsed.rehearse(torch.arange(12))
    for name, start in before.items():
        full = dict(rehearsed.network.named_parameters())[name] - start
        tenth = dict(reviewed.network.named_parameters())[name] - start
        assert torch.allclose(tenth, 0.1 * full, atol=1e-6), name


def test_the_review_leaves_training_on_the_final_memory_alone(make, teach):
    learner = make("scr", options={"review": True}, train_on="final_memory")
    before = learner.weights_hash()
    learner.memory.insert(torch.zeros(20, 8, 8, 3, dtype=torch.uint8), torch.arange(20) % 2, 0, torch.arange(20))
    learner.end_task()
    assert learner.weights_hash() == before
