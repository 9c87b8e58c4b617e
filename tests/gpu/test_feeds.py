"""Views by DALI on a GPU: equal to the fused op and to the CPU's, on the current stream, beside a
captured graph.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _dali, _loader
from mose_fast.augment import ViewMaker
from mose_fast.methods import create_learner
from mose_fast.settings.run import RunConfig
from mose_fast.train import pipeline as pipeline_module
from mose_fast.train import run
from mose_fast.train.ring import Feeder, Ring
from tests.listeners import Losses

pytestmark = pytest.mark.skipif(_dali.obstacle() is not None, reason="DALI is not installed")

DEVICE = _loader.gpu()

MEAN, STD = (0.5, 0.48, 0.44), (0.2, 0.24, 0.26)


def maker(feed: str, recipe: str = "simclr", inner: int = 2) -> ViewMaker:
    return ViewMaker(recipe, inner, mirror=True, mean=MEAN, std=STD, feed=feed)


def noise(count: int, side: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), wanted.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("inner", [1, 2, 4])
@pytest.mark.parametrize("recipe", ["none", "ocm", "simclr", "gsa"])
def test_three_feeds_and_the_cpu_agree(gpu, recipe, inner, side):
    x = noise(40, side)
    with gpu.spared():
        wanted, wanted_rows = maker("fused", recipe, inner).make(x, (25, 15), 5, 9)
    for feed in ("dali", "fused", "torch"):
        views, rows = maker(feed, recipe, inner).make(x.to(DEVICE), (25, 15), 5, 9)
        assert views.device.type == DEVICE and views.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(rows.cpu(), wanted_rows)
        torch.testing.assert_close(views.cpu(), wanted, rtol=3e-5, atol=3e-5) if feed == "torch" else close(
            views, wanted
        )


def test_sides_that_are_no_powers_of_two():
    ours, wanted = (
        maker("dali").make(noise(20, 40).to(DEVICE), (20,), 1, 2)[0],
        maker("fused").make(noise(20, 40), (20,), 1, 2)[0],
    )
    torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_every_step_has_its_own_views_at_every_size():
    made = maker("dali")
    views = []
    for sequence, count in enumerate([10, 96, 0, 1, 300, 96]):
        views.append(made.make(noise(count, seed=sequence).to(DEVICE), (count,), 1, sequence)[0])
    for sequence, count in enumerate([10, 96, 0, 1, 300, 96]):
        close(views[sequence], maker("fused").make(noise(count, seed=sequence), (count,), 1, sequence)[0])


def test_two_runs_give_the_same_bits():
    x = noise(96).to(DEVICE)
    assert torch.equal(maker("dali").make(x, (96,), 1, 2)[0], maker("dali").make(x, (96,), 1, 2)[0])


@pytest.mark.needs("streams")
@pytest.mark.parametrize("side_stream", [False, True])
def test_it_waits_for_the_rows_and_the_reader_for_it(side_stream):
    """Rows are written late, views are read at once, rows are overwritten right after: all on one
    stream, without waiting for it.
    """
    made, wanted = maker("dali"), maker("fused").make(noise(96), (96,), 1, 2)[0]
    made.make(noise(96, seed=1).to(DEVICE), (96,), 1, 1)  # the pipeline stands
    source, rows = noise(96).to(DEVICE), torch.zeros(96, 32, 32, 3, dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            rows.zero_()
            torch.cuda._sleep(100_000_000)  # what did not wait for the stream would see zeros
            rows.copy_(source)
            doubled = 2 * made.make(rows, (96,), 1, 2)[0]
            rows.fill_(255)
            stream.synchronize()
            close(doubled / 2, wanted)


@pytest.mark.needs("streams")
def test_the_caller_does_not_wait_for_the_gpu():
    """Views of the next step are asked for while the GPU has half a second of work left on the
    same stream.
    """
    made, x = maker("dali"), noise(96).to(DEVICE)
    for sequence in range(3):
        made.make(x, (96,), 1, sequence)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    made.make(x, (96,), 1, 3)
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.needs("streams")
def test_streams_in_turn_do_not_overwrite_each_other():
    made = maker("dali")
    wanted = [maker("fused").make(noise(96, seed=s), (96,), 1, s)[0] for s in range(6)]
    rows = [noise(96, seed=s).to(DEVICE) for s in range(6)]
    made.make(rows[0], (96,), 1, 0)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    views = []
    for s in range(6):
        with torch.cuda.stream(streams[s % 2]):
            torch.cuda._sleep(20_000_000)
            views.append(made.make(rows[s], (96,), 1, s)[0])
    torch.cuda.synchronize()
    for ours, known in zip(views, wanted, strict=True):
        close(ours, known)


@pytest.mark.needs("memory statistics")
def test_memory_does_not_grow():
    made, x = maker("dali"), noise(96).to(DEVICE)
    for sequence in range(20):
        made.make(x, (96,), 1, sequence)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for sequence in range(300):
        made.make(x, (96,), 1, sequence)
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 32 * 2**20


@pytest.mark.needs("graphs")
def test_a_graph_is_replayed_on_views_that_are_copied_in():
    made, x = maker("dali"), noise(96).to(DEVICE)
    static = torch.zeros(384, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)
    made.make(x, (96,), 1, 0)  # DALI's threads are running while the graph is captured
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        static.sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        total = static.double().sum()
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            made.make(x, (96,), 1, 1)
    for sequence in range(4):
        static.copy_(made.make(x, (96,), 1, sequence)[0])
        graph.replay()
        wanted = maker("fused").make(x, (96,), 1, sequence)[0].double().sum()
        assert float(total) == pytest.approx(float(wanted), rel=1e-5, abs=0.1)


@pytest.mark.needs("memory of its own")
def test_an_automatic_learner_takes_dali_and_learns_as_with_the_fused_op():
    losses = {}
    for feed in ("auto", "fused"):
        learner = create_learner(
            method="mose",
            classes=4,
            image_size=(32, 32),
            width=8,
            memory=40,
            device=DEVICE,
            feed=feed,
            seed=3,
            options={"buffer_batch": 10, "augment": "ocm"},
            mean=MEAN,
            std=STD,
        )
        assert learner.feed.name == ("dali" if feed == "auto" else "fused")
        y = torch.arange(10) % 2
        results = [learner.observe(noise(10, seed=step), y, task=0) for step in range(4)]
        losses[feed] = [float(result["loss"]) for result in results if result is not None]
    assert len(losses["auto"]) == 3
    assert losses["auto"] == pytest.approx(losses["fused"], rel=1e-3)


RUN = {
    "stream": {"name": "digits", "tasks": 2, "limit_per_task": 355},
    "options": {"buffer_batch": 24, "new_extra": 6},
    "width": 8,
    "memory": 200,
    "device": "cuda",
    "deterministic": True,
    "precision": "fp32",
}


@pytest.mark.needs("streams")
@pytest.mark.parametrize("step", ["captured", "eager"])
def test_a_run_is_fed_ahead_and_any_depth_gives_the_same_bits(step, monkeypatch):
    """A wait that is missing between the plan's stream, the feeder's and the step's would show as
    other views, and so as other losses.
    """
    found = {}
    for depth in (4, 1):
        monkeypatch.setattr(pipeline_module, "Ring", lambda learner, depth=depth: Ring(learner, depth))
        listener = Losses()
        results = run(RunConfig.create(**RUN, feed="dali", step=step), listeners=[listener])
        assert results["resolved"]["feed"] == "dali"
        found[depth] = listener.told, results["weights_sha256"]
    assert found[4] == found[1]
    fused = Losses()
    run(RunConfig.create(**RUN, feed="fused", step=step), listeners=[fused])
    ours, wanted = ([losses["loss"] for _, losses in told[1:5]] for told in (found[4][0], fused.told))
    assert ours == pytest.approx(wanted, rel=1e-3)


@pytest.mark.needs("streams")
def test_the_feeder_waits_for_the_rows_and_the_step_for_the_views():
    """Rows are written late on one stream, views are made on the feeder's, read at once on a
    third.
    """
    made, wanted = maker("dali"), maker("fused").make(noise(96), (96,), 1, 2)[0]
    feeder = Feeder(torch.device("cuda", torch.cuda.current_device()))
    source, rows = noise(96).cuda(), torch.zeros(96, 32, 32, 3, dtype=torch.uint8, device="cuda")
    made.make(rows, (96,), 1, 1)  # the pipeline stands
    plan, step = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(plan):
            rows.zero_()
            torch.cuda._sleep(100_000_000)
            rows.copy_(source)
            views = feeder.put(lambda: made.views(rows, (96,), 1, 2), (rows,))
        with torch.cuda.stream(step):
            doubled = 2 * feeder.take(views)
        plan.wait_stream(step)
        close(doubled / 2, wanted)
    feeder.close()
