"""Loops are read from what nvdisasm really says, and what no loop may hold is refused by name."""

from __future__ import annotations

import pytest

from build_tools.kernel_budget import compare_loops, loop_lines, parse_loops
from build_tools.machine_code import Kernel, Loop, instance_names, parse_code, refusals

SYMBOL = "_ZN2mf4cuda46_GLOBAL__N__65e7a217_13_align_conv_cu_0818f93c22align_conv_sums_kernelENS_17AlignConvBackwardEi"
# Parts of what nvdisasm 13 printed of a kernel for sm_90; the outer loop was written in by hand.
TEXT = f"""\t.section\t.text.{SYMBOL},"ax",@progbits
.text.{SYMBOL}:
        .type           {SYMBOL},@function
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_4530:
        /*0270*/                   PLOP3.LUT P0, PT, PT, PT, PT, 0x80, 0x0 ;
        /*0280*/                   LEA.HI.X R11, R13, UR5, R12, 0x2, P3 ;
        /*0290*/              @!P2 BRA `(.L_x_4535) ;
        /*02b0*/                   VIADD R18, R0, 0xffffffe8 ;
        /*02b1*/                   LDS.128 R4, [R3] ;
        /*02b2*/                   MUFU.RCP R4, R4 ;
.L_x_4536:
        /*02c0*/                   MOV R13, R11 ;
        /*02f0*/                   IMAD.WIDE.U32 R10, R8.reuse, 0x160, R12 ;
        /*0300*/                   LDG.E R13, desc[UR6][R12.64] ;
        /*0320*/                   IMAD.WIDE.U32 R14, R8, 0x160, R10 ;
        /*0330*/                   LDG.E R11, desc[UR6][R10.64] ;
        /*03b0*/                   FADD R22, R13, R22 ;
        /*03d0*/                   FADD R22, R22, R11 ;
        /*0420*/              @!P2 BRA `(.L_x_4536) ;
.L_x_4535:
        /*0430*/                   BSYNC B1 ;
        /*0440*/               @P0 BRA `(.L_x_4530) ;
        /*0450*/                   EXIT ;
\t.section\t.nv.shared,"aw",@nobits
"""


def loop(*operations: str) -> Loop:
    return Loop(tuple(f"{operation} R1" for operation in operations))


def kernel(*loops: Loop) -> Kernel:
    return Kernel("symbol", (), loops)


def test_loops_and_their_classes():
    (found,) = parse_code(TEXT)
    assert found.symbol == SYMBOL
    assert len(found.instructions) == 18
    outer, inner = found.loops
    assert inner.classes == {"float": 2, "special": 0, "shared": 0, "global": 2, "branch": 1, "integer": 3}
    # The inner loop's instructions are not the outer one's.
    assert outer.classes == {"float": 0, "special": 1, "shared": 1, "global": 0, "branch": 3, "integer": 3}


def test_names_of_instances():
    name = "26batch_norm_act_sums_kernelI13__nv_bfloat16LNS0_8NormFormE2EEEvNS_20BatchNormActBackwardEi"
    assert instance_names([SYMBOL, f"_ZN2mf4cuda9_GLOBAL__{name}"]) == [
        "align_conv_sums_kernel",
        "batch_norm_act_sums_kernel<__nv_bfloat16, (NormForm)2>",
    ]


@pytest.mark.parametrize(
    ("operations", "told"),
    [
        (["LDL.64"], "1 x LDL.64: local memory in a loop"),
        (["STL"], "1 x STL: local memory in a loop"),
        (["LDS.U8"] * 4, "4 x LDS.U8: shared memory read in pieces of a word"),
        (["LDS.U16"] * 8, "8 x LDS.U16: shared memory read in pieces of a word"),
        (
            [f"STG.E.U16 desc[UR6][R2.64{offset}]," for offset in ("", "+0x2", "+0x4", "+0x6")],
            "4 x STG.E.U16 in a row: neighbours of 16 bits stored one by one",
        ),
    ],
)
def test_refusals(operations, told):
    assert refusals(kernel(loop(*operations))) == [told]


def test_what_is_not_refused():
    assert refusals(kernel(loop("LDS.128", "LDS", "LDS.U8", "STG.E.U8", "STG.E.U16", "LDG.E.U16"))) == []
    # A warp's lanes store neighbours, a lane does not.
    apart = [f"STG.E.U16 desc[UR6][R2.64{offset}]," for offset in ("", "+0x40", "+0x80", "+0xc0")]
    assert refusals(kernel(loop(*apart))) == []


def test_a_loop_that_grew_by_more_than_three_percent_is_refused():
    before = kernel(loop(*["FADD"] * 100, *["IMAD"] * 100))
    budgets = parse_loops(loop_lines({"k<(Form)2, true>": before}))
    assert budgets == {"k<(Form)2,true>": [[200, 100, 0, 0, 0, 0, 100]]}
    assert compare_loops({"k<(Form)2, true>": before}, budgets) == []
    within = kernel(loop(*["FADD"] * 100, *["IMAD"] * 103))
    assert compare_loops({"k<(Form)2, true>": within}, budgets) == []
    grown = kernel(loop(*["FADD"] * 100, *["IMAD"] * 107))
    assert compare_loops({"k<(Form)2, true>": grown}, budgets) == [
        "k<(Form)2,true>, loop 1: 207  instructions, granted are 200",
        "k<(Form)2,true>, loop 1: 107 integer instructions, granted are 100",
    ]


def test_other_loops_and_refusals_are_told():
    budgets = {"k": [[8, 8, 0, 0, 0, 0, 0]]}
    assert compare_loops({"k": kernel(loop(*["FADD"] * 8)), "not listed": kernel(loop("FADD"))}, budgets) == []
    assert compare_loops({}, budgets) == ["k has lines, but there is no such kernel"]
    assert compare_loops({"k": kernel()}, budgets) == ["k has 0 loops; granted are 1"]
    assert compare_loops({"k": kernel(loop(*["FADD"] * 7, "LDL"))}, budgets) == ["k: 1 x LDL: local memory in a loop"]
