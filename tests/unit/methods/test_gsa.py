"""GSA: weights of classes, their sums, and the views of both sets."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.methods.gsa import class_weights
from mose_fast.settings.run import ConfigError


def test_weights_are_one_at_balance_and_stay_between_their_bounds():
    pulled = torch.tensor([3.0, 0.0, 5.0, 1e30, 1.0])
    pushed = torch.tensor([3.0, 4.0, 0.0, 1e-30, 2.0])
    weights = class_weights(torch.stack([pulled, pushed]))
    assert weights.tolist() == pytest.approx([1, 2 / (1 + math.e), 2, 2, 2 / (1 + math.exp(0.5))])


def test_what_pulls_a_class_up_pushes_others_down(make, teach):
    """In a softmax over the classes so far both sums of a view are equal, so that no weight drifts:
    a softmax over classes to come would push those, and be repaid once they have come.
    """
    learner = teach(make("gsa"), tasks=(0, 1, 2))
    pulled, pushed = learner.network.sums
    assert float(pulled.sum()) == pytest.approx(float(pushed.sum()), rel=1e-4)
    begun = teach(make("gsa"), tasks=(0,))
    assert not begun.network.sums[:, 2:].any() and (begun.network.sums[:, :2] > 0).all()


def test_a_step_that_is_not_taken_leaves_the_sums_and_its_batch_can_be_undone(make, teach, batch):
    learner = teach(make("gsa"))
    before, own = learner.network.sums.clone(), dict(learner.data.own)
    assert (before > 0).sum(1).tolist() == [4, 4]
    with torch.no_grad():
        learner.network.classifier1.bias[0] = math.nan
    prepared = learner.prepare(*batch([4, 5] * 5), 2)
    assert prepared.take()["loss"].isnan()
    assert prepared.undo() and learner.data.own == own
    assert torch.equal(learner.network.sums, before)


def test_half_of_the_views_are_mirrored_where_mirroring_is_safe(make, teach, batch):
    for mirror in ("on", "off"):
        learner = teach(make("gsa", options={"augment": "none", "mirror": mirror}))
        rows = learner.plan(*batch([4, 5] * 5))
        for views in learner.make_views(rows).split(learner.view_sizes(rows)):
            first, second = views.chunk(2)
            assert torch.equal(second, first.flip(3) if mirror == "on" else first)


def test_the_two_views_of_a_row_are_augmented_each_by_itself(make, teach, batch):
    learner = teach(make("gsa", options={"augment": "gsa", "mirror": "off"}))
    rows = learner.plan(*batch([4, 5] * 5))
    first, second = learner.make_views(rows).split(learner.view_sizes(rows))[0].chunk(2)
    assert (first != second).flatten(1).any(1).all()


def test_replay_from_all_fills_the_weighted_set_from_the_whole_memory(make, teach, batch):
    learner = teach(make("gsa", options={"replay_from": "all"}))
    found = set()
    for seed in range(5):
        rows = learner.plan(*batch([0, 1] * 5, seed=seed))
        assert rows.extras["copies"] + rows.sizes[2] == 12
        found |= set(rows.labels[-rows.sizes[2] :].tolist())
    assert found == {0, 1, 2, 3}


def test_all_classes_of_a_task_must_be_known_to_be_used(make, batch):
    learner = make("gsa", options={"current_classes": "task"})
    with pytest.raises(ConfigError, match=r"options.current_classes is 'task', but the task's classes are unknown"):
        learner.observe(*batch([0, 1] * 5), 0)
