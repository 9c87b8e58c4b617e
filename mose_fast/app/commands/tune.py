"""``mose-fast tune``: search settings."""

from __future__ import annotations

import argparse
from pathlib import Path

from mose_fast.app.flags import FLAGS, add_flags, add_place, changes_of, command, place
from mose_fast.settings.run import RunConfig, StreamConfig


def add(commands: argparse._SubParsersAction) -> None:
    search = command(
        commands,
        "tune",
        _act,
        help="search settings of a method on held-out training images",
        argument_default=argparse.SUPPRESS,
        description=(
            "Searches settings of a method with Optuna. Runs are evaluated on training images that are held out; no"
            " test image is read. To continue after an interruption, run the same command again."
        ),
        epilog="example: mose-fast tune --method er --trials 12 --seeds 0-1 --width 8 --limit-per-task 200",
    )
    search.add_argument("--trials", type=int, metavar="N", required=True, help="trials in all, earlier ones included")
    search.add_argument(
        "--space", metavar="FILE", help=".toml or .json file with a table [space] [the ranges of docs/tuning.md]"
    )
    search.add_argument("--seeds", metavar="0-14", help="seeds of each trial: 0-4 or 0,1,5-9 [0-1]")
    add_flags(search, [name for name in FLAGS if name not in ("seed", "evaluate_on")])
    add_place(search)
    files = search.add_argument_group("files")
    files.add_argument("--out", metavar="DIR", help="the study's folder [runs/tune-STREAM-METHOD]")
    files.add_argument("--dry-run", action="store_true", help="print the forecast of time, then stop")


def _act(arguments: argparse.Namespace) -> int:
    from mose_fast.experiments.grid import read_seeds
    from mose_fast.experiments.tune.tuning import tune

    given = vars(arguments)
    changes = changes_of(arguments, None)
    method = changes.pop("method", RunConfig.method)
    stream = Path(changes.get("stream.name", StreamConfig.name)).stem
    tune(
        method,
        trials=given["trials"],
        out=given.get("out", Path("runs") / f"tune-{stream}-{Path(method).stem}"),
        space=given.get("space"),
        seeds=read_seeds(given.get("seeds", "0-1")),
        changes=changes,
        place=place(arguments),
        dry_run=given.get("dry_run", False),
    )
    return 0
