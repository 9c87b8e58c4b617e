"""``mose-fast run``: train on a stream."""

from __future__ import annotations

import argparse
from pathlib import Path

from mose_fast.app.flags import add_flags, add_wandb, command, loggers, read_settings
from mose_fast.app.shown import follow


def add(commands: argparse._SubParsersAction) -> None:
    run = command(
        commands,
        "run",
        _act,
        help="train on a stream, evaluate after every task, write results",
        argument_default=argparse.SUPPRESS,
        description=(
            "Trains on a stream in one pass, evaluates after every task and writes a run folder. `mose-fast list"
            " streams` and `mose-fast list methods` show the choices."
        ),
        epilog="example: mose-fast run --stream digits --width 16 --memory 500 --seed 0",
    )
    add_flags(run)
    files = run.add_argument_group("files and everything else")
    files.add_argument("--out", metavar="DIR", help="the run's folder [runs/STREAM-METHOD-PRESET-mMEMORY-sSEED]")
    files.add_argument("--overwrite", action="store_true", help="replace an earlier run in the folder")
    files.add_argument("--config", metavar="FILE", help="settings from a .json or .toml file; flags override it")
    add_wandb(run)


def _act(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments)
    from mose_fast import train

    given = vars(arguments)
    stream, method = Path(config.stream.name).stem, Path(config.method).stem
    usual = Path("runs") / f"{stream}-{method}-{config.preset}-m{config.memory}-s{config.seed}"
    out = Path(given.get("out", usual))
    listeners = loggers(arguments, out)
    how = {"out": out, "overwrite": given.get("overwrite", False), "whole_process": True}
    return follow(out, lambda shown: train.run(config, **how, listeners=[shown, *listeners]))
