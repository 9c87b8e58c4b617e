"""IL2A: its mixed classes, its class statistics, and the switches of replay."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mose_fast.losses.semantic_augmentation import semantic_augmentation
from mose_fast.settings.run import ConfigError


def test_augmented_means_bound_the_loss_over_features_drawn_around_them():
    """And without covariances they are the means alone."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)
    means, roots = torch.randn(4, 6, generator=generator), 0.2 * torch.randn(4, 6, 6, generator=generator)
    covariances, known, drawn = roots @ roots.mT, torch.tensor([True, True, True, False]), torch.tensor([0, 2, 1])

    def loss(ratio):
        return float(semantic_augmentation(weight, bias, means, covariances, drawn, known, ratio=ratio, temperature=1))

    logits = (means[drawn] @ weight.T + bias)[:, :3]
    assert loss(0.0) == pytest.approx(F.cross_entropy(logits, drawn).item(), rel=1e-5)
    drawn_features = means[drawn][:, None] + (
        1.5**0.5 * torch.randn(3, 20000, 6, generator=generator) @ roots[drawn].mT
    )
    sampled = (drawn_features @ weight.T + bias)[..., :3].flatten(0, 1)
    expected = F.cross_entropy(sampled, drawn.repeat_interleave(20000)).item()
    assert loss(0.0) < expected < loss(1.5) < expected + 2


def test_statistics_are_kept_by_label_and_of_each_image_of_the_task(make, teach):
    learner = teach(make("il2a", memory=8, options={"buffer_batch": 8}))
    assert learner.means.any(1).tolist() == [True, True, False, False, False, False]
    kept = learner.means[:2].clone()
    learner.end_task()
    assert learner.means.any(1).tolist() == [True] * 4 + [False] * 2 and torch.equal(learner.means[:2], kept)
    # Of 20 images of a class, more than the two that have a slot.
    assert torch.linalg.matrix_rank(learner.covariances[0].double(), rtol=1e-9) > 2


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_the_outputs_of_pairs_start_anew_with_each_task(make, teach, kernels, optimiser):
    learner = teach(make("il2a", kernels=kernels, options={"largest_task": 2, "optimiser": optimiser}), tasks=(0,))
    head, state = learner.network.projection1, learner.model.optimiser.state
    assert head.weight.shape == (1, 8) and head.weight.any()
    if optimiser == "adam":
        assert state[head.weight]["exp_avg"].any() and state[head.weight]["step"] == 4
    learner.end_task()
    assert not head.weight.any() and not head.bias.any()
    for values in (state.get(parameter, {}) for parameter in head.parameters()):
        assert not any(value.any() for value in values.values())
    teach(learner, tasks=(1,), steps=1)
    assert head.weight.any()


def test_a_task_with_more_classes_than_the_head_has_pairs_is_refused(make, batch):
    learner = make("il2a", options={"largest_task": 2})
    with pytest.raises(ConfigError, match="largest_task is 2, but task 0 has 3 classes or more"):
        learner.observe(*batch([0, 1, 2]), task=0)


def test_the_official_preset_keeps_no_rows_in_its_steps(make, batch, teach):
    learner = make("il2a", preset="official", options={"current_classes": "seen", "augment": "none"})
    teach(learner)
    assert learner.observe(*batch([2, 3] * 5), task=1).keys() == {"loss", "incoming", "distillation", "semantic"}
    learner.end_task()
    assert learner.rehearse(torch.arange(12))["loss"] > 0


def test_in_the_first_task_there_is_nothing_to_keep(make, batch):
    assert make("il2a").observe(*batch([0, 1] * 5), task=0).keys() == {"loss", "incoming"}
