"""Every method whose steps are captured, on the simulated GPU: its graphs give the bits of eager
steps, its steps never wait for the GPU, and plans and steps are in order.
"""

from __future__ import annotations

import math
from functools import partialmethod
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mose_fast import _loader
from mose_fast.learner.prepared import ViewsToCome
from mose_fast.methods import METHODS, Er, Mose, Planning, ReplayLearner
from mose_fast.nn.kernels import KERNELS
from mose_fast.runs.checkpoint import latest, load_checkpoint
from mose_fast.settings.run import METHOD_SETTINGS, RunConfig
from mose_fast.train import TrainingDiverged, resume, run
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train.captured import CapturedSteps
from tests.listeners import Losses
from tests.races.simulated_gpu import SimulatedGpu
from tests.unit.learner.ema import entered

CAPTURED = [name for name in METHODS if METHODS[name].planning is Planning.CAPTURED]
# Each method with one kind of kernels, in turn: a method's own code is the same with both.
PAIRS = list(dict.fromkeys([*zip(CAPTURED, cycle(KERNELS), strict=False), *product(["er", "mose"], KERNELS)]))

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
# A step of the second task, which is replayed; with two for each batch, the first of one.
BROKEN = 8

TAUGHT = {
    "teacher": "momentum",
    "teacher_statistics": "running",
    "teacher_rows": "buffer",
    "teacher_raw": True,
    "predict_with": "teacher",
    "pull_back": 0.5,
}


def settings(name: str, **changes: Any) -> RunConfig:
    # Few rows, so that their number soon stays the same.
    options, known = {"buffer_batch": 4}, METHOD_SETTINGS[name].options
    options |= {"new_extra": 2} if hasattr(known, "new_extra") else {}
    options |= {"rotations": 4, "mirror": "on"} if hasattr(known, "rotations") else {}
    options |= changes.pop("options", {})
    return RunConfig.create(method=name, **SETTINGS | changes | {"options": options})


class Outcome(NamedTuple):
    """What two tasks with checkpoints and evaluations leave."""

    accuracy: Any
    state: dict[str, bytes]
    losses: dict[int, Any]
    graphs: int
    replays: int


def outcome(config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch, broken: int | None = None) -> Outcome:
    """Of a run without races. The views of one step may be broken: they are not finite, and a
    second run goes on from the state before it.
    """
    learner, create, steps, losses = METHODS[config.method], CapturedSteps, [], Losses()
    inputs, spoil = learner.inputs, {broken}

    def spoilt(self, plan, stored=None):
        if plan.sequence not in spoil:
            return inputs(self, plan, stored)
        # MOSE's steps make their views themselves.
        made = self.step_inputs(plan, ready=True) if learner is Mose else inputs(self, plan, stored)
        if isinstance(made, ViewsToCome):
            made = made.complete(made.make())
        return made._replace(views=made.views * math.nan)

    def noted(*args, **how):
        steps.append(create(*args, **how))
        return steps[-1]

    # Not the function itself: a learner with a function of another file is other code, which cannot
    # resume.
    with monkeypatch.context() as patched, SimulatedGpu(done=0.3) as gpu:
        patched.setattr(learner, "inputs", partialmethod(spoilt))
        patched.setattr(pipeline_module, "CapturedSteps", noted)
        if broken is None:
            results = run(config, out=out, listeners=[losses])
        else:
            with pytest.raises(TrainingDiverged, match="The newest is the state before this batch"):
                run(config, out=out, listeners=[losses])
            spoil.clear()
            results = resume(out, listeners=[losses])
    assert not any(one.traceback for one in steps), steps[0].traceback
    assert not gpu.races, "\n".join(map(str, gpu.races))
    state = load_checkpoint(latest(out / "checkpoints"))[0]
    kept = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
    return Outcome(results["accuracy"], kept, dict(losses.told), sum(one.graphs for one in steps), gpu.replays)


def expect_equal_steps(
    config: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch, broken: int = BROKEN
) -> None:
    captured = outcome(settings(**config, step="captured"), out / "captured", monkeypatch, broken)
    eager = outcome(settings(**config, step="eager"), out / "eager", monkeypatch)
    assert captured.accuracy == eager.accuracy
    # Not the bytes themselves, whose differences pytest would work out for minutes.
    assert captured.state.keys() == eager.state.keys()
    assert [name for name, kept in captured.state.items() if kept != eager.state[name]] == []
    assert captured.losses == eager.losses
    assert (eager.graphs, eager.replays) == (0, 0) and captured.graphs > 0 and captured.replays > 1
    if config.get("feed") == "dali":
        return  # The simulated views are not DALI's.
    # The optimisers that a GPU has do what those of the CPU do.
    plain = Losses()
    run(settings(**config | {"device": "cpu"}), listeners=[plain])
    for batch, wanted in plain.told:
        assert captured.losses[batch] == (None if wanted is None else pytest.approx(wanted, rel=2e-2, abs=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernels"), PAIRS)
def test_captured_steps_are_the_eager_ones(name, kernels, tmp_path, monkeypatch):
    expect_equal_steps({"name": name, "kernels": kernels}, tmp_path, monkeypatch)


@pytest.mark.slow
def test_what_a_method_keeps_of_its_own(tmp_path, monkeypatch):
    """A momentum teacher, which steps write, and counts, which plans write."""
    with entered():
        expect_equal_steps({"name": "ema"}, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"name": "er", "options": {"optimiser": "sgd", "passes": "separate", "augment": "pad_crop"}},
        {"name": "er", "feed": "dali", "options": {"memory_policy": "balanced"}},
        {"name": "agem", "kernels": "fused", "precision": "bf16"},
        {"name": "scr", "kernels": "fused", "precision": "bf16", "options": {"review": True}},
        {"name": "derpp", "kernels": "fused", "options": {"memory_policy": "balanced", "passes": "separate"}},
        {"name": "er", "options": {"teacher": "momentum", "teacher_raw": True, "predict_with": "mean"}},
        {"name": "mose", "kernels": "fused", "precision": "bf16", "options": {"experts": 2, **TAUGHT}},
        {"name": "derpp", "options": {"iterations": 2, "logit_adjustment": 1.0, "view_chain": 0.8}},
        {"name": "mose", "kernels": "fused", "options": {"experts": 2, "logit_adjustment": 1.0, "view_chain": 0.8}},
    ],
    ids=str,
)
def test_switches_that_steps_depend_on(config, tmp_path, monkeypatch):
    # A review has five steps more between the tasks.
    expect_equal_steps(config, tmp_path, monkeypatch, 13 if config.get("options", {}).get("review") else BROKEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["er", "mose"])
def test_the_switches_of_all_methods(name, tmp_path, monkeypatch):
    """Two steps a batch, a review at the end of a task, a memory that is balanced over the
    classes. Step 21 is the first of a batch of the second task.
    """
    options = {"buffer_batch": 4, "iterations": 2, "review": True, "memory_policy": "balanced"}
    options |= {"experts": 2} if name == "mose" else {}
    expect_equal_steps({"name": name, "kernels": "fused", "options": options}, tmp_path, monkeypatch, 21)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["er", "derpp"])
def test_training_on_the_final_memory_is_captured(name):
    with SimulatedGpu(done=0.3) as gpu:
        run(settings(name, train_on="final_memory", epochs=3))
    assert not gpu.races, "\n".join(map(str, gpu.races))
    assert gpu.replays > 4


# Faults in a method


def asks_for_a_value(learner: Er, outputs: Any, rows: Any) -> dict[str, torch.Tensor]:
    assert float(outputs.logits.sum()) < 1e9
    return ReplayLearner.losses(learner, outputs, rows)


def indexes_by_a_mask(learner: Er, outputs: Any, rows: Any) -> dict[str, torch.Tensor]:
    return {"some": outputs.logits[rows.labels >= 0].square().mean()}


def reads_what_changes(learner: Er, outputs: Any, rows: Any) -> dict[str, torch.Tensor]:
    terms = ReplayLearner.losses(learner, outputs, rows)
    return {name: term * (1 + learner.steps) for name, term in terms.items()}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [asks_for_a_value, indexes_by_a_mask])
def test_a_step_that_waits_for_the_gpu_is_reported(fault, monkeypatch):
    monkeypatch.setattr(Er, "losses", fault)
    with (
        SimulatedGpu() as gpu,
        pytest.warns(UserWarning, match="no CUDA graph .*not permitted when stream is capturing"),
    ):
        run(settings("er", step="captured"))
    assert gpu.replays == 0


@pytest.mark.slow
def test_a_step_that_reads_what_changes_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Er, "losses", reads_what_changes)
    with pytest.raises(AssertionError):
        expect_equal_steps({"name": "er"}, tmp_path, monkeypatch)
