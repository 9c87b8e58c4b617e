"""The command line ``mose-fast`` (docs/command_line.md).

Commands import what they need when they run: torch, pandas and scipy take seconds to import, and
help, lists and messages on wrong flags and missing folders should not wait for them.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import warnings
from collections.abc import Collection, Sequence

from tqdm import tqdm

from mose_fast._version import __version__
from mose_fast.app.commands import (
    bench,
    check,
    collect,
    doctor,
    export,
    list,
    paper,
    predict,
    report,
    resume,
    run,
    sweep,
    tune,
)
from mose_fast.app.flags import FLAGS, Parser
from mose_fast.app.shown import interrupted
from mose_fast.errors import MoseFastError
from mose_fast.output import Guarded, guarded_output
from mose_fast.settings.knob import as_text
from mose_fast.signals import raised_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of the process's arguments, and returns the exit code: 0; 1
    where runs failed, or doctor finds that none is possible; 2 for unusable settings, data or
    folders; 128 and the signal's number after Ctrl-C (130), SIGTERM (143) and SIGHUP (129).
    """
    with guarded_output() as shown, raised_at_once(), warnings.catch_warnings():
        arguments = build_parser().parse_args(argv)
        warnings.showwarning = lambda message, *place, **more: tqdm.write(f"warning: {message}", file=sys.stderr)
        if "torch" not in sys.modules:
            from mose_fast.threads import settle_threads

            settle_threads(os.environ)
        try:
            code = arguments.act(arguments)
        except MoseFastError as error:
            print(f"mose-fast: {error}{_instead(error, vars(arguments).get('flags'))}", file=sys.stderr)
            return error.exit_code
        except OSError as error:
            # With a file name, the user named that file or its folder; without one, the program is
            # at fault.
            if error.filename is None:
                raise
            print(f"mose-fast: cannot use {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            return interrupted(error, vars(arguments).get("again", ""))
        return _lost(shown, arguments.prints_result) or code


def _instead(error: MoseFastError, flags: Collection[str] | None) -> str:
    """How to give the probable setting by one of a command's flags, None: it takes no settings."""
    if error.instead is None or flags is None:
        return ""
    name, value = error.instead
    return f" (--{FLAGS[name].flag} {value})" if name in flags else f" (--set {name}={as_text(value)})"


def build_parser() -> argparse.ArgumentParser:
    """All commands; a flag that is not given sets no attribute, so as not to override a file."""
    parser = Parser(prog="mose-fast", description="Online continual learning with MOSE.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mose-fast {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for module in (run, resume, sweep, tune, collect, report, paper, bench, export, predict, list, check, doctor):
        module.add(commands)
    return parser


def _lost(shown: Guarded, needed: bool) -> int:
    """Says if standard output failed; returns the exit code, 0 unless the output was ``needed``."""
    shown.flush()
    if shown.failure is None:
        return 0
    if shown.failure.errno != errno.EPIPE:
        told = "" if needed else "; the results are saved in files"
        print(f"mose-fast: standard output cannot be written: {shown.failure.strerror}{told}", file=sys.stderr)
    elif needed:
        return 128 + signal.SIGPIPE
    return 2 if needed else 0
