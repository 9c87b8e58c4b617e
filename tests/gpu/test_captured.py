"""Captured steps on a GPU: the bits of eager ones, two graphs a run, nothing that waits for the
GPU between two steps.
"""

from __future__ import annotations

import gc
import math
import os
import signal
from functools import partialmethod

import pytest
import torch

from mose_fast import _dali
from mose_fast.memory import ReplayMemory
from mose_fast.methods import METHODS, Mose, Planning, create_learner
from mose_fast.runs.checkpoint import CheckpointWriter, Snapshot, latest, load_checkpoint
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import create
from mose_fast.train import Interrupted, Listener, TrainingDiverged, resume, run
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.pipeline import LossReader, Taken
from mose_fast.train.ring import Ring
from tests.unit.train.small import outcome as compared

pytestmark = pytest.mark.needs("graphs")

# Read when a handle of cuBLAS is made, which may be before the first run here.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Two tasks of 36 batches, long enough for full shapes; the last batch of a task is smaller.
SETTINGS = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 355},
    "options": {"buffer_batch": 24, "new_extra": 6},
    "width": 8,
    "memory": 200,
    "device": "cuda",
    "deterministic": True,
    "feed": "fused",
}
BATCHES = 72


def settings(**changes) -> RunConfig:
    return RunConfig.create(**SETTINGS | changes | {"options": SETTINGS["options"] | changes.get("options", {})})


@pytest.fixture
def steppers(monkeypatch):
    """Everything that takes steps in a run, to look into it afterwards."""
    made = []

    def remember(learner, **how):
        made.append(CapturedSteps(learner, **how))
        return made[-1]

    monkeypatch.setattr(pipeline_module, "CapturedSteps", remember)
    return made


class Losses(Listener):
    def __init__(self, at=None, act=lambda: None):
        self.told, self.at, self.act = [], at, act

    def on_batch(self, batch, losses):
        self.told.append((batch, losses))
        if batch == self.at:
            self.act()


def outcome(results: dict) -> dict:
    return compared(results) | {"resolved": {**results["resolved"], "step": None}}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_captured_steps_are_eager_steps(steppers, precision):
    found, losses = [], []
    for step in ("captured", "captured", "eager"):
        listener = Losses()
        results = run(settings(step=step, precision=precision), listeners=[listener])
        assert results["resolved"]["step"] == step
        found.append(outcome(results))
        losses.append(listener.told)
    assert losses[0] == losses[1] == losses[2] and [batch for batch, _ in losses[0]] == list(range(1, BATCHES + 1))
    assert found[0] == found[1] == found[2]
    captured, again, eager = steppers
    assert captured.graphs == again.graphs == 2 and eager.graphs == 0
    assert captured.obstacle == again.obstacle == ""


def test_kernels_without_padding_have_a_graph_for_each_shape_that_comes_twice(steppers):
    """Gates are off: PyTorch's up-sampling has no deterministic backward pass."""
    options = {"attention": False}
    found = [outcome(run(settings(step=step, kernels="torch", options=options))) for step in ("captured", "eager")]
    assert found[0] == found[1]
    captured = steppers[0]
    assert captured.obstacle == "" and 2 <= captured.graphs < len(captured._met)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].planning is Planning.CAPTURED])
def test_every_methods_captured_steps_are_its_eager_ones(steppers, name, precision):
    found = []
    for step in ("captured", "eager"):
        listener, options = Losses(), {"buffer_batch": 24}
        config = RunConfig.create(
            method=name, **SETTINGS | {"options": options, "step": step, "precision": precision, "memory": 60}
        )
        found.append((outcome(run(config, listeners=[listener])), listener.told))
    assert found[0] == found[1]
    captured, eager = steppers
    assert captured.obstacle == "" and captured.graphs > 0 == eager.graphs


@pytest.mark.skipif(_dali.obstacle() is not None, reason="DALI is not installed")
def test_views_made_outside_the_graph(steppers):
    found = [outcome(run(settings(step=step, feed="dali"))) for step in ("captured", "eager")]
    assert found[0] == found[1] and steppers[0].graphs == 2


def plans_on(device: str) -> list:
    stream = create(settings().stream)
    learner = create_learner(settings(device=device), **stream.spec)
    plans = []
    for task in range(2):
        learner.begin_task(task, stream.tasks[task])
        for rows in stream.batches(task, seed=0):
            prepared = learner.prepare(stream.x_train[rows], stream.y_train[rows], task, index=rows)
            for plan in [step.plan for step in prepared.steps]:
                plans.append((plan.images.cpu(), plan.labels.cpu(), plan.composition, plan.current_classes))
    return plans


def test_plans_are_those_of_the_cpu():
    for ours, wanted in zip(plans_on("cuda"), plans_on("cpu"), strict=True):
        assert torch.equal(ours[0], wanted[0]) and torch.equal(ours[1], wanted[1]) and ours[2] == wanted[2]
        assert (ours[3] is None) == (wanted[3] is None)
        assert ours[3] is None or torch.equal(ours[3].cpu(), wanted[3])


def test_the_host_knows_what_the_memory_on_the_gpu_holds():
    memory = ReplayMemory(50, (8, 8), seed=3, device="cuda")
    for step in range(40):
        index = torch.arange(10 * step, 10 * step + 10)
        x = torch.zeros(10, 8, 8, 3, dtype=torch.uint8)
        with memory.record() as record:
            memory.insert(x.cuda(), (index % 4).cuda(), step // 10, index.cuda())
        if step % 3 == 0:
            memory.restore(record)
            memory.insert(x.cuda(), (index % 4).cuda(), step // 10, index.cuda())
        drawn = memory.draw(20, only=step // 10)
        assert torch.equal(memory.twin.tasks, memory.tasks.cpu()) and torch.equal(memory.twin.state, memory.state.cpu())
        assert (memory.tasks[drawn] == step // 10).all() and len(drawn) == min(
            20, int((memory.tasks == step // 10).sum())
        )


@pytest.mark.parametrize("step", ["captured", "eager"])
def test_nothing_waits_for_the_gpu_between_two_steps(step):
    config = settings(step=step)
    stream = create(config.stream)
    learner = create_learner(config, **stream.spec)
    images, own = stream.x_train.cuda(), torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        steps = CapturedSteps(learner, capture=step == "captured")
        ring, reader = Ring(learner), LossReader(learner)
        batches = [(task, rows) for task in range(2) for rows in stream.batches(task, seed=0)]
        # The second task's full shape, its graph and all cached allocations are there by now.
        quiet = len(batches) - 12
        numbers = [rows.cuda() for _, rows in batches]
        told = []
        try:
            for i, (task, rows) in enumerate(batches):
                if i == quiet:
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                ring.put(
                    lambda n=numbers[i], y=stream.y_train[rows], task=task: {
                        "x": images[n],
                        "y": y,
                        "task": task,
                        "index": n,
                    }
                )
                if not ring.full:
                    continue
                prepared = ring.take()
                reader.add(Taken(prepared, {}), prepared.take(steps))
                told += reader.drain()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        told += reader.drain(wait=True)
    assert len(told) == len(batches) - 3 and all(losses is None or math.isfinite(losses["loss"]) for _, losses in told)


def test_a_step_that_cannot_be_captured_is_taken_eagerly(monkeypatch, steppers):
    train_on = Mose.train_on

    def fails(learner, inputs):
        if torch.cuda.is_current_stream_capturing():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")
        return train_on(learner, inputs)

    with monkeypatch.context() as patched:
        patched.setattr(Mose, "train_on", fails)
        with pytest.warns(
            UserWarning, match=r"no CUDA graph .* \(CUDA out of memory.*\); the run continues with eager steps"
        ) as told:
            found = outcome(run(settings(step="captured")))
    assert ["CUDA graph" in str(w.message) for w in told].count(True) == 1 and steppers[0].graphs == 0
    assert found == outcome(run(settings(step="eager")))


def test_a_capture_that_waits_for_the_gpu_breaks_nothing_that_comes_later(monkeypatch, steppers):
    """``item`` makes a capture invalid.

    Up to PyTorch 2.11 its allocator then goes on as if it were capturing.
    """
    train_on = Mose.train_on

    def asks(learner, inputs):
        losses = train_on(learner, inputs)
        assert losses["loss"].item() != 0
        return losses

    with monkeypatch.context() as patched:
        patched.setattr(Mose, "train_on", asks)
        with pytest.warns(UserWarning, match=r"no CUDA graph .*; the run continues with eager steps") as told:
            results = run(settings(step="captured"))
    steps = steppers.pop()
    assert ["CUDA graph" in str(w.message) for w in told].count(True) == 1 and steps.graphs == 0
    assert 'losses["loss"].item()' in steps.traceback and results["resolved"]["step"] == "eager"
    gc.collect()
    # Asserts inside where a capture is still believed to go on.
    torch.cuda.empty_cache()
    assert not [
        segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == tuple(steps._pool)
    ]
    # What two streams have used is given back.
    side, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
    used = torch.empty(2**24, device="cuda")
    used.record_stream(side)
    del used
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() <= before + 2**20
    # The next run is captured, with the bits of one without any graph.
    again = run(settings(step="captured"))
    assert steppers[0].graphs == 2 and outcome(again) == outcome(results) == outcome(run(settings(step="eager")))


def test_a_method_that_looks_at_the_network_is_not_captured():
    learner = create_learner(classes=4, method="mir", memory=100, image_size=(8, 8), width=1, device="cuda")
    assert str(learner.stepping) == "eager (method 'mir' looks at the network to plan a step)"
    with pytest.raises(ConfigError, match="step is 'captured', but method 'mir' looks at the network"):
        create_learner(classes=4, method="mir", step="captured", memory=100, image_size=(8, 8), width=1, device="cuda")


@pytest.mark.parametrize("how", ["Ctrl-C", "listener"])
def test_a_stopped_run_goes_on_exactly(tmp_path, how):
    def stop():
        if how == "listener":
            raise Interrupted
        signal.raise_signal(signal.SIGINT)

    whole, stopped = Losses(), Losses(50, stop)
    wanted = outcome(run(settings(), listeners=[whole]))
    with pytest.raises(Interrupted):
        run(settings(), out=tmp_path / "run", listeners=[stopped])
    # All steps that were taken have been told, and the checkpoint is after the last of them.
    last = stopped.told[-1][0]
    assert 50 <= last <= 60 and stopped.told == whole.told[:last]
    assert load_checkpoint(latest(tmp_path / "run" / "checkpoints"))[1]["position"]["done"] == last
    rest = Losses()
    assert outcome(resume(tmp_path / "run", listeners=[rest])) == wanted
    assert rest.told == whole.told[last:]


@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_the_state_before_a_loss_that_is_not_finite_is_kept(tmp_path, monkeypatch, kernels):
    """The loss is read some steps late; by then later steps were launched, all of which changed
    nothing.
    """
    config = settings(kernels=kernels, options={"attention": kernels == "fused"}, checkpoint_every=20)
    step_inputs = Mose.step_inputs

    def inputs(learner, plan, rows=None, *, ready=False):
        made = step_inputs(learner, plan, rows, ready=True)
        return (
            made._replace(views=made.views * math.nan)
            if plan.sequence == 48
            else step_inputs(learner, plan, rows, ready=ready)
        )

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        # Not the function itself: a learner with a function of another file is other code, which
        # cannot resume.
        patched.setattr(Mose, "step_inputs", partialmethod(inputs))
        with pytest.raises(
            TrainingDiverged, match=r"at batch 50 \(task 2\): loss nan.*The newest is the state before this batch"
        ):
            run(config, out=out)
    tensors, values = load_checkpoint(latest(out / "checkpoints"))
    assert (
        values["position"]["done"] == 49
        and values["learner"]["steps"] == 48
        and int(tensors["memory/state"][2]) == 355 + 130
    )
    # Resuming with whole data ends where a run ends that never saw the broken ones.
    assert outcome(resume(out)) == outcome(run(config))


def test_runs_leave_no_memory_behind(steppers):
    used = []
    for _ in range(3):
        run(settings(seed=len(used)))
        steppers.clear()
        gc.collect()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_allocated())
    assert used[2] <= used[1] + 2**20


def test_capturing_takes_a_second_at_most_and_is_told_apart():
    seconds = run(settings(width=64, memory=1000))["seconds"]
    assert 0 < seconds["capture"] <= 1


def test_a_checkpoint_takes_a_few_launches_and_holds_the_state_of_its_moment(tmp_path):
    learner = create_learner(settings(), classes=10, image_size=(32, 32))
    with torch.cuda.stream(torch.cuda.Stream()):
        # Gradients of zero are enough for Adam to keep moments of all weights.
        for leaf in learner.model.optimiser.leaves:
            leaf.grad = torch.zeros_like(leaf)
        learner.model.optimiser.step()
        tensors = learner.tensors()
        wanted = {name: tensor.cpu() for name, tensor in tensors.items()}
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            snapshot = Snapshot(tensors)
            assert snapshot.not_finite() is None
            torch.cuda.synchronize()
        launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
        writer = CheckpointWriter(tmp_path, learner.device)
        writer.write(1, snapshot, {})
        for tensor in tensors.values():
            tensor.zero_()
        writer.wait()
        writer.close()
    assert len(tensors) > 700 and launches <= 40
    found, _ = load_checkpoint(latest(tmp_path))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
