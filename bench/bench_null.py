"""The template op against a plain clone; the example for the other files here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import DIRECTIONS, SIZES, Case, choose, with_gradients
from mose_fast.ops.null import null
from mose_fast.reference.null import null as reference


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, null)
    shape = case.shape["N"], case.shape["P"]
    x = torch.randn(shape, device=case.device, dtype=case.dtype, requires_grad=case.backward)
    return with_gradients(lambda: function(x), [x]) if case.backward else lambda: function(x)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def bench_null(measure, impl, device, direction, rows):
    measure(Case("null", impl, device, torch.float32, direction, {"N": rows, "P": 128}), make_call)
