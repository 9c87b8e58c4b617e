"""``mose-fast check``: a method of your own."""

from __future__ import annotations

import argparse

from mose_fast.app.flags import command


def add(commands: argparse._SubParsersAction) -> None:
    check = command(
        commands,
        "check",
        _act,
        help="check whether a method of your own keeps the rules",
        description=(
            "Trains the method for a few seconds on made-up images, on the CPU: state, undoing, planning ahead, random"
            " numbers, and whether a GPU would have to wait (docs/adding_a_method.md)."
        ),
        epilog="example: mose-fast check smooth_er.py:SmoothEr",
    )
    check.add_argument("method", metavar="METHOD", help="path/to/file.py:Name, or the name of an installed method")


def _act(arguments: argparse.Namespace) -> int:
    from mose_fast.app.check import check_method

    broken = []
    for rule, problem, asked in check_method(arguments.method):
        if not asked:
            print(f"--      {rule}: not asked, since {problem}", flush=True)
            continue
        if problem is None:
            print(f"ok      {rule}", flush=True)
            continue
        print(f"broken  {rule}: {'the same' if problem in broken else problem}", flush=True)
        broken.append(problem)
    return 1 if broken else 0
