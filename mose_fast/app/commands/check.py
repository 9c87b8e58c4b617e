"""``mose-fast check``: a method of your own."""

from __future__ import annotations

import argparse

from mose_fast.app.flags import command

__all__ = ["add"]


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

    broken = 0
    for rule, problem in check_method(arguments.method):
        broken += problem is not None
        print(
            f"{'ok    ' if problem is None else 'broken'}  {rule}{'' if problem is None else f': {problem}'}",
            flush=True,
        )
    return 1 if broken else 0
