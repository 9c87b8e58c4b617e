"""align_conv at the shapes of a step's alignment modules: the convolutions of each module's down
blocks, and those of its gate.

On the CPU the op is PyTorch's operations: there is no native row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from bench.common import DIRECTIONS, HEADLINE, SIZES, Case, choose, new_map, skip_on_cpu, target_us
from mose_fast.ops.align_conv import Norm, align_conv, align_conv_serves
from mose_fast.reference.align_conv import align_conv as reference

#: Channels in and out, side, stride, and whether the norm before and the gate are read.
SHAPES = {
    "gated": (64, 64, 32, 2, False, True),
    "second": (64, 128, 16, 1, True, False),
    "gate_first": (64, 64, 32, 2, False, False),
    "gate_second": (64, 64, 16, 1, True, False),
    "next": (128, 128, 16, 2, True, False),
    "next_second": (128, 256, 8, 1, True, False),
    "deep": (256, 256, 8, 2, True, False),
    "deep_second": (256, 512, 4, 1, True, False),
}


def elements_moved(case: Case) -> tuple[int, int]:
    """The number of elements that the op needs to move, and that its launches move.

    Needed: forward x and the gate read, y written; backward x, the gate, y and its gradient read,
    those of x and of the gate written. On top of these the op writes and reads the depthwise map
    and its gradient, and the gradient of y in all.
    """
    images, channels, out_channels, side, stride = (case.shape[name] for name in "NCOHs")
    served = align_conv_serves(case.dtype, channels, out_channels, stride)
    entering = images * channels * side**2 * (5 if case.shape["gate"] else 4) // 4
    between = images * channels * (side // stride) ** 2
    leaving = images * out_channels * (side // stride) ** 2
    needed, done = entering + leaving, entering + leaving + (0 if served.fused_forward else 2 * between + leaving)
    if case.backward:
        done += between if served.fused_forward else 0  # kept for backward
        needed += 2 * entering + 2 * leaving
        # Gradient of y in all: two reads; where it is kept one write, and one read for each product
        # that is not computed with it. The depthwise map, and its gradient twice.
        done += 2 * entering + (2 if served.fused_weights else 4 if served.fused_backward else 5) * leaving
        done += 3 * between
    return needed, done


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, align_conv)
    images, channels, out_channels, side, stride = (case.shape[name] for name in "NCOHs")
    trains = case.backward
    norm = nn.BatchNorm2d(out_channels, device=case.device).requires_grad_(trains)
    depthwise, pointwise = (
        torch.randn(shape, device=case.device, dtype=case.dtype)
        for shape in ((channels, 1, 3, 3), (out_channels, channels, 1, 1))
    )
    inputs = [new_map(case, images, channels, side), depthwise, pointwise]
    options = {}
    if case.shape["prologue"]:
        options["prologue"] = torch.rand(4, channels, device=case.device)
    if case.shape["gate"]:
        options["gate"] = new_map(case, images, channels, side // 2).relu()
    leaves = [leaf.requires_grad_(trains) for leaf in (*inputs, *options.values())]
    params = Norm.of(norm)

    def forward() -> tuple[torch.Tensor, ...]:
        return tuple(function(*inputs, params, stride=stride, **options))

    if not trains:
        return forward
    grads = new_map(case, images, out_channels, side // stride), torch.rand(4, out_channels, device=case.device)
    return lambda: torch.autograd.grad(forward(), [*leaves, *norm.parameters()], grads)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_align_conv(measure, impl, device, dtype, direction, rows, name):
    if rows != HEADLINE and name != "gated":
        pytest.skip("other sizes than a full step: the largest convolution alone")
    if impl == "compiled" and name != "gated":
        pytest.skip("torch.compile takes seconds a shape: the largest convolution alone")
    skip_on_cpu(device, dtype, impl)
    if device == "cuda" and dtype == torch.float32 and name not in ("gated", "second"):
        pytest.skip("float32 on a GPU: the first module's convolutions alone")
    channels, out_channels, side, stride, prologue, gate = SHAPES[name]
    shape = {"N": rows, "C": channels, "O": out_channels, "H": side, "s": stride}
    shape |= {"prologue": int(prologue), "gate": int(gate)}
    case = Case("align_conv", impl, device, dtype, direction, shape)
    needed, done = (elements * dtype.itemsize for elements in elements_moved(case))
    case = replace(case, bytes_needed=needed, bytes_moved=done)
    if dtype == torch.bfloat16 and rows == HEADLINE:
        # One launch each way, and one for each of two small sums.
        case = replace(case, target_us=target_us(4 if case.backward else 2, needed))
    measure(case, make_call)
