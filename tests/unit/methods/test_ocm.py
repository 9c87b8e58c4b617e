"""OCM: what is replayed, its teacher, its pieces of features, the streams and machines it takes."""

from __future__ import annotations

import copy

import pytest
import torch

from mose_fast.learner.room import least_bytes
from mose_fast.methods import check_room, create_learner
from mose_fast.settings.run import ConfigError, RunConfig


def test_nothing_is_replayed_in_the_first_task_and_at_most_seven_rows_a_class_later(make, teach, batch):
    learner = make("ocm", memory=60, options={"buffer_batch": 60})
    for task, replayed in ((0, 0), (1, 28), (2, 42)):
        teach(learner, tasks=(task,), steps=2)
        assert learner.plan(*batch([2 * task, 2 * task + 1] * 5)).sizes == (10, replayed)
    same = teach(make("ocm", options={"first_task": "same"}), tasks=(0,), steps=2)
    assert same.plan(*batch([0, 1] * 5)).sizes == (10, 12)


def test_the_teacher_is_the_network_at_the_end_of_the_last_task(make, teach):
    learner = teach(make("ocm"), tasks=(0,), steps=2)
    assert not learner.teacher.present
    before = copy.deepcopy(learner.network.state_dict())
    teach(learner, tasks=(1,), steps=2)
    assert learner.teacher.present
    # Its running statistics too, though batch norm is in training mode.
    assert all(torch.equal(t, before[name]) for name, t in learner.teacher.network.state_dict().items())
    views = torch.randn(6, 3, 8, 8)
    assert not torch.equal(learner.teacher.outputs(views).logits[:3], learner.teacher.outputs(views[:3]).logits)


def test_pieces_begin_at_every_place_and_both_sets_have_one_of_their_own(make, batch):
    learner = make("ocm", width=2, options={"projection": 10})  # 16 features
    places = []
    for step in range(60):
        learner.data.steps = step
        places += learner.extras(torch.zeros(0), (0, 0))["offsets"].tolist()
    assert set(places) == set(range(6)) and places[::2] != places[1::2]


def test_rows_of_memory_alone_have_no_teacher(make, teach):
    """Nothing was trained before a run trains on its final memory."""
    learner = teach(make("ocm"))
    assert learner.teacher.present
    assert learner.rehearse(torch.arange(12)).keys() == {"loss", "cross_entropy", "replayed"}


@pytest.mark.parametrize("rotations", [16, 4])
def test_a_stream_whose_labels_rotating_changes_is_refused(rotations):
    options = {"rotations": rotations}
    with pytest.raises(
        ConfigError, match=f"options.rotations is {rotations}, but images are not mirrored here, .* is 'auto'"
    ):
        create_learner(method="ocm", classes=4, width=1, device="cpu", options=options, mirror_safe=False)
    for allowed in ({**options, "mirror": "on"}, {"rotations": 1}):
        create_learner(method="ocm", classes=4, width=1, device="cpu", options=allowed, mirror_safe=False)


def test_quarter_turns_want_square_images():
    def create(rotations):
        options = {"rotations": rotations, "buffer_batch": 4}
        return create_learner(
            method="ocm", classes=4, width=1, memory=8, device="cpu", options=options, image_size=(8, 16)
        )

    with pytest.raises(ConfigError, match="images have 8x16 pixels and quarter turns want square ones"):
        create(16)
    learner = create(4)
    for task in range(2):
        x = torch.randint(0, 256, (4, 8, 16, 3), dtype=torch.uint8)
        assert learner.observe(x, [0, 1, 0, 1], task)["loss"].isfinite()


def test_no_rotations_leave_two_views_of_each_row(make, teach, batch):
    learner = teach(make("ocm", options={"rotations": 1}))
    rows = learner.plan(*batch([4, 5] * 5))
    assert rows.sizes == (10, 12) and len(learner.make_views(rows)) == 2 * 22 + 12 + 12


def test_the_room_for_the_views_is_what_a_step_keeps(make, teach, batch):
    """Counted with autograd's own hooks: at least the estimate, and not much more."""
    learner = teach(make("ocm", width=8, options={"buffer_batch": 28}))
    kept: dict[int, int] = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    plan = learner.plan(*batch([2, 3] * 5))
    assert plan.sizes == (10, 28)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner.step(learner.inputs(plan))
    weights = sum(p.nbytes for p in learner.network.parameters())
    views = least_bytes(learner.config, learner.image_size, 4).views
    assert views <= sum(kept.values()) - weights < 1.6 * views


def test_a_machine_too_small_for_the_views_is_named(monkeypatch):
    monkeypatch.setattr("mose_fast.learner.room.available_bytes", lambda: 8 * 10**9)
    with pytest.raises(ConfigError, match=r"options.buffer_batch is 64, .* the views of a step at least 11.1 GB"):
        check_room(RunConfig.create(method="ocm", device="cpu"), (32, 32), 100)
    check_room(RunConfig.create(method="ocm", device="cpu", precision="bf16"), (32, 32), 100)
    check_room(RunConfig.create(method="er", device="cpu"), (32, 32), 100)
