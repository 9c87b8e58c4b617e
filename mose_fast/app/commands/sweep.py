"""``mose-fast sweep``: many settings and seeds."""

from __future__ import annotations

import argparse
from pathlib import Path

from mose_fast.app.flags import add_flags, add_place, add_wandb, changes_of, command, place
from mose_fast.app.shown import caution
from mose_fast.learner.named_settings import assignment
from mose_fast.settings.run import ConfigError, RunConfig


def add(commands: argparse._SubParsersAction) -> None:
    many = command(
        commands,
        "sweep",
        _act,
        help="run every combination of some settings' values",
        argument_default=argparse.SUPPRESS,
        description=(
            "Runs every combination of some settings' values, each in a run folder of its own. Finished runs are not"
            " repeated."
        ),
        epilog=(
            "example: mose-fast sweep --width 8 --grid memory=200,500 --grid preset=released,paper --seeds 0-4 --out"
            " runs/first"
        ),
    )
    many.add_argument(
        "file", metavar="FILE", nargs="?", help=".toml or .json file: settings as for run --config, and a table [grid]"
    )
    grid = many.add_argument_group("what varies")
    grid.add_argument(
        "--grid", metavar="NAME=V1,V2", action="append", help="a setting, named as for --set, with values; repeatable"
    )
    grid.add_argument("--seeds", metavar="0-14", help="seeds: numbers and ranges, 0-4 or 0,1,5-9")
    add_flags(many)
    add_place(many)
    files = many.add_argument_group("files")
    files.add_argument("--out", metavar="DIR", required=True, help="the sweep's folder; an unfinished one is continued")
    files.add_argument("--dry-run", action="store_true", help="print plan and forecast of time and memory, then stop")
    add_wandb(many)


def _act(arguments: argparse.Namespace) -> int:
    from mose_fast.experiments.grid import axes_of, grid_cells, read_axes, read_file, read_seeds
    from mose_fast.experiments.sweep import run_grid
    from mose_fast.runs.store import STORE

    given = vars(arguments)
    values, table = read_file(given["file"]) if "file" in given else ({}, {})
    base = RunConfig.from_dict(values) if values else None
    changes = changes_of(arguments, base)
    texts = given.get("grid", [])
    varied = {"method": table.get("method", ())} | dict(
        assignment(text, "--grid") for text in texts if text.startswith("method=")
    )
    methods = varied["method"].split(",") if isinstance(varied["method"], str) else list(varied["method"])
    methods = methods or [changes.get("method", base.method if base else RunConfig.method)]
    axes = {**axes_of(table, methods, "[grid]"), **read_axes(texts, methods)}
    if "seeds" in given:
        if "seed" in axes:
            raise ConfigError("--seeds and a grid over seed are both given; wanted all seeds together, in one of them")
        axes["seed"] = read_seeds(given["seeds"])
    out = Path(given["out"])
    cells = grid_cells(axes, changes, base)
    outcome = run_grid(cells, out, place(arguments), dry_run=given.get("dry_run", False), wandb=given.get("wandb"))
    if outcome.table is not None:
        print(f"table     {out / STORE}")
        caution(outcome.table)
    return 1 if outcome.failures else 0
