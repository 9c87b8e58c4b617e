"""``mose-fast report``: a page of many runs."""

from __future__ import annotations

import argparse
import sys

from mose_fast.app.flags import command
from mose_fast.runs.files import check_folders


def add(commands: argparse._SubParsersAction) -> None:
    page = command(commands, "report", _act, help="one page of tables and figures from many runs")
    page.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders that hold some at any depth")
    page.add_argument("--out", metavar="DIR", help="the report's folder [report in the first DIR]")
    page.add_argument(
        "--against", metavar="LABEL", help="compare every setting with this one of the page's [the best at each memory]"
    )
    page.add_argument(
        "--force", action="store_true", help="put runs of different problems into one table, with a caution"
    )


def _act(arguments: argparse.Namespace) -> int:
    check_folders(arguments.folders)
    from mose_fast.present.report import write_report

    page, skipped = write_report(arguments.folders, arguments.out, force=arguments.force, against=arguments.against)
    for folder, reason in skipped:
        print(f"left out: {folder}: {reason}", file=sys.stderr)
    print(page)
    return 0
