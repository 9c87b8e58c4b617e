"""A check in CI: native code must be faster than the reference on this processor. Nothing else
should run on the machine.

    python -m bench.gate

The two are timed alternately, so that a change of clock rate or load affects both. The ratio of the
medians decides, and a miss is measured once more. The committed results (bench/results/cpu.csv)
have larger ratios than the gate asks for, which leaves room for noise.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from bench import bench_augment, bench_expert_losses
from bench.common import CLASSES, HEADLINE, Case
from mose_fast.runs.clock import laps

_SHAPE = {"E": 4, "N": HEADLINE, "P": 128, "K": CLASSES[0], "D": 512}
_LOSSES = Case("expert_losses", "native", "cpu", torch.float32, "forward+backward", _SHAPE)
_VIEWS = Case("augment", "native", "cpu", torch.float32, shape={"N": HEADLINE, "H": 32})

#: What is timed, the function that makes its calls, and the least ratio.
GATES = ((_LOSSES, bench_expert_losses.make_call, 1.5), (_VIEWS, bench_augment.make_call, 1.5))


def ratio(slow: Callable[[], object], fast: Callable[[], object], rounds: int = 15, shortest: float = 0.02) -> float:
    """How many times longer ``slow`` takes than ``fast``: of the medians of so many rounds."""

    def time_calls(call: Callable[[], object], calls: int) -> float:
        return statistics.fmean(laps(torch.device("cpu"), call, calls))

    counts = []
    for call in (slow, fast):
        time_calls(call, 2)
        counts.append(max(1, int(shortest / max(time_calls(call, 1), 1e-7))))
    turns = [(time_calls(slow, counts[0]), time_calls(fast, counts[1])) for _ in range(rounds)]
    return statistics.median(a for a, _ in turns) / statistics.median(b for _, b in turns)


def check(gates: Iterable[tuple[Case, Callable[[Case], Callable[[], object]], float]]) -> bool:
    """Measures every gate, prints a line for each, and returns whether all ratios are reached."""
    passed = True
    for case, make_call, least in gates:
        torch.manual_seed(0)
        calls = [make_call(replace(case, impl=impl)) for impl in ("reference", "native")]
        measured = ratio(*calls)
        again = ""
        if measured < least:
            again = f" (first try: {measured:.2f})"
            measured = ratio(*calls)
        verdict = "ok" if measured >= least else "TOO SLOW"
        print(
            f"{case.group}, {torch.get_num_threads()} threads: {measured:.2f} times faster, wanted {least:g}:"
            f" {verdict}{again}"
        )
        passed &= measured >= least
    return passed


if __name__ == "__main__":
    sys.exit(0 if check(GATES) else 1)
