"""Predictions are the formulas that the page names, by hand for small launches."""

from __future__ import annotations

import pytest

from build_tools.machine_code import Kernel, Loop
from build_tools.predict import BYTES_RATE, CACHE, ISSUE_RATE, LAUNCH, MEMORY, Launch, markdown, parse_record, predict


def kernel(*loops: list[str]) -> Kernel:
    return Kernel("symbol", (), tuple(Loop(tuple(f"{op} R1" for op in loop)) for loop in loops))


COPY = kernel(["LDG.E.128"] * 4 + ["IMAD"] * 8 + ["STG.E.128"] * 4)


def alone(launch: Launch, code: Kernel):
    (row,) = predict([launch], {launch.kernel: code}, {launch.kernel: 32})
    return row


def test_a_record():
    text = "torch mm 100 2000\nPN4shim8InstanceIXadL_ZN2mf1kEvEEEE 2 3 1 128 64 1000 0 1 5 6 7.5\n"
    first, second = parse_record(text)
    assert first == Launch("torch mm", bytes=100, operations=2000)
    assert second[1:] == (6, 128, 64, 1000.0, 0.0, 1, 5.0, 6.0, 7.5, 0.0)


def test_bytes_bind_a_copy():
    row = alone(Launch("copy", blocks=1056, threads=256, bytes=1e9), COPY)
    assert row.seconds == pytest.approx(1e9 / BYTES_RATE + LAUNCH)
    assert row.binds == "bytes"
    assert row.copy_share == pytest.approx(0.8, rel=0.02)
    assert row.instructions == pytest.approx(1e9 / 128 / 32 * 16 + 1056 * 8 * 100)


def test_instructions_bind_where_there_are_many():
    heavy = kernel(["LDG.E.128"] + ["FFMA"] * 500)
    row = alone(Launch("heavy", blocks=1056, threads=256, bytes=1e9), heavy)
    passes = 1e9 / 16 / 32
    assert row.seconds == pytest.approx((passes * 501 + 1056 * 8 * 100) / ISSUE_RATE + LAUNCH)
    assert row.binds == "issue"


def test_partial_sums_are_a_chain_of_waits():
    one = kernel(["LDG.E.STRONG.SYS", "FADD"] * 8)
    ahead = kernel(["LDG.E.STRONG.SYS"] * 8 + ["FADD"] * 8)
    slow, fast = (alone(Launch("merge", threads=256, parts=40), code) for code in (one, ahead))
    assert slow.seconds == pytest.approx(LAUNCH + MEMORY + 40 * CACHE)
    assert fast.seconds == pytest.approx(LAUNCH + MEMORY + 40 / 8 * CACHE)
    divided = kernel((["LDG.E"] * 3 + ["MUFU.RCP", "FADD", "FADD", "FADD"]) * 8)
    together = kernel(["LDG.E"] * 24 + ["MUFU.RCP", "FADD", "FADD", "FADD"] * 8)
    slow, fast = (alone(Launch("merge", threads=256, parts=40), code) for code in (divided, together))
    assert slow.seconds - fast.seconds == pytest.approx(40 * CACHE * 7 / 8)


def test_convolutions_are_left_to_their_measurement():
    whole = predict([Launch("torch convolution", bytes=1e9), Launch("torch mm", bytes=1e6)], {}, {})
    assert [row.kernel for row in whole] == ["torch mm"]
    page = markdown(whole, [])
    assert "| whole step | 3,202 | 6,000 | |" in page
    assert "| `torch mm` | 1 | 1.0 |" in page


def test_a_launch_without_machine_code_is_an_error():
    with pytest.raises(KeyError, match="gone"):
        predict([Launch("gone")], {}, {})
