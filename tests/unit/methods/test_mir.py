"""MIR: which candidates are replayed, and what scoring them leaves untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from mose_fast.settings.run import ConfigError, RunConfig
from tests.unit.methods.by_hand import tensor_bits


def test_as_many_candidates_as_draws_is_er_bit_for_bit(make, teach):
    """Appendix of the issue: without a choice, maximally interfered retrieval is random replay."""
    mir, er = make("mir", options={"candidates": 12}), make("er")
    assert tensor_bits(teach(mir)) == tensor_bits(teach(er))
    more = teach(make("mir", options={"candidates": 13}))
    assert more.weights_hash() != mir.weights_hash()


def test_scoring_that_cannot_choose_changes_nothing_either(make, teach, batch, monkeypatch):
    """With equal scores the first candidates drawn are replayed, as if no more had been drawn;
    scoring leaves no trace.
    """
    mir, er = teach(make("mir", options={"candidates": 24})), teach(make("er"))
    tensors, values = mir.state()
    er.load_state({name: t.clone() for name, t in tensors.items()}, values)
    score = type(mir).interference
    monkeypatch.setattr(type(mir), "interference", lambda *arguments: score(*arguments) * 0)
    first = []
    draw = er.memory.draw
    er.memory.draw = lambda count, **how: (first.append(draw(24, **how)), first[-1][:count])[1]
    for one in (mir, er):
        one.observe(*batch([4, 5] * 5), task=2)
    assert tensor_bits(mir) == tensor_bits(er)


def test_interference_of_augmented_rows_against_a_copied_model(make, teach, batch):
    mir = teach(make("mir", options={"augment": "simclr", "candidates": 20, "virtual_lr": 0.3}))
    x, y = batch([4, 5] * 5)
    slots = torch.arange(20)
    before = tensor_bits(mir)
    rise = mir.interference(x, y, slots)
    assert tensor_bits(mir) == before
    moved = copy.deepcopy(mir.network).train()
    views = mir.make_views(mir.rows(x, y, slots))[:10]  # the very views of the step
    F.cross_entropy(moved(views).logits[0], y).backward()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter -= 0.3 * parameter.grad
        images = mir.views.normalise(mir.memory.images[slots])
        logits = [network(images).logits[0] for network in (moved, copy.deepcopy(mir.network).train())]
    for n, label in enumerate(mir.memory.labels[slots].tolist()):
        after, now = (-logit[n].log_softmax(0)[label].item() for logit in logits)
        assert rise[n].item() == pytest.approx(after - now, abs=1e-4)


def test_scores_are_float32_in_a_bf16_run(make, teach, batch):
    mir = teach(make("mir", precision="bf16"))
    rise = mir.interference(*batch([4, 5] * 5), torch.arange(30))
    assert rise.dtype == torch.float32 and not torch.equal(rise, rise.bfloat16().float())


def test_fewer_samples_than_candidates_asked_for(make, teach):
    mir = teach(make("mir", memory=16, options={"candidates": 500, "buffer_batch": 12}))
    assert mir.steps == 8 and mir.memory.filled == 16


def test_the_official_preset_draws_candidates_of_finished_tasks(make, teach, batch):
    mir = teach(make("mir", memory=100, preset="official"))
    drawn = []
    score = mir.interference
    mir.interference = lambda x, y, slots: (drawn.append(mir.memory.labels[slots].tolist()), score(x, y, slots))[1]
    mir.observe(*batch([2, 3] * 5), task=1)
    assert len(drawn[0]) == 40 and set(drawn[0]) == {0, 1}
    assert isinstance(mir.model.optimiser, torch.optim.SGD)


def test_fewer_candidates_than_replayed_rows_are_refused():
    with pytest.raises(ConfigError, match=r"options.candidates is 50; wanted at least options.buffer_batch, 64"):
        RunConfig.create(method="mir", options={"candidates": 50})
