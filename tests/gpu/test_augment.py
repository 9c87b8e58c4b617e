"""The views op on a GPU: equal to the CPU, in every dtype and layout, on the current stream,
replayed in a graph.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.augment import RECIPES, ViewMaker
from mose_fast.ops.augment import augment
from mose_fast.ops.augment_parameters import draw_augment_parameters
from mose_fast.reference import augment as reference
from mose_fast.self_check.problems import make_step

DEVICE = _loader.gpu()

MEAN, STD = (0.5, 0.48, 0.44), (0.2, 0.24, 0.26)


def on_gpu(step: dict[str, object]) -> dict[str, object]:
    moved = {
        name: value.to(DEVICE, copy=True) if isinstance(value, torch.Tensor) else value for name, value in step.items()
    }
    return {**moved, "sources": [source.to(DEVICE, copy=True) for source in step["sources"]]}


@pytest.mark.parametrize("jitter_normalised", [False, True])
@pytest.mark.parametrize("recipe", ["scr", "ocm"])
@pytest.mark.parametrize(
    ("views", "size"),
    [(384, (32, 32)), (384, (64, 64)), (48, (8, 8)), (12, (24, 16)), (5, (7, 5)), (6, (80, 80)), (0, (8, 8))],
)
def test_equals_the_cpu_and_the_reference(gpu, views, size, recipe, jitter_normalised):
    step = make_step(gpu.few(views, 96), size, RECIPES[recipe], views)
    ours = augment(**on_gpu(step), jitter_normalised=jitter_normalised)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    with gpu.spared():
        torch.testing.assert_close(
            ours.cpu(), augment(**step, jitter_normalised=jitter_normalised), rtol=1e-5, atol=1e-5
        )
    truth = reference.augment(**step, jitter_normalised=jitter_normalised, dtype=torch.float64, channels=3)
    torch.testing.assert_close(ours.cpu().double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels", [3, 4, 8])
def test_other_formats_are_one_rounding(dtype, channels):
    step = on_gpu(make_step(100, (32, 32), RECIPES["scr"], 100))
    ours = augment(**step, dtype=dtype, channels=channels)
    assert torch.equal(ours[:, :3], augment(**step).to(dtype))
    assert not ours[:, 3:].any()


def test_rows_that_start_anywhere():
    step = on_gpu(make_step(60, (32, 32), RECIPES["scr"], 60))
    wanted = augment(**step)
    for shift in (1, 4, 8):
        shifted = []
        for source in step["sources"]:
            storage = torch.empty(source.numel() + shift, dtype=torch.uint8, device=DEVICE)
            shifted.append(storage[shift:].view(source.shape).copy_(source))
        assert torch.equal(augment(**{**step, "sources": shifted}), wanted)


@pytest.mark.needs("a large memory")
def test_rows_beyond_four_gibibytes():
    memory = torch.empty(360_000, 64, 64, 3, dtype=torch.uint8, device=DEVICE)
    rows = torch.tensor([359_999, 0, 180_001], device=DEVICE)
    memory[rows] = torch.tensor([3, 5, 7], dtype=torch.uint8, device=DEVICE).view(3, 1, 1, 1)
    layout = torch.tensor([[0, 0, -1], [1, 0, -1], [2, 3, -1]], dtype=torch.int32, device=DEVICE)
    nothing = (torch.empty(0, 6, dtype=torch.int32, device=DEVICE), torch.empty(0, 4, device=DEVICE))
    views = augment([memory], rows, layout, *nothing, (0.0,) * 3, (1 / 255,) * 3)
    torch.testing.assert_close(views[:, 0, 0, 0].cpu(), torch.tensor([3.0, 5.0, 7.0]))


def test_what_does_not_exist_is_nan():
    step = on_gpu(make_step(6, (8, 8), RECIPES["scr"], 6))
    step["rows"][:] = 0
    step["rows"][0] = 14
    step["layout"][:, 0] = torch.tensor([0, 1, 1, 11, 1, 1])
    step["layout"][1, 1] = 16
    step["layout"][2, 2] = 6
    views = augment(**step)
    assert views[:4].isnan().all()
    assert views[4:].isfinite().all()


@pytest.mark.needs("streams")
def test_two_runs_and_a_side_stream_give_the_same_bits():
    step = on_gpu(make_step(384, (32, 32), RECIPES["scr"], 384))
    wanted = augment(**step)
    assert torch.equal(augment(**step), wanted)
    rows = step["rows"].clone()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # a launch on another stream would overtake the copy behind this
        step["rows"].zero_()
        step["rows"].copy_(rows)
        views = augment(**step)
    side.synchronize()
    assert torch.equal(views, wanted)


@pytest.mark.needs("graphs")
def test_a_replayed_graph_makes_new_views_each_time():
    """Parameters come from a device counter: replays give the views that eager calls with the next
    sequence numbers give.
    """
    images = torch.randint(0, 256, (24, 32, 32, 3), dtype=torch.uint8, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rows = torch.arange(24, device=DEVICE)
    layout = torch.stack([rows, rows % 16, rows], dim=1).to(torch.int32)

    def step() -> torch.Tensor:
        codes, factors = draw_augment_parameters(RECIPES["scr"], 3, 10, 24, 32, 32, DEVICE, counter)
        return augment([images], rows, layout, codes, factors, MEAN, STD, dtype=torch.bfloat16, channels=4)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    counter.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        views = step()
    for replay in range(3):
        graph.replay()
        codes, factors = draw_augment_parameters(RECIPES["scr"], 3, 10 + replay, 24, 32, 32, DEVICE)
        wanted = augment([images], rows, layout, codes, factors, MEAN, STD, dtype=torch.bfloat16, channels=4)
        assert torch.equal(views, wanted)
        assert counter.item() == replay + 1


def test_view_maker_equals_the_cpu(gpu):
    maker = ViewMaker("scr", 16, mirror=True, mean=MEAN, std=STD)
    images = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8)
    ours, ours_rows = maker.make(images.to(DEVICE), (5, 4), 1, 2)
    with gpu.spared():
        wanted, wanted_rows = maker.make(images, (5, 4), 1, 2)
    assert torch.equal(ours_rows.cpu(), wanted_rows)
    torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-5, atol=1e-5)
