"""OnPro: the rows of its steps, its prototypes, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from mose_fast.settings.run import ConfigError


def test_rows_of_the_first_task_serve_prototypes_alone(make, teach, batch):
    learner = make("onpro", memory=60, options={"buffer_batch": 60})
    assert learner.data.task is None
    for task, sizes in ((0, (10, 0, 20)), (1, (10, 28, 28)), (2, (10, 42, 42))):
        teach(learner, tasks=(task,), steps=2)
        assert learner.plan(*batch([2 * task, 2 * task + 1] * 5)).sizes == sizes


def test_a_step_that_is_not_taken_leaves_the_prototypes_and_its_batch_can_be_undone(make, teach, batch):
    learner = teach(make("onpro"))
    before, own = learner.network.prototypes.clone(), dict(learner.data.own)
    assert before.any(1).tolist() == [True] * 4 + [False] * 2
    with torch.no_grad():
        learner.network.classifier1.bias[0] = math.nan
    prepared = learner.prepare(*batch([2, 3] * 5), 1)
    assert prepared.take()["loss"].isnan()
    assert prepared.undo() and learner.data.own == own
    assert torch.equal(learner.network.prototypes, before)


def test_rows_are_mixed_in_the_images_that_are_stored(make, teach, batch):
    """Where both images are one, mixing changes nothing; where not, values lie between."""
    learner = teach(make("onpro", options={"mixup": 1.0, "random_share": 0.5}))
    rows = learner.plan(*batch([2, 3] * 5))
    incoming, replayed, _ = rows.sizes
    shares, labels = rows.extras["shares"], rows.labels[incoming : incoming + replayed]
    assert (shares > 0).all() and rows.slots[:replayed].tolist() == [-1] * replayed
    assert rows.images.dtype == torch.uint8 and set(labels.tolist()) <= {0, 1, 2, 3}
    lightness = rows.images[incoming : incoming + replayed].float().mean((1, 2, 3))
    wanted = 30 + 30 * torch.lerp(labels.float(), rows.extras["partners"].float(), shares)  # see `batch`
    assert (lightness - wanted).abs().max() < 8


def test_without_mixing_the_rows_drawn_are_replayed_as_they_are(make, teach, batch):
    learner = teach(make("onpro", options={"mixup": 0.0, "random_share": 1.0}))
    rows = learner.plan(*batch([2, 3] * 5))
    _, replayed, seen = rows.images.split(rows.sizes)
    assert torch.equal(replayed, seen) and not rows.extras["shares"].any()


@pytest.mark.parametrize("name", ["random_share", "mixup"])
def test_shares_above_one_are_refused(make, name):
    with pytest.raises(ConfigError, match=f"options.{name} is 1.5; wanted a share, at most 1"):
        make("onpro", options={name: 1.5})
