"""``mose-fast resume``: continue an interrupted run."""

from __future__ import annotations

import argparse
from pathlib import Path

from mose_fast.app.flags import add_wandb, command, loggers
from mose_fast.app.shown import follow
from mose_fast.runs.files import RunFolder


def add(commands: argparse._SubParsersAction) -> None:
    resume = command(commands, "resume", _act, help="continue an interrupted run")
    resume.add_argument("folder", metavar="DIR", help="the run's folder")
    add_wandb(resume)


def _act(arguments: argparse.Namespace) -> int:
    out = Path(arguments.folder)
    RunFolder(out).check_resumable()
    from mose_fast import train

    listeners = loggers(arguments, out)
    return follow(out, lambda shown: train.resume(out, listeners=[shown, *listeners], whole_process=True))
