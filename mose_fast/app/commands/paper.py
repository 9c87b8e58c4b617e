"""``mose-fast paper``: the paper's tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from mose_fast.app.flags import FLAGS, add_flags, add_place, add_wandb, changes_of, command, place
from mose_fast.settings.run import RunConfig

# What the description of a table says.
_DESCRIBED = ("method", "preset", "memory", "epochs", "seed", "evaluate_on")


def add(commands: argparse._SubParsersAction) -> None:
    table = command(
        commands,
        "paper",
        _act,
        help="run the experiments of one of the paper's tables and compare the results",
        argument_default=argparse.SUPPRESS,
        description=(
            "Runs the experiments of one of the paper's tables or figures and writes our results beside the paper's,"
            " with pass or miss. To continue after an interruption, run the same command again. With settings that"
            " depart from the paper's protocol it is a trial run, and no pass or miss is reported."
        ),
        epilog=(
            "example: mose-fast paper table1-cifar --data-dir DIR --seeds 0-14; for a small trial run add --width 8"
            " --limit-per-task 20"
        ),
    )
    table.add_argument("name", metavar="NAME", help="a table of `mose-fast list paper`, or all")
    table.add_argument("--seeds", metavar="0-14", help="numbers and ranges, 0-4 or 0,1,5-9; the paper uses 15 [0-2]")
    table.add_argument("--preset", metavar="NAME", help=f"MOSE's preset: released or paper [{RunConfig.preset}]")
    table.add_argument(
        "--baselines", metavar="NAME", help="the other methods' preset: table or sources, their own values [table]"
    )
    table.add_argument("--methods", metavar="A,B", help="the rows of some methods alone: mose, er, ... [all]")
    table.add_argument("--without", metavar="A,B", help="leave out the rows of some data sets, such as tiny [none]")
    add_flags(table, [name for name in FLAGS if name not in _DESCRIBED])
    add_place(table)
    files = table.add_argument_group("files")
    files.add_argument(
        "--out", metavar="DIR", help="folder for tables and runs; tables in one folder share runs [runs/paper]"
    )
    files.add_argument(
        "--dry-run", action="store_true", help="print the paper's numbers and a forecast of time and memory, then stop"
    )
    add_wandb(table)


def _act(arguments: argparse.Namespace) -> int:
    from mose_fast.experiments.grid import read_seeds
    from mose_fast.experiments.paper.description import DEFAULT_PRESETS
    from mose_fast.experiments.paper.reproduce import ALL, run_table
    from mose_fast.present.published import BASELINES

    given = vars(arguments)
    changes = changes_of(arguments, None, [*BASELINES, RunConfig.method])
    preset = changes.pop("preset", RunConfig.preset)
    page, failures = run_table(
        given["name"],
        given.get("out", Path("runs") / "paper"),
        seeds=read_seeds(given.get("seeds", "0-2")),
        preset=preset,
        baselines=given.get("baselines", DEFAULT_PRESETS.baselines),
        methods=given["methods"].split(",") if "methods" in given else None,
        without=given["without"].split(",") if "without" in given else (),
        changes=changes,
        place=place(arguments),
        dry_run=given.get("dry_run", False),
        wandb=given.get("wandb"),
    )
    if page is not None:
        print(f"{'page' if given['name'] == ALL else 'table':<9} {page}")
    return 1 if failures else 0
