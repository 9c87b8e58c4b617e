"""Random decisions on a GPU equal the CPU's bit for bit; inside a captured graph the random
sequence goes on.
"""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.augment_parameters import Recipe, draw_augment_parameters
from mose_fast.ops.reservoir import SlotFilter, draw, insert
from mose_fast.self_check.problems import make_batch, make_memory

DEVICE = _loader.gpu()

RECIPE = Recipe(
    mirror_p=0.5, gray_p=0.2, area_low=0.2, jitter_p=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1
)


def assert_same(on_gpu: list[torch.Tensor], on_cpu: list[torch.Tensor]) -> None:
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, on_cpu, strict=True))


@pytest.mark.parametrize(
    ("slots", "size", "count"),
    [(1, 3, 5), (50, 3, 64), (5000, 32, 10), (5000, 32, 64), (700, 64, 33), (100_000, 3, 1000)],
)
def test_reservoir_equals_cpu(gpu, slots, size, count):
    for seed, seen in ((1, 0), (2**41, 3 * slots)):
        on_cpu = make_memory(slots, size, seed, seen)
        on_gpu = [tensor.to(DEVICE, copy=True) for tensor in on_cpu]
        for step in range(6):
            x, y, index = make_batch(count, size, step)
            with gpu.spared():
                wanted = insert(*on_cpu, x, y, step % 3, index)
            assert torch.equal(insert(*on_gpu, x.to(DEVICE), y.to(DEVICE), step % 3, index.to(DEVICE)).cpu(), wanted)
            for k in (0, 1, 86, 2048):
                for chosen in SlotFilter:
                    with gpu.spared():
                        wanted = draw(on_cpu[2], on_cpu[4], k, chosen, 1)
                    assert torch.equal(draw(on_gpu[2], on_gpu[4], k, chosen, 1).cpu(), wanted)
        assert_same(on_gpu, on_cpu)


def test_a_draw_beyond_the_limit_is_refused():
    memory = [tensor.to(DEVICE, copy=True) for tensor in make_memory(3000, 1, 0, 3000)]
    with pytest.raises(RuntimeError, match="a draw on CUDA wants 2049 slots; wanted 0 to 2048"):
        draw(memory[2], memory[4], 2049, SlotFilter.ALL, 0)
    assert memory[4].tolist() == [0, 0, 3000]


def test_unaligned_rows_are_copied_too(gpu):
    on_cpu = make_memory(20, 32, 3, 0)
    on_gpu = [tensor.to(DEVICE, copy=True) for tensor in on_cpu]
    x, y, index = make_batch(16, 32, 0)
    storage = torch.empty(x.numel() + 1, dtype=torch.uint8, device=DEVICE)
    shifted = storage[1:].view(x.shape)
    shifted.copy_(x)
    with gpu.spared():
        wanted = insert(*on_cpu, x, y, 0, index)
    assert torch.equal(insert(*on_gpu, shifted, y.to(DEVICE), 0, index.to(DEVICE)).cpu(), wanted)
    assert_same(on_gpu, on_cpu)


@pytest.mark.needs("graphs")
def test_a_replayed_graph_continues_the_sequence():
    on_cpu = make_memory(40, 32, 4, 0)
    on_gpu = [tensor.to(DEVICE, copy=True) for tensor in on_cpu]
    start = [tensor.clone() for tensor in on_gpu]
    batch = [torch.zeros_like(tensor, device=DEVICE) for tensor in make_batch(10, 32, 0)]
    x, y, index = batch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        insert(*on_gpu, x, y, 1, index)
        draw(on_gpu[2], on_gpu[4], 12, SlotFilter.ALL, 0)
    torch.cuda.current_stream().wait_stream(stream)
    for tensor, saved in zip(on_gpu, start, strict=True):
        tensor.copy_(saved)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots = insert(*on_gpu, x, y, 1, index)
        drawn = draw(on_gpu[2], on_gpu[4], 12, SlotFilter.ALL, 0)
    for step in range(8):
        given = make_batch(10, 32, step)
        for tensor, value in zip(batch, given, strict=True):
            tensor.copy_(value)
        graph.replay()
        assert torch.equal(slots.cpu(), insert(*on_cpu, given[0], given[1], 1, given[2]))
        assert torch.equal(drawn.cpu(), draw(on_cpu[2], on_cpu[4], 12, SlotFilter.ALL, 0))
        assert_same(on_gpu, on_cpu)


def test_ten_million_views_equal_the_cpu(gpu):
    count = gpu.few(1_000_000, 100_000)
    for sequence in range(10):
        on_gpu = draw_augment_parameters(RECIPE, 7, sequence, count, 32, 32, DEVICE)
        with gpu.spared():
            on_cpu = draw_augment_parameters(RECIPE, 7, sequence, count, 32, 32)
        assert_same(list(on_gpu), list(on_cpu))
