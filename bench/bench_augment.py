"""The views of a step: of N views, a quarter are the images, a quarter their mirrors, and half are
augmented by MOSE's default recipe.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import HEADLINE, SIZES, Case, choose
from mose_fast.augment import RECIPES
from mose_fast.ops.augment import MIRROR, augment
from mose_fast.ops.augment_parameters import draw_augment_parameters
from mose_fast.reference.augment import augment as reference


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, augment)
    views, side, device = case.shape["N"], case.shape["H"], case.device
    images = views // 4
    row = torch.arange(images, device=device)
    orientations = torch.cat([torch.zeros_like(row), torch.full_like(row, MIRROR)] * 2)
    draws = torch.cat([torch.full_like(row.repeat(2), -1), torch.arange(2 * images, device=device)])
    layout = torch.stack([row.repeat(4), orientations, draws], dim=1).to(torch.int32)
    codes, factors = draw_augment_parameters(RECIPES["ocm"], 7, 3, 2 * images, side, side, device)
    # New rows come from a stream buffer, replayed ones from anywhere in the memory.
    buffer, memory = (torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8).to(device) for n in (32, 5000))
    rows = torch.cat([torch.arange(32), 32 + torch.randint(0, 5000, (images,))])[:images].to(device)
    mean, std = (0.5, 0.49, 0.44), (0.27, 0.26, 0.28)
    options = {"jitter_normalised": False, "dtype": case.dtype, "channels": 3}
    return lambda: function([buffer, memory], rows, layout, codes, factors, mean, std, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("views", "side"), [*((n, 32) for n in SIZES), (HEADLINE, 64)])
def bench_augment(measure, impl, device, views, side, dtype):
    target = {32: 12.0, 64: 30.0}[side] if views == HEADLINE else None
    case = Case(
        "augment", impl, device, dtype, shape={"N": views, "H": side}, target_us=target, captured=impl == "native"
    )
    measure(case, make_call)
