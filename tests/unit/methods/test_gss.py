"""GSS: gradients and scores against slow loops, and when the memory takes a batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mose_fast.methods.gss import cosine_similarity
from tests.unit.methods.by_hand import tensor_bits


def slow_gradient(learner, images, labels) -> torch.Tensor:
    """One batch's gradient in evaluation mode by a plain backward pass on a copy, float64 [n]."""
    network = copy.deepcopy(learner.network).double().eval()
    F.cross_entropy(network(learner.views.normalise(images).double()).logits[0], labels).backward()
    return torch.cat([p.grad.flatten() for p in network.parameters()])


def cosine(a, b) -> float:
    return (a @ b / (a.norm() * b.norm())).item()


def test_similarities_lie_in_minus_one_to_one():
    g = torch.Generator().manual_seed(0)
    a = {"w": torch.randn(4, 3, 2, generator=g), "b": torch.randn(4, 5, generator=g)}
    b = {name: torch.cat([t, -7 * t, torch.zeros_like(t[:1])]) for name, t in a.items()}
    s = cosine_similarity(a, b)
    assert s.shape == (4, 9) and s.abs().max() <= 1
    assert torch.allclose(s.diagonal(), torch.ones(4)) and torch.allclose(s[:, 4:8].diagonal(), -torch.ones(4))
    assert torch.equal(s[:, 8], torch.zeros(4))


def test_stored_scores_lie_in_minus_one_to_one(make, teach):
    gss = teach(make("gss", precision="bf16"), tasks=(0, 1, 2))
    scores = gss.memory.scores
    assert gss.memory.filled == 30 and (scores.abs() <= 1).all()
    assert (scores[:10] == torch.tensor(0.1)).sum() < 30 and scores.unique().numel() > 5


def test_the_first_batch_has_a_score_without_comparison(make, batch):
    gss = make("gss")
    gss.observe(*batch([0, 1] * 5), task=0)
    assert torch.equal(gss.memory.scores[:10], torch.full((10,), 0.1)) and gss.memory.filled == 10


def test_until_the_memory_is_full_gss_is_er_bit_for_bit(make, teach, batch):
    """Scoring leaves weights, running statistics, gradients and replay draws alone."""
    gss, er = make("gss", memory=80), make("er", memory=80)
    assert tensor_bits(teach(gss), "memory/extra/scores") == tensor_bits(teach(er))
    for step in range(2):
        for one in (gss, er):
            one.observe(*batch([4, 5] * 5, seed=step), task=2)
    assert gss.weights_hash() != er.weights_hash()  # the memories differ by now


@pytest.mark.parametrize("threshold", [-1.0, 1.5])
def test_a_full_memory_takes_only_batches_that_point_elsewhere(make, teach, batch, threshold):
    gss = teach(make("gss", options={"threshold": threshold}), steps=3, tasks=(0,))
    assert gss.memory.filled == gss.memory.capacity == 30
    before = gss.memory.indices.clone()
    for step in range(6):
        gss.observe(*batch([2, 3] * 5, seed=50 + step), task=1)
    assert gss.memory.seen == 90
    assert torch.equal(gss.memory.indices, before) == (threshold == -1)
    if threshold > 0:
        assert (gss.memory.tasks == 1).any()


def test_the_gate_compares_the_whole_batch(make, teach, batch):
    """Against the gradient of the batch's mean loss: with a threshold just above it the batch is
    considered, just below not.
    """
    gss = teach(make("gss"), steps=3, tasks=(0,))
    x, y = batch([2, 3] * 5)
    slots = gss.memory.reference(10, 10)
    whole = slow_gradient(gss, x, y)
    similarity = max(cosine(whole, slow_gradient(gss, gss.memory.images[s], gss.memory.labels[s])) for s in slots)
    asked = []
    gss.memory.offer = lambda *arguments: asked.append(arguments)
    for shift in (1e-3, -1e-3):
        object.__setattr__(gss.config.options, "threshold", similarity + shift)
        gss.data.task, gss.memory.seen = 1, 30
        gss.store(x, y, torch.arange(10))
        assert len(asked) == 1


def test_the_official_preset_alternates_steps_ten_times(make, batch):
    gss = make("gss", preset="official")
    gss.observe(*batch([0, 1] * 5), task=0)
    assert gss.steps == 10  # nothing to replay yet
    sizes, step = [], gss.step
    gss.step = lambda rows: (sizes.append(rows.sizes), step(rows))[1]
    losses = gss.observe(*batch([0, 1] * 5, seed=1), task=0)
    assert gss.steps == 30 and sizes == [(10, 0), (0, 10)] * 10
    assert losses["loss"].item() == pytest.approx(losses["incoming"].item() + losses["replayed"].item(), rel=1e-5)
