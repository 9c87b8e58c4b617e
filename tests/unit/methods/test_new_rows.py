"""Rows of the classifier that belong to classes still to come, and moments that end with a task."""

from __future__ import annotations

import copy
import math
from itertools import cycle

import pytest
import torch

from mose_fast.methods import METHODS
from mose_fast.settings.run import METHOD_SETTINGS, ReplayOptions

# Co2L's losses do not use the classifier, so that nothing moves it.
MASKED = [name for name, learner in METHODS.items() if learner.hides_unseen and name != "co2l"]


def head(learner) -> dict[str, torch.Tensor]:
    found = learner.network.classifier1.named_parameters()
    return {name: p.detach().clone() for name, p in found if p.dim()}


def moments(learner) -> list[torch.Tensor]:
    return [tensor for state in learner.model.optimiser.state.values() for tensor in state.values()]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kernels"), zip(MASKED, cycle(["torch", "fused"]), strict=False))
def test_a_class_starts_with_untrained_rows_and_without_moments(method, kernels, make, batch):
    """However long weight decay has worked on its row before: Adam takes it to zero in a task."""
    lr, seen = 0.05, []
    learner = make(method, kernels=kernels, options={"replay_from": "others", "lr": lr})
    untrained, step = head(learner), learner.train_on

    def noted(rows):
        seen.append((copy.deepcopy(rows.extras.get("new")), head(learner)))
        return step(rows)

    learner.train_on = noted
    for number in range(25):
        learner.observe(*batch([0, 1] * 5, seed=number), 0)
    decayed = head(learner)["weight"][2:].norm(dim=1)
    assert seen[0][0] is None and decayed.max() < 0.3 * untrained["weight"][2:].norm(dim=1).min()
    # Without moments, the first update is at most the learning rate times 0.1 / sqrt(0.001).
    learner.observe(*batch([2] * 10), 1)
    (new, _), now = seen[-1], head(learner)
    assert new.tolist() == [False, False, True, False, False, False]
    largest = lr * 0.1 / math.sqrt(0.001) * (1 + 1e-4)
    if method != "lucir":  # which imprints it
        assert all((now[name][2] - untrained[name][2]).abs().max() < largest for name in now)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_a_step_that_is_not_taken_makes_no_row_anew(kernels, make, teach, batch):
    learner = teach(make("ssil", kernels=kernels, options={"replay_from": "others"}), tasks=(0,))
    with torch.no_grad():
        learner.network.classifier1.bias[0] = math.nan
    before = learner.weights_hash(), [tensor.clone() for tensor in moments(learner)]
    assert learner.observe(*batch([2, 3] * 5), 1)["loss"].isnan()
    assert learner.weights_hash() == before[0]
    assert all(torch.equal(*pair) for pair in zip(moments(learner), before[1], strict=True))


def test_a_batch_that_is_undone_leaves_its_classes_new(make, teach, batch):
    learner = teach(make("ccil"), tasks=(0,))
    learner.prepare(*batch([2, 3] * 5), 1).undo()
    assert learner.data.own["had"] == [0, 1]
    assert (
        learner.prepare(*batch([2, 3] * 5), 1).steps[0].plan.extras["new"].tolist()
        == [False] * 2 + [True] * 2 + [False] * 2
    )


def test_known_classes_are_new_at_the_start_of_their_task(make, batch):
    learner = make("bic", memory=6, options={"current_classes": "task"})
    for task, classes in enumerate(([0, 1], [4, 2, 3])):
        learner.begin_task(task, classes)
        plan = learner.prepare(*batch([classes[0]] * 10), task).steps[0].plan
    assert plan.extras["new"].nonzero().flatten().tolist() == [2, 3, 4]


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_an_optimiser_for_each_task_is_a_new_one(optimiser, kernels, make, teach, batch):
    """The steps of the second task are those of a learner that has the first one's weights and a
    new optimiser.
    """
    options = {"optimiser": optimiser, "optimiser_per_task": True, "augment": "none", "replay_from": "others"}
    learner = teach(make("er", kernels=kernels, options=options), tasks=(0,))
    learner.end_task()
    assert not any(tensor.any() for tensor in moments(learner))
    other = make("er", kernels=kernels, options={**options, "optimiser_per_task": False})
    tensors, values = learner.state()
    other.load_state({name: t.clone() for name, t in tensors.items() if not name.startswith("adam/")}, values)
    for one in (learner, other):
        teach(one, tasks=(1,))
    assert learner.weights_hash() == other.weights_hash()


def test_every_method_that_trains_on_batches_can_have_an_optimiser_for_each_task():
    for name, settings in METHOD_SETTINGS.items():
        has_it = "optimiser_per_task" in settings.options.__dataclass_fields__
        assert has_it == issubclass(settings.options, ReplayOptions) == (name != "gdumb")
