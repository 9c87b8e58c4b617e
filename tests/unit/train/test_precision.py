"""Precision auto: a run keeps the precision that it began with, wherever it goes on."""

from __future__ import annotations

import pytest
import torch

from mose_fast.device import Choice
from mose_fast.methods import create_learner
from mose_fast.settings.run import RunConfig
from mose_fast.train import Interrupted, resume, run
from tests.listeners import StopAt
from tests.unit.train.small import TWO_TASKS, small_stream

SETTINGS = {**TWO_TASKS, "width": 8}
LEARNER = {"method": "mose", "classes": 4, "width": 1, "memory": 30, "device": "cpu"}
LEARNER |= {"options": {"experts": 2, "buffer_batch": 12}}


def _on_a_gpu(wanted: str, device: torch.device) -> Choice:
    return Choice("bf16", "auto: a GPU's") if wanted == "auto" else Choice(wanted)


@pytest.fixture
def on_cpu(monkeypatch):
    """A machine on which auto is bf16; a function that goes back to one on which it is fp32."""
    monkeypatch.setattr("mose_fast.learner.learner.choose_precision", _on_a_gpu)
    return monkeypatch.undo


def outcome(results: dict) -> dict:
    names = ("accuracy", "buffer_accuracy", "untrained", "weights_sha256", "steps")
    return {name: results[name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "fused"])
def test_a_run_that_began_in_bf16_goes_on_in_bf16(tmp_path, on_cpu, kernels):
    config, stream = RunConfig.create(**SETTINGS, kernels=kernels), small_stream()
    whole = run(config, stream=stream)
    with pytest.raises(Interrupted):
        run(config, stream=stream, out=tmp_path / "run", listeners=[StopAt(6)])
    on_cpu()
    results = resume(tmp_path / "run", stream=stream)
    assert results["config"]["precision"] == "auto"
    assert results["resolved"]["precision"] == "bf16" and results["resolved"]["reasons"] == {
        "precision": "as the run began"
    }
    assert outcome(results) == outcome(whole)
    assert outcome(run(config, stream=stream))["weights_sha256"] != results["weights_sha256"]


def test_a_precision_that_was_asked_for_is_not_changed_by_a_state(on_cpu):
    state = create_learner(**LEARNER).state()
    assert state[1]["precision"] == "bf16"
    asked = create_learner(**LEARNER, precision="tf32")
    on_cpu()
    open_ = create_learner(**LEARNER)
    for made, precision in ((asked, "tf32"), (open_, "bf16")):
        made.load_state(*state)
        assert made.precision.name == precision
    # A state from before the precision was noted changes nothing.
    del state[1]["precision"]
    fresh = create_learner(**LEARNER)
    fresh.load_state(*state)
    assert fresh.precision.name == "fp32"
    assert all(torch.equal(a, b) for a, b in zip(fresh.network.parameters(), open_.network.parameters(), strict=True))
