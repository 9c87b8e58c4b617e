"""``mose-fast bench``: what a step costs here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mose_fast.app.flags import add_flags, command, read_settings

# It chooses or varies the other settings itself.
_BENCHED = ("stream.batch", "preset", "memory", "width", "device", "precision")


def add(commands: argparse._SubParsersAction) -> None:
    speed = command(
        commands,
        "bench",
        _act,
        prints_result=True,
        help="measure what training costs on this machine, beside plain PyTorch",
        argument_default=argparse.SUPPRESS,
        description=(
            "Measures MOSE's step alone and inside the training loop, with PyTorch's own modules (eager, compiled, as a"
            " CUDA graph) and with our kernels, for each feed; then an evaluation and the machine's peak rates. Images"
            " are random. Close other programs first."
        ),
        epilog="example: mose-fast bench --memory 5000; on a CPU: --width 8",
    )
    speed.set_defaults(seconds=2.0, only="", csv=None, traceback=False)
    add_flags(speed, _BENCHED)
    speed.add_argument("--seconds", type=float, metavar="S", help="seconds for each measurement, after its warm-up [2]")
    speed.add_argument("--only", metavar="TEXT", help="run only the measurements whose names contain this text")
    speed.add_argument("--csv", metavar="FILE", help="also write the rows to this file")
    speed.add_argument("--traceback", action="store_true", help="print where a measurement failed, too")


def _act(arguments: argparse.Namespace) -> int:
    from mose_fast.app.bench import benchmark

    report = benchmark(
        read_settings(arguments),
        seconds=arguments.seconds,
        only=arguments.only,
        watch=lambda name: print(f"... {name}", file=sys.stderr),
    )
    print(report.text())
    for name, trace in report.failures.items() if arguments.traceback else ():
        print(f"\n{name} failed:\n{trace}", file=sys.stderr)
    if arguments.csv is not None:
        Path(arguments.csv).write_text(report.table(), encoding="utf-8")
    return 0
