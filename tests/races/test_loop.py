"""The loop on the simulated GPU: clean as it is, and each kind of wait that it would forget
reported.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import mose_fast.augment.dali as dali_module
import mose_fast.device as device_module
from mose_fast import _loader
from mose_fast.augment.dali import DaliLayout, DaliViews
from mose_fast.methods import Mose, create_learner
from mose_fast.nn.side_streams import SideStreams
from mose_fast.settings.run import RunConfig
from mose_fast.train import Listener, TrainingDiverged, resume, run
from mose_fast.train.captured import CapturedSteps, capture
from mose_fast.train.ring import Ring
from tests.listeners import Losses
from tests.races.checker import RaceError
from tests.races.simulated_gpu import Event, SimulatedGpu, Stream

pytestmark = [
    pytest.mark.skipif(_loader.native is None, reason="there is no native library, without which nothing is captured"),
    pytest.mark.filterwarnings("ignore:preset 'released' of 'mose' is meant for another protocol"),
    pytest.mark.filterwarnings("ignore:options.first_task of method 'mose' is 'joint', which needs several tasks"),
]

# What stands in for kernels sums the gradients of maps with several readers in an order of its own.
needs_kernels = pytest.mark.skipif(
    _loader.native is None or _loader.record["backend"] != "emulated",
    reason="needs the emulated GPU's kernels, with which .ci/run runs this file, too",
)

# Two tasks of five batches. The first batch trains nothing; of each task, the second step is
# captured.
SETTINGS = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 20, "batch": 4},
    "options": {"experts": 2, "buffer_batch": 4, "new_extra": 2},
    # With an emulated GPU's library its kernels run, which want 8 channels; else PyTorch stands in
    # for them.
    "width": 8 if _loader.native is not None and _loader.record["backend"] == "emulated" else 1,
    "memory": 20,
    "device": "cuda",
    "kernels": "fused",
    "feed": "fused",
    "precision": "fp32",
    "evaluation_batch": 512,
    "checkpoint_every": 5,
}


def settings(**changes: Any) -> RunConfig:
    return RunConfig.create(**SETTINGS | changes)


def two_tasks(config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> Losses:
    """Two tasks with checkpoints and evaluations; the loss of one batch is not finite, and a second
    run goes on from there.
    """
    step_inputs, make_views = Mose.step_inputs, Mose.make_views
    # The first batch trains nothing.
    broken = {bad - 2}

    def inputs(learner, plan, rows=None, *, ready=False):
        return step_inputs(learner, plan, rows, ready=ready or plan.sequence in broken)

    def views(learner, plan, rows=None):
        made = make_views(learner, plan, rows)
        return made * math.nan if plan.sequence in broken else made

    monkeypatch.setattr(Mose, "step_inputs", inputs)
    monkeypatch.setattr(Mose, "make_views", views)
    losses = Losses()
    with pytest.raises(TrainingDiverged, match=f"at batch {bad} .*The newest is the state before this batch"):
        run(config, out=out, listeners=[losses])
    broken.clear()
    resume(out, listeners=[losses])
    return losses


def report(gpu: SimulatedGpu) -> str:
    return "\n".join(map(str, [*gpu.races, *gpu.broken]))


def a_ring_alone(feed: str = "fused") -> str:
    """Plans and steps whose losses nobody reads, so that nothing but the ring holds them apart;
    then a look at the memory. Returns the weights' hash.
    """
    learner = create_learner(settings(feed=feed), classes=10, image_size=(8, 8))
    images = torch.full((64, 8, 8, 3), 7, dtype=torch.uint8, device=learner.device)
    with device_module.own_stream(learner.device):
        steps = CapturedSteps(learner)
        ring = Ring(learner)
        for batch in range(16):
            y = torch.arange(4) + batch
            ring.put(lambda batch=batch, y=y: {"x": images[4 * batch : 4 * batch + 4], "y": y % 10, "task": batch // 8})
            if ring.full:
                ring.take().take(steps)
        ring.synchronise()
        learner.memory.images.sum()
        ring.close()
    learner.model.latch.closed.logical_not()
    return learner.model.weights_hash()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "feed", "done"), [("captured", "fused", 0.1), ("eager", "torch", 0.6), ("captured", "dali", 0.3)]
)
def test_the_loop_is_ordered(tmp_path, monkeypatch, step, feed, done):
    """With views made by the step, by the plan (and PyTorch's own kernels and Adam), and by a
    thread of their own.
    """
    with SimulatedGpu(done=done) as gpu:
        config = settings(step=step, feed=feed, kernels="torch" if feed == "torch" else "fused")
        losses = two_tasks(config, tmp_path / "run", monkeypatch, bad=8)
    assert not gpu.races and not gpu.broken, report(gpu)
    assert [batch for batch, _ in losses.told] == list(range(1, 11))
    # It went the way of a GPU: streams of steps, plans and checkpoints in both runs, a thread that
    # writes, and graphs.
    streams = {str(stream) for stream in gpu.streams}
    # DALI's is one more, beside that of its thread; with fused kernels there is that of the first
    # expert's branch.
    count = {"fused": 8, "torch": 6, "dali": 12}[feed]
    assert len({s for s in streams if s.startswith("stream")}) == count and any(
        s.startswith("host thread checkpoint") for s in streams
    )
    assert (gpu.replays > 4) == (step == "captured")


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("feed", ["fused", "dali"])
def test_training_on_the_final_memory_is_ordered(feed):
    with SimulatedGpu(done=0.3) as gpu:
        results = run(settings(train_on="final_memory", epochs=2, feed=feed))
    assert not gpu.races, report(gpu)
    assert results["steps"] == 2 * 5


@pytest.mark.slow
@pytest.mark.parametrize("feed", ["fused", "dali"])
def test_a_ring_alone_is_ordered(feed):
    with SimulatedGpu() as gpu:
        a_ring_alone(feed)
    assert not gpu.races and not gpu.broken, report(gpu)
    assert gpu.replays > 2


@pytest.mark.slow
@needs_kernels
def test_branches_on_streams_of_their_own_change_no_weight(monkeypatch):
    hashes, streams = set(), []
    for on in (True, False):
        monkeypatch.setattr(SideStreams.__init__, "__defaults__", (on,))
        with SimulatedGpu() as gpu:
            hashes.add(a_ring_alone())
        streams.append(len(gpu.streams))
    assert len(hashes) == 1
    assert streams[0] == streams[1] + 1


@pytest.mark.slow
@pytest.mark.usefixtures("steps_wait")
def test_a_capture_that_fails_leaves_order():
    with (
        SimulatedGpu() as gpu,
        pytest.warns(UserWarning, match=r"no CUDA graph .*not permitted when stream is capturing .*eager steps"),
    ):
        results = run(settings())
    assert not gpu.races and gpu.replays == 0
    assert (results["steps"], results["eager_steps"], results["capture_retries"]) == (9, 9, 1)
    assert results["resolved"]["step"] == "eager" and "not permitted" in results["resolved"]["reasons"]["step"]


class Breaks(Listener):
    def on_batch(self, batch, losses):
        if batch == 1:
            SimulatedGpu.current.will_wait("a thread of another library")


@pytest.mark.slow
def test_a_capture_that_is_broken_once_is_tried_again():
    """By a thread of another library, which waits for the GPU at the worst time."""
    found = []
    for breaks in (False, True):
        with SimulatedGpu() as gpu:
            results = run(settings(), listeners=[Breaks()] * breaks)
        assert not gpu.races and gpu.broken == ["a thread of another library"] * breaks
        assert results["resolved"]["step"] == "captured"
        assert (results["steps"], results["eager_steps"], results["capture_retries"]) == (9, 2, int(breaks))
        found.append(results["weights_sha256"])
    assert found[0] == found[1]


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("act", ["build", "run", "close"])
def test_dali_waits_until_no_graph_is_captured(monkeypatch, act, fault):
    """On another thread, while a graph is captured; without the lock that would break it."""
    if fault:
        monkeypatch.setattr(dali_module, "CAPTURING", nullcontext())
    with SimulatedGpu() as gpu, ThreadPoolExecutor(1) as thread:
        views = DaliViews((0.5,) * 3, (0.5,) * 3)
        images = torch.zeros(2, 8, 8, 3, dtype=torch.uint8, device="cuda")
        layout = DaliLayout.of(torch.tensor([[0, 0, -1], [1, 0, -1]], dtype=torch.int32))
        codes = torch.empty(0, 6, dtype=torch.int32)
        if act != "build":
            views(images, layout, codes)
            # So that the next call frees the views.
            torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with suppress(RuntimeError), capture(stream):
            done = thread.submit(views.close if act == "close" else lambda: views(images, layout, codes))
            wait([done], timeout=10 if fault else 0.2)
            assert done.done() == fault
        done.result(timeout=10)
    assert bool(gpu.broken) == fault, report(gpu)


# What a program that forgets one kind of wait would do on a GPU.
FORGOTTEN = {
    "waits of a stream for an event": (Stream, "wait_event", lambda stream, event: None),
    "waits of a stream for a stream": (Stream, "wait_stream", lambda stream, other: None),
    "waits of the host for an event": (Event, "synchronize", lambda event: None),
    "waits of the host for a stream": (Stream, "synchronize", lambda stream: None),
    "questions whether an event is done": (Event, "query", lambda event: True),
    "words to the allocator": (SimulatedGpu, "record_stream", lambda gpu, tensor, stream: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORGOTTEN)
def test_a_loop_that_forgets_to_wait_is_reported(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(*FORGOTTEN[kind])
    with SimulatedGpu(done=0.1, stop=True) as gpu, suppress(RaceError):
        if kind == "words to the allocator":  # in the loop what is read is held for other reasons, too
            a_ring_alone()
        else:
            two_tasks(settings(), tmp_path / "run", monkeypatch, bad=8)
    assert gpu.races
