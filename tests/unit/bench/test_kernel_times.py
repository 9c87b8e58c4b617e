"""The table of time by kernel: sums, and ops by name."""

from __future__ import annotations

import pytest

from bench.kernel_times import COLUMNS, Measured, op_of, rows, table
from tests.paths import ROOT

KERNELS = {
    "void mose::align_conv_backward_kernel<2, true>(AlignConvBackward)": Measured(3, 700.0),
    "void mose::align_conv_forward_kernel<bf16>(AlignConvForward)": Measured(6, 300.0),
    "void mose::batch_norm_act_sums_kernel<bf16>(BatchNormActBackward)": Measured(20, 500.0),
    "sm90_xmma_fprop_implicit_gemm_bf16": Measured(17, 1500.0),
    "Memcpy DtoD (Device -> Device)": Measured(4, 0.5),
}


def test_rows_sum_up_by_op():
    found = rows("fused", KERNELS)
    assert [set(row) for row in found] == [set(COLUMNS)] * len(found)
    assert [(row["op"], row["us"], row["launches"]) for row in found if row["kernel"] == "(all)"] == [
        ("(all)", "3000.50", "50.0"),
        ("convolutions and products", "1500.00", "17.0"),
        ("align_conv", "1000.00", "9.0"),
        ("batch_norm_act", "500.00", "20.0"),
        ("copies and fills", "0.50", "4.0"),
    ]
    by_kernel = {row["kernel"]: row for row in found if row["kernel"] != "(all)"}
    assert list(by_kernel)[1:3] == list(KERNELS)[:2]  # within an op, the longest first
    text = table(found)
    assert "sm90_xmma_fprop" in text and "Memcpy" not in text  # below a thousandth of the step


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("void mose::norm_state_backward_kernel<float>(NormStateBackward)", "batch_norm_act"),
        ("adam_pieces_kernel(AdamPieces)", "adam"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "PyTorch, elementwise and sums"),
        ("nvjet_sm90_tst_64x8_64x16", "convolutions and products"),
        ("Memset (Device)", "copies and fills"),
        ("triton_red_fused_1", "other"),
    ],
)
def test_op_of_a_kernel(kernel, op):
    assert op_of(kernel) == op


def test_every_kernel_of_ours_belongs_to_an_op():

    budget = ROOT / "csrc" / "kernel_budget.txt"
    names = [line.split()[0] for line in budget.read_text().splitlines() if line and not line.startswith("#")]
    assert len(names) > 20
    assert {op_of(f"void mose::{name}<float>(Params)") for name in names} == {
        "batch_norm_act",
        "batch_norm_pool",
        "align_conv",
        "norm_pool",
        "expert_losses",
        "adam",
        "augment",
        "reservoir",
        "other",
    }
    assert [name for name in names if op_of(name) == "other"] == ["null_kernel"]  # not in a step
