"""The checks of arguments: one message for one mistake, whichever op it is made with."""

from __future__ import annotations

import pytest
import torch

from mose_fast.ops import checks
from mose_fast.ops.align_conv import align_conv
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.ops.batch_norm_pool import batch_norm_pool
from mose_fast.ops.expert_losses import expert_losses
from mose_fast.ops.norm_pool import norm_pool

ROWS = 3
X, NORM = torch.ones(ROWS, 2, 4, 4).contiguous(memory_format=torch.channels_last), Norm(None, None, None, None)
LOSSES = (torch.ones(1, ROWS, 2), torch.ones(1, ROWS, 4), torch.ones(1, ROWS, 2), torch.ones(ROWS, 2))
CALLS = {
    "align_conv": lambda rows: align_conv(X, torch.ones(2, 1, 3, 3), torch.ones(5, 2, 1, 1), NORM, valid_rows=rows),
    "batch_norm_act": lambda rows: batch_norm_act(X, NORM, valid_rows=rows),
    "batch_norm_pool": lambda rows: batch_norm_pool(X, NORM, X, rows),
    "norm_state": lambda rows: norm_state(X, NORM, rows),
    "norm_pool": lambda rows: norm_pool(X, None, rows),
    "expert_losses": lambda rows: expert_losses(
        *LOSSES, torch.zeros(ROWS, dtype=torch.int64), 0, None, valid_rows=rows
    ),
}


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (-1, ValueError, "valid_rows is -1; wanted an integer from 0 to 3"),
        (4, ValueError, "valid_rows is 4; wanted an integer from 0 to 3"),
        (True, ValueError, "valid_rows is True; wanted an integer from 0 to 3"),
        (2.0, ValueError, r"valid_rows is 2\.0; wanted an integer from 0 to 3"),
        (torch.tensor(2), TypeError, r"valid_rows is torch.int64 \(\); wanted an int or an int32 scalar"),
        (
            torch.tensor([2], dtype=torch.int32),
            TypeError,
            r"valid_rows is torch.int32 \(1,\); wanted an int or an int32 scalar",
        ),
        (
            torch.tensor(2, dtype=torch.int32, device="meta"),
            ValueError,
            "valid_rows is on meta; wanted cpu, where (x|projections) is",
        ),
    ],
    ids=str,
)
def test_valid_rows_has_one_check(op, rows, error, message):
    with pytest.raises(error, match=f"^{message}"):
        CALLS[op](rows)
    for fitting in (None, 0, 2, ROWS, torch.tensor(2, dtype=torch.int32)):
        CALLS[op](fitting)


def test_messages_name_argument_value_and_what_was_wanted():
    x = torch.zeros(2, 0, dtype=torch.float16)
    for wanted, options in (
        (r"^x has dtype torch.float16; wanted torch.float32 or torch.float64$", {"dtypes": checks.FLOATS[:2]}),
        (r"^x has shape \(2, 0\); wanted \(2, 1\), so$", {"sizes": (2, 1), "because": ", so"}),
        (r"^x has shape \(2, 0\); wanted \[rows, 1\]$", {"sizes": ("rows", 1)}),
        (r"^x has shape \(2, 0\); wanted \[rows, columns\]$", {"sizes": ("rows", "columns"), "filled": (1,)}),
        (r"^x has shape \(2, 0\); wanted \[rows\]$", {"sizes": ("rows",)}),
        (r"^x is on cpu; wanted meta, where y is$", {"beside": ("y", torch.zeros(1, device="meta"))}),
    ):
        with pytest.raises((TypeError, ValueError), match=wanted):
            checks.check_tensor("x", x, **{"dtypes": checks.FLOATS, **options})
    checks.check_tensor("x", x, checks.FLOATS, ("rows", "columns"), filled=(0,), contiguous=True)
    with pytest.raises(ValueError, match=r"^x has strides \(0, 1\); wanted contiguous memory"):
        checks.check_tensor("x", torch.zeros(1, 2).expand(2, 2), checks.FLOATS, contiguous=True)
    with pytest.raises(TypeError, match=r"^x has layout torch.sparse_coo; wanted torch.strided$"):
        checks.check_tensor("x", torch.zeros(2).to_sparse(), checks.FLOATS)
    with pytest.raises(ValueError, match=r"^way is 'c'; wanted a or b$"):
        checks.check_choice("way", "c", ("a", "b"))
    with pytest.raises(ValueError, match=r"^k is -1; wanted an integer of at least 0$"):
        checks.check_integer("k", -1, 0)
