"""The template op on a GPU: equal to the reference, on the current stream, capturable."""

from __future__ import annotations

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.null import null

DEVICE = _loader.gpu()


@pytest.mark.parametrize("count", [0, 1, 257, 65535 * 256 + 1])  # the last takes a second turn of the grid-stride loop
def test_copies(count):
    x = torch.arange(count, device=DEVICE).to(torch.uint8)
    y = null(x)
    assert torch.equal(y, x)
    assert count == 0 or y.data_ptr() != x.data_ptr()


def test_gradient_and_transposed_input():
    x = torch.randn(3, 5, device=DEVICE, dtype=torch.float64, requires_grad=True)
    assert torch.equal(null(x.T), x.T)
    assert torch.autograd.gradcheck(null, (x,))


@pytest.mark.needs("streams")
def test_runs_on_the_current_stream():
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # a copy on another stream would overtake the fill behind this
        x.fill_(1.0)
        y = null(x)
    side.synchronize()
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.needs("graphs")
def test_replays_in_a_graph():
    x = torch.zeros(300, device=DEVICE)
    null(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = null(x)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, value))
