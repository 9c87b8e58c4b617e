"""What is captured, when, and what a replay reads: with graphs that run on the CPU in place of a
GPU's (tests/gpu has the real ones).
"""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mose_fast.methods import Mose, Prepared, create_learner
from mose_fast.train import captured as captured_module
from mose_fast.train.captured import CapturedSteps, copied_into, layout_of
from mose_fast.train.ring import Ring


class HostGraph:
    """Keeps to a graph's contract: capturing executes nothing, each replay runs the same step on
    what lies in the same tensors then.
    """

    def __init__(self):
        self.step, self.replays = None, 0

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local" and not gc.isenabled()
        self.pool = pool

        def recorded(learner, static):
            self.step = (learner, static)
            names = ("loss", "contrastive", "cross_entropy", "distillation")
            return {name: torch.tensor(float("nan")) for name in names}

        self.recording = mock.patch.object(CapturedStepsLearner, "train_on", recorded)
        self.recording.start()

    def capture_end(self):
        self.recording.stop()

    def replay(self):
        self.replays += 1
        learner, static = self.step
        self.losses.copy_(torch.stack(list(Mose.train_on(learner, static).values())))


@pytest.fixture
def graphs(monkeypatch):
    """All graphs that were made."""
    made = []

    def create():
        made.append(HostGraph())
        return made[-1]

    known = captured_module._Graph

    def kept(graph, inputs, names, losses):
        graph.losses = losses
        return known(graph, inputs, names, losses)

    monkeypatch.setattr(captured_module, "_Graph", kept)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", create)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device_index=7))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    return made


@pytest.fixture
def allocator(monkeypatch):
    """PyTorch's allocator as far as captures go: the calls that were made, and the pools that it
    believes to be captured into.
    """
    calls, underway = [], []

    def end(device, pool):
        calls.append(("end", device, pool))
        if pool not in underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        underway.remove(pool)

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda device, pool: calls.append(("release", device, pool)), raising=False
    )
    monkeypatch.setattr(HostGraph, "reset", lambda graph: calls.append(("reset", graph)), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(("empty", list(underway))))
    return calls, underway


class CapturedStepsLearner(Mose):
    """A class of its own, so that a step can be recorded without patching the one that replays."""

    def train_on(self, inputs):
        return Mose.train_on(self, inputs)

    def inputs(self, plan, stored=None):
        """As on a GPU."""
        return self.step_inputs(plan, self.padded_rows(plan), ready=not self.views.capturable)


def learner(kernels: str, **settings) -> Mose:
    options = {"buffer_batch": 12, "new_extra": 4, "experts": 2}
    given = {
        "classes": 6,
        "image_size": (8, 8),
        "width": 8,
        "memory": 30,
        "device": "cpu",
        "kernels": kernels,
        "feed": "fused",
        "options": options,
    }
    made = create_learner(**given | settings)
    made.__class__ = CapturedStepsLearner
    return made


def stream(batches: int = 5):
    """Two tasks, the last batch of each smaller."""
    generator = torch.Generator().manual_seed(0)
    for task in range(2):
        for step in range(batches):
            y = torch.tensor([2 * task, 2 * task + 1] * 5)[: 3 if step == batches - 1 else 10]
            yield (
                (torch.randint(0, 60, (len(y), 8, 8, 3), generator=generator) + 30 * y.view(-1, 1, 1, 1)).to(
                    torch.uint8
                ),
                y,
                task,
            )


def prepared_for(one: Mose, batch: tuple) -> Prepared:
    ring = Ring(one, 1)
    ring.put(lambda: dict(zip(("x", "y", "task"), batch, strict=True)))
    return ring.take()


def taken(one: Mose, steps: CapturedSteps) -> list:
    ring, losses = Ring(one, 3), []
    todo = list(stream())
    while todo or len(ring):
        while todo and not ring.full:
            x, y, task = todo.pop(0)
            ring.put(lambda x=x, y=y, task=task: {"x": x, "y": y, "task": task})
        found = ring.take().take(steps)
        losses.append(found and {name: float(value) for name, value in found.items()})
    return losses


def failing(monkeypatch, allocator, *, broken: bool, failures: int = 2) -> None:
    """The first captures fail inside.

    ``broken``: their end then fails, too, and does not tell the allocator, as in PyTorch 2.11.
    """
    _, underway = allocator
    begin, end, left = HostGraph.capture_begin, HostGraph.capture_end, [failures]

    def asks_the_gpu(learner, static):
        raise ValueError("the first error, inside\nmore lines")

    def begins(graph, pool, capture_error_mode):
        begin(graph, pool, capture_error_mode)
        underway.append(pool)
        if left[0]:
            CapturedStepsLearner.train_on = asks_the_gpu

    def ends(graph):
        end(graph)
        left[0], failed = max(left[0] - 1, 0), left[0] > 0
        if failed and broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        underway.remove(graph.pool)

    monkeypatch.setattr(HostGraph, "capture_begin", begins)
    monkeypatch.setattr(HostGraph, "capture_end", ends)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_two_failures_end_capturing_and_harm_nothing(graphs, allocator, monkeypatch, broken):
    failing(monkeypatch, allocator, broken=broken)
    captured, eager = learner("fused"), learner("fused")
    steps = CapturedSteps(captured)
    with pytest.warns(
        UserWarning, match=r"no CUDA graph of a step could be captured \(the first error, inside\); "
    ) as told:
        found = taken(captured, steps)
    assert len(told) == 1 and (steps.graphs, steps.replays, steps.retries) == (0, 0, 1) and len(graphs) == 2
    assert steps.obstacle == "the first error, inside"
    assert str(captured.stepping) == "eager (no graph could be captured: the first error, inside)"
    # The whole traceback is kept, of both errors and down to the line that raised, and told.
    assert "more lines" in steps.traceback and "in asks_the_gpu" in steps.traceback
    assert ("previous error during capture" in steps.traceback) == broken
    assert steps.traceback in str(told[0].message)
    assert found == taken(eager, CapturedSteps(eager, capture=False))
    assert captured.weights_hash() == eager.weights_hash()


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_captures_that_failed_leave_the_allocator_as_it_was(graphs, allocator, monkeypatch, broken):
    failing(monkeypatch, allocator, broken=broken)
    calls, underway = allocator
    one = learner("fused")
    monkeypatch.setattr(one.model.optimiser, "zero_grad", lambda set_to_none: calls.append(("gradients", set_to_none)))
    steps, batches = CapturedSteps(one), list(stream())
    prepared_for(one, batches[1])
    inputs = prepared_for(one, batches[2]).steps[0].inputs
    calls.clear()
    with pytest.warns(UserWarning, match="no CUDA graph"):
        assert steps._capture(layout_of(inputs), inputs) is None

    def closed(graph):
        # Where PyTorch has closed all itself, its own count of the pool's users is right: one
        # release more would free what others use.
        released = [("reset", graph), ("release", 7, "the pool")] if broken else []
        return [("end", 7, "the pool"), *released, ("gradients", True)]

    assert calls == [*closed(graphs[0]), ("empty", []), *closed(graphs[1])]
    assert underway == []
    # The allocator of pinned memory may go on asking them.
    assert all((graph in captured_module._BROKEN) == broken for graph in graphs)


def test_ctrl_c_in_a_capture_closes_it_and_goes_on_as_ctrl_c(graphs, allocator, monkeypatch):
    calls, underway = allocator
    begin, end = HostGraph.capture_begin, HostGraph.capture_end

    def begins(graph, pool, capture_error_mode):
        begin(graph, pool, capture_error_mode)
        underway.append(pool)

    def interrupted(graph):
        end(graph)
        raise KeyboardInterrupt

    monkeypatch.setattr(HostGraph, "capture_begin", begins)
    monkeypatch.setattr(HostGraph, "capture_end", interrupted)
    one = learner("fused")
    steps = CapturedSteps(one)
    with pytest.raises(KeyboardInterrupt):
        taken(one, steps)
    assert [name for name, *_ in calls] == ["end", "reset", "release"] and underway == [] and steps.obstacle == ""
    assert gc.isenabled()


def test_layouts_and_copies():
    one = learner("fused")
    prepared = [one.prepare(*b) for b in stream()]
    inputs = [step.inputs for p in prepared for step in p.steps]
    assert len({layout_of(i) for i in inputs}) == 2
    bare = [one.step_inputs(step.plan) for p in prepared for step in p.steps]
    assert len({layout_of(i) for i in bare}) > 4
    # A copy of all: the layouts of views are cached and belong to every learner.
    static = copy.deepcopy(inputs[-2])
    wanted = inputs[-1].targets.labels.clone()
    copied_into(static, inputs[-1])
    assert torch.equal(static.targets.labels, wanted)
    assert int(static.targets.valid_views) == int(inputs[-1].targets.valid_views)
