"""Predictions are the formulas that the page names, by hand for small launches."""

from __future__ import annotations

import pytest

from build_tools.machine_code import Kernel, Loop
from build_tools.predict import (
    BYTES_RATE,
    CACHE,
    CONVOLUTIONS,
    EARLY,
    ISSUE_RATE,
    LAUNCH,
    MEMORY,
    PROMPT,
    TENSOR_OPERATIONS,
    TENSOR_RATE,
    Launch,
    Prediction,
    elapsed,
    markdown,
    parse_record,
    predict,
)


def kernel(*loops: list[str]) -> Kernel:
    return Kernel("symbol", (), tuple(Loop(tuple(f"{op} R1" for op in loop)) for loop in loops))


COPY = kernel(["LDG.E.128"] * 4 + ["IMAD"] * 8 + ["STG.E.128"] * 4)


def alone(launch: Launch, code: Kernel):
    (row,) = predict([launch], {launch.kernel: code}, {launch.kernel: 32}).rows
    return row


def test_a_record():
    text = "torch mm 100 2000\nPN4shim8InstanceIXadL_ZN2mf1kEvEEEE 2 3 1 128 64 1000 0 1 5 6 7.5 1\n"
    first, second = parse_record(text)
    assert first == Launch("torch mm", bytes=100, operations=2000)
    assert second[1:] == (6, 128, 64, 1000.0, 0.0, 1, 5.0, 6.0, 7.5, True, 0.0, 0, (), ())
    (third,) = parse_record(text.splitlines()[1] + " @8.0,9.5")
    assert third == second._replace(passes=(8.0, 9.5))


def test_streams_and_waits_of_a_record():
    lines = ["torch a 0 0", "wait 1 0", "on 1", "torch b 0 0", "torch c 0 0", "on 0", "torch d 0 0", "wait 0 1"]
    # The third stream waits for the first, and so for what that has yet to wait for.
    lines += ["wait 2 0", "on 2", "torch e 0 0", "on 0", "torch f 0 0"]
    found = {launch.kernel[-1]: (launch.stream, launch.after) for launch in parse_record("\n".join(lines))}
    assert found == {"a": (0, ()), "b": (1, (0,)), "c": (1, ()), "d": (0, ()), "e": (2, (2, 3)), "f": (0, (2,))}


def seconds(*launches: tuple[int, float, tuple[int, ...]], pause: float = 2.0) -> float:
    """Of launches that are (stream, seconds, what they wait for)."""
    known = [Launch("x", stream=stream, after=after) for stream, _, after in launches]
    return elapsed(known, [work for _, work, _ in launches], [pause] * len(launches))


def test_one_stream_pauses_before_each_kernel():
    assert seconds((0, 10, ()), (0, 1, ()), (0, 5, ())) == 2 + 10 + 2 + 1 + 2 + 5


def test_a_stream_that_is_ready_fills_the_pauses_of_another():
    # Both begin at 2; whichever runs, the other one has paused long enough when it ends.
    assert seconds((0, 10, ()), (0, 10, ()), (1, 3, ()), (1, 3, ())) == 2 + 26
    # 2 to 12, 12 to 13, 14 to 24: a second of the pause is left.
    assert seconds((0, 10, ()), (0, 10, ()), (1, 1, ())) == 24


def test_a_wait_is_for_the_end_of_a_kernel_and_a_pause():
    # A branch of one kernel beside the network's second one, which was ready as early, and a join.
    fork = ((0, 10, ()), (1, 4, (0,)), (0, 6, ()), (0, 1, (1,)))
    assert seconds(*fork) == 2 + 10 + 2 + 4 + 6 + 2 + 1
    assert seconds((0, 10, ()), (1, 4, (0,)), (0, 1, (1,))) == 2 + 10 + 2 + 4 + 2 + 1


def test_work_adds_up_whatever_the_streams():
    alone = [(0, 3, ())] * 6
    apart = [(number, 3, ()) for number in range(6)]
    assert seconds(*alone, pause=0) == seconds(*apart, pause=0) == 18


def test_bytes_bind_a_copy():
    row = alone(Launch("copy", blocks=1056, threads=256, bytes=1e9), COPY)
    assert row.seconds == pytest.approx(1e9 / BYTES_RATE + LAUNCH)
    assert row.binds == "bytes"
    assert row.copy_share == pytest.approx(0.8, rel=0.02)
    assert row.instructions == pytest.approx(1e9 / 128 / 32 * 16 + 1056 * 8 * 100)


def test_a_kernel_that_may_begin_early_pauses_less():
    copy = Launch("copy", blocks=1056, threads=256, bytes=1e9)
    of = {"copy": COPY}, {"copy": 32}
    usual, early = predict([copy, copy], *of).seconds, copy._replace(early=True)
    # The second one is let begin by the first only if that one is launched so, too.
    assert predict([copy, early], *of).seconds == pytest.approx(usual - LAUNCH + PROMPT)
    assert predict([early, early], *of).seconds == pytest.approx(usual - 2 * LAUNCH + PROMPT + EARLY)
    # What runs between them on another stream does not count.
    apart = copy._replace(stream=1, after=(0,))
    assert predict([early, apart, early], *of).rows[0].seconds == pytest.approx(
        3 * usual / 2 - 2 * LAUNCH + PROMPT + EARLY
    )


def test_instructions_bind_where_there_are_many():
    heavy = kernel(["LDG.E.128"] + ["FFMA"] * 500)
    row = alone(Launch("heavy", blocks=1056, threads=256, bytes=1e9), heavy)
    passes = 1e9 / 16 / 32
    assert row.seconds == pytest.approx((passes * 501 + 1056 * 8 * 100) / ISSUE_RATE + LAUNCH)
    assert row.binds == "issue"


def test_each_loop_counts_where_its_passes_are_known():
    outer, inner, never = ["IADD3"] * 30, ["LDG.E.128"] + ["FFMA"] * 99, ["FFMA"] * 50
    code = kernel(outer, inner, never)
    code = Kernel("symbol", sum((loop.instructions for loop in code.loops), ("EXIT R1",) * 7), code.loops)
    launch = Launch("counted", blocks=2, threads=64, passes=(1e6, 5e6, 0.0))
    row = alone(launch, code)
    assert row.instructions == 2 * 2 * 7 + 1e6 * 30 + 5e6 * 100
    assert row.seconds == pytest.approx(5e6 / (2 * 2) * MEMORY + MEMORY + LAUNCH)
    with pytest.raises(ValueError, match="counted has 3 loops, but its record has the passes of 2"):
        alone(launch._replace(passes=(1e6, 5e6)), code)


def test_products_bind_where_tensor_instructions_are_many():
    row = alone(Launch("product", blocks=264, threads=256, products=1e6), kernel(["HMMA.16816.F32.BF16"] * 40))
    assert row.seconds == pytest.approx(40e6 * TENSOR_OPERATIONS / TENSOR_RATE + LAUNCH)
    assert row.binds == "products"


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
    convolutions = [Launch("torch convolution", operations=1e9), Launch("torch convolution_backward", operations=2e9)]
    whole = predict([*convolutions, Launch("torch mm", bytes=1e6)], {}, {})
    assert [row.kernel for row in whole.rows] == ["torch mm"]
    assert whole.seconds == pytest.approx(CONVOLUTIONS + LAUNCH + MEMORY)
    page = markdown(whole, Prediction([], 0.0))
    assert "| whole step | 3,202 | 6,000 | |" in page
    assert "| `torch mm` | 1 | 1.0 |" in page


def test_a_launch_without_machine_code_is_an_error():
    with pytest.raises(KeyError, match="gone"):
        predict([Launch("gone")], {}, {})
