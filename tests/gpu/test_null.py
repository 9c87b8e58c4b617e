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
