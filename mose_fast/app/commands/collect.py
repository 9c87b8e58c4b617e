"""``mose-fast collect``: the table of runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mose_fast.app.flags import command
from mose_fast.app.shown import caution
from mose_fast.runs.files import check_folders


def add(commands: argparse._SubParsersAction) -> None:
    gather = command(
        commands, "collect", _act, prints_result=True, help="rebuild the table of runs from the run folders"
    )
    gather.add_argument("folder", metavar="DIR", help="folder of a sweep, or any folder above run folders")


def _act(arguments: argparse.Namespace) -> int:
    check_folders([arguments.folder])
    from mose_fast.runs.store import STORE, collect

    table, skipped = collect(arguments.folder)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"{len(table)} runs in {Path(arguments.folder) / STORE}, {len(skipped)} folders skipped")
    caution(table)
    return 0
