"""The checks of arguments: one message for one mistake, whichever op it is made with."""

from __future__ import annotations

import pytest
import torch

from mose_fast.ops import checks
from mose_fast.ops.adam import adam_step
from mose_fast.ops.align_conv import align_conv
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act, norm_state
from mose_fast.ops.batch_norm_pool import batch_norm_pool
from mose_fast.ops.expert_losses import expert_losses
from mose_fast.ops.norm_pool import norm_pool
from mose_fast.ops.reservoir import SlotFilter, draw, insert

ROWS = 3


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


X = ones(ROWS, 2, 4, 4).contiguous(memory_format=torch.channels_last)
MAP = {"x": X, "norm": Norm(None, None, None, None)}
WEIGHTS = {"depthwise": ones(2, 1, 3, 3), "pointwise": ones(5, 2, 1, 1)}
OUTPUTS = {"projections": ones(1, ROWS, 2), "logits": ones(1, ROWS, 4), "features": ones(1, ROWS, 2)}
TARGETS = {"labels": ones(ROWS, dtype=torch.int64), "new_rows": 0, "current_classes": ones(4, dtype=torch.bool)}
MEMORY = {name: ones(4, dtype=torch.int64) for name in ("labels", "tasks", "indices")}
MEMORY |= {"images": ones(4, 2, 3, 3, dtype=torch.uint8), "state": ones(3, dtype=torch.int64)}
BATCH = {"x": ones(2, 2, 3, 3, dtype=torch.uint8), "y": ones(2, dtype=torch.int64), "index": ones(2, dtype=torch.int64)}
MOMENTS = {"master": ones(4), "exp_avg": ones(4), "exp_avg_sq": ones(4), "gradients": [ones(4)], "offsets": [0]}
RATES = {"steps": ones(1), "lr": torch.tensor(0.1), "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}

# Ops with arguments that fit; those of the first group take ``valid_rows`` as well.
OVER_ROWS = {
    align_conv: MAP | WEIGHTS | {"prologue": ones(4, 2), "gate": ones(ROWS, 2, 2, 2)},
    batch_norm_act: MAP | {"residual": X},
    batch_norm_pool: MAP | {"residual": X},
    norm_state: MAP,
    norm_pool: {"x": X, "state": ones(4, 2)},
    expert_losses: OUTPUTS | {"student": ones(ROWS, 2)} | TARGETS,
}
OPS = OVER_ROWS | {
    insert: MEMORY | BATCH | {"task": 0},
    draw: {"tasks": MEMORY["tasks"], "state": MEMORY["state"], "k": 2, "filter": SlotFilter.ALL, "task": 0},
    adam_step: MOMENTS | RATES | {"average": ones(4), "average_shadow": ones(4, dtype=torch.bfloat16)},
}
TENSORS = [(op, name) for op, fitting in OPS.items() for name, x in fitting.items() if isinstance(x, torch.Tensor)]
MISTAKES = {
    "no tensor": (lambda x: "text", TypeError, "{name} is 'text'; wanted a torch.Tensor"),
    "dtype": (lambda x: x.to(torch.complex64), TypeError, "{name} has dtype torch.complex64; wanted "),
    "layout": (lambda x: x.to_sparse(), TypeError, "{name} has layout torch.sparse_coo; wanted torch.strided"),
    "shape": (lambda x: x[None], ValueError, r"{name} has shape \("),
    "device": (lambda x: x.to("meta"), ValueError, "is on meta; wanted cpu|is on cpu; wanted meta"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("op", "name"), TENSORS, ids=lambda value: getattr(value, "__name__", value))
def test_every_tensor_of_every_op_has_one_check(op, name, mistake):
    if op is norm_state and mistake == "device":
        pytest.skip("its map is the only tensor here")
    spoil, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message.format(name=name)):
        op(**OPS[op] | {name: spoil(OPS[op][name])})


@pytest.mark.parametrize("op", OVER_ROWS, ids=lambda op: op.__name__)
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
        op(**OVER_ROWS[op], valid_rows=rows)
    for fitting in (None, 0, 2, ROWS, torch.tensor(2, dtype=torch.int32)):
        op(**OVER_ROWS[op], valid_rows=fitting)


def test_messages_name_argument_value_and_what_was_wanted():
    x = torch.zeros(2, 0, dtype=torch.bfloat16)
    for wanted, options in (
        (r"^x has dtype torch.bfloat16; wanted torch.float32 or torch.float64$", {"dtypes": checks.FLOATS[:2]}),
        (r"^x has shape \(2, 0\); wanted \(2, 1\), so$", {"sizes": (2, 1), "because": ", so"}),
        (r"^x has shape \(2, 0\); wanted \[rows, 1\]$", {"sizes": ("rows", 1)}),
        (r"^x has shape \(2, 0\); wanted \[rows, columns\]$", {"sizes": ("rows", "columns"), "filled": (1,)}),
        (r"^x has shape \(2, 0\); wanted \[rows\]$", {"sizes": ("rows",)}),
        (r"^x is on cpu; wanted meta, where y is$", {"beside": ("y", torch.zeros(1, device="meta"))}),
    ):
        with pytest.raises((TypeError, ValueError), match=wanted):
            checks.check_tensor("x", x, **{"dtypes": checks.FLOATS, **options})
    checks.check_tensor("x", x, checks.FLOATS, ("rows", "columns"), filled=(0,), contiguous=True)
    with pytest.raises(TypeError, match=r"^x has dtype torch.float16; wanted torch.float32, torch.float64 or torch.bf"):
        checks.check_tensor("x", x.half(), checks.FLOATS)
    with pytest.raises(ValueError, match=r"^x has strides \(0, 1\); wanted contiguous memory"):
        checks.check_tensor("x", torch.zeros(1, 2).expand(2, 2), checks.FLOATS, contiguous=True)
    with pytest.raises(TypeError, match=r"^x has layout torch.sparse_coo; wanted torch.strided$"):
        checks.check_tensor("x", torch.zeros(2).to_sparse(), checks.FLOATS)
    with pytest.raises(ValueError, match=r"^way is 'c'; wanted a or b$"):
        checks.check_choice("way", "c", ("a", "b"))
    with pytest.raises(ValueError, match=r"^k is -1; wanted an integer of at least 0$"):
        checks.check_integer("k", -1, 0)
