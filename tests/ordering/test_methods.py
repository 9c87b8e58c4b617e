"""Every method whose steps are captured, on the stand-in card: its graphs give the bits of eager
steps, its steps never wait for the card, and plans and steps are in order.
"""

from __future__ import annotations

import math
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from mose_fast import _loader
from mose_fast.config import METHOD_SETTINGS, RunConfig
from mose_fast.methods import METHODS, Mose, Planning
from mose_fast.train import Listener, TrainingDiverged, resume, run
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.checkpoint import latest, load_checkpoint
from tests.ordering.card import Card

CAPTURED = [name for name in METHODS if METHODS[name].planning is Planning.CAPTURED]

pytestmark = [
    pytest.mark.skipif(_loader.native is None, reason="there is no native library, without which nothing is captured"),
    pytest.mark.filterwarnings("ignore:preset .* is meant for another protocol"),
    pytest.mark.filterwarnings("ignore:.* classes seen have no sample in the memory"),
    pytest.mark.filterwarnings("ignore:.* needs several tasks"),
]

# Two tasks of seven batches of four, the last of two rows.
SETTINGS = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 26, "batch": 4},
    "width": 8 if _loader.native is not None and _loader.record["backend"] == "emulated" else 1,
    "memory": 20,
    "device": "cuda",
    "feed": "fused",
    "precision": "fp32",
    "evaluation_batch": 512,
    "checkpoint_every": 5,
}
# A step of the second task.
BROKEN = 9


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Losses(Listener):
    def __init__(self) -> None:
        self.told: list[tuple[int, Any]] = []

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        self.told.append((batch, losses))


def settings(name: str, preset: str | None = None, **changes: Any) -> RunConfig:
    # Few rows, so that their number soon stays the same.
    options, known = {"buffer_batch": 4}, METHOD_SETTINGS[name].options
    options |= {"new_extra": 2} if hasattr(known, "new_extra") else {}
    options |= {"rotations": 4, "mirror": "on"} if hasattr(known, "rotations") else {}
    return RunConfig.create(preset, method=name, **SETTINGS | {"options": options} | changes)


def outcome(config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch, number: int = BROKEN) -> tuple[Any, ...]:
    """What two tasks leave, with checkpoints and evaluations; the views of the step with a number
    are not finite, and a second run goes on from the state before it. Last, the numbers of graphs
    and of replays.
    """
    learner, create, steps = METHODS[config.method], CapturedSteps, []
    inputs, broken = learner.inputs, {number}

    def spoilt(self, plan, stored=None):
        if plan.sequence not in broken:
            return inputs(self, plan, stored)
        # MOSE's steps make their views themselves.
        made = self.step_inputs(plan, ready=True) if learner is Mose else inputs(self, plan, stored)
        return made._replace(views=made.views * math.nan)

    def noted(*args, **how):
        steps.append(create(*args, **how))
        return steps[-1]

    # Not the function itself: a learner with a function of another file is other code, which cannot
    # resume.
    monkeypatch.setattr(learner, "inputs", partialmethod(spoilt))
    monkeypatch.setattr(pipeline_module, "CapturedSteps", noted)
    losses = Losses()
    with Card(done=0.3) as card:
        with pytest.raises(TrainingDiverged, match="The newest is the state before this batch"):
            run(config, out=out, listeners=[losses])
        broken.clear()
        results = resume(out, listeners=[losses])
    monkeypatch.undo()
    assert not any(one.traceback for one in steps), steps[0].traceback
    assert not card.races, "\n".join(map(str, card.races))
    state = load_checkpoint(latest(out / "checkpoints"))[0]
    kept = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
    return results["accuracy"], kept, losses.told, (sum(one.graphs for one in steps), card.replays)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_are_the_eager_ones(name, kernels, tmp_path, monkeypatch):
    captured, eager = (
        outcome(settings(name, kernels=kernels, step=step), tmp_path / step, monkeypatch)
        for step in ("captured", "eager")
    )
    assert captured[:3] == eager[:3]
    assert eager[3] == (0, 0) and captured[3][0] > 0 and captured[3][1] > 1


@pytest.mark.parametrize("name", ["er", "mose"])
def test_captured_steps_are_the_eager_ones_with_the_switches_of_all_methods(name, tmp_path, monkeypatch):
    """Two steps a batch, a review at the end of a task, a memory that is balanced over the
    classes. Step 21 is the first of a batch of the second task.
    """
    options = {"buffer_batch": 4, "iterations": 2, "review": True, "memory_policy": "balanced"}
    captured, eager = (
        outcome(settings(name, kernels="fused", step=step, options=options), tmp_path / step, monkeypatch, 21)
        for step in ("captured", "eager")
    )
    assert captured[:3] == eager[:3]
    assert eager[3] == (0, 0) and captured[3][0] > 0 and captured[3][1] > 8
