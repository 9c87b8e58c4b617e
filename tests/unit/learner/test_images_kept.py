"""What a method keeps of the stream beside its network: images, and bytes in all."""

from __future__ import annotations

import pytest

from mose_fast.learner.exemplar_learner import ExemplarLearner
from mose_fast.methods import METHODS
from mose_fast.settings.run import RunConfig

EXEMPLARS = [name for name, learner in METHODS.items() if issubclass(learner, ExemplarLearner)]


@pytest.mark.slow
@pytest.mark.parametrize("task_images", ["beside", "within"])
@pytest.mark.parametrize("method", EXEMPLARS)
def test_no_more_images_are_kept_than_is_said(method, task_images, make, teach):
    """Three tasks of two classes and forty images: thirty in slots, and what waits in the second
    task.
    """
    learner = teach(make(method, options={"task_images": task_images}), tasks=(0, 1, 2))
    said = METHODS[method].images_kept(learner.config, [(2, 40)] * 3)
    every = method in ("lucir", "il2a")  # herding, and statistics of all images
    assert learner.kept()["images"] == said == (30 if task_images == "within" else 70 if every else 44)


def test_other_methods_keep_the_images_in_their_slots(make, teach):
    for method in ("er", "derpp", "gdumb"):
        learner = teach(make(method, memory=50), steps=2)
        assert learner.kept()["images"] == METHODS[method].images_kept(learner.config, [(2, 20)] * 2) == 40
        assert METHODS[method].images_kept(RunConfig.create(method=method, memory=64), [(2, 40)] * 2) == 64


def test_bytes_are_those_of_all_that_is_kept(make, teach):
    """Images with label, task and index; DER++'s logits; a teacher, and whether there is one;
    IL2A's statistics.
    """
    image, network = 8 * 8 * 3 + 3 * 8, {}
    for method in ("er", "derpp", "ssil", "il2a"):
        learner = teach(make(method), tasks=(0, 1))
        network[method] = sum(t.nbytes for t in learner.network.state_dict().values())
        kept = learner.kept()
        assert kept["bytes"] == kept["images"] * (image + (4 * 6 if method == "derpp" else 0)), method
        teacher = network[method] + 1 if method in ("ssil", "il2a") else 0
        statistics = 4 * 6 * 8 * 9 if method == "il2a" else 0
        assert kept["bytes_beside"] == teacher + statistics, method


def test_learning_within_the_slots_replays_and_learns(make, batch):
    """As many slots as with the images beside them, and nothing in them twice."""
    learner = make("ccil", memory=24, options={"task_images": "within"})
    for task in range(2):
        for step in range(6):
            learner.observe(*batch([2 * task, 2 * task + 1] * 5, seed=10 * task + step), task)
            assert learner.memory.filled + learner.memory.buffer.filled <= 24
        learner.end_task()
    assert learner.memory.filled == 24 and len(set(learner.memory.indices.tolist())) == 24
