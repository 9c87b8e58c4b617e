"""Drawing the random parameters of N augmented views, with the recipe that uses all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.common import SIZES, Case, choose
from mose_fast.augment import RECIPES
from mose_fast.ops.augment_parameters import draw_augment_parameters
from mose_fast.reference.augment_parameters import draw_augment_parameters as reference

#: torch.compile takes more than five minutes over the reference's rounds of Philox and the ten
#: trials of a crop.
IMPLEMENTATIONS = ("reference", "native")


def make_call(case: Case) -> Callable[[], object]:
    function = choose(case, reference, draw_augment_parameters)
    side = case.shape["H"]
    return lambda: function(RECIPES["scr"], 7, 3, case.shape["N"], side, side, torch.device(case.device))


@pytest.mark.parametrize("views", SIZES)
def bench_augment_parameters(measure, impl, device, views):
    measure(Case("augment_parameters", impl, device, torch.float32, shape={"N": views, "H": 32}), make_call)
