"""What several commands say at their end."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from mose_fast.runs.progress import Progress


def interrupted(error: KeyboardInterrupt, further: str = "") -> int:
    """Prints what ended the command; returns a shell's exit code for a death by that signal."""
    number = getattr(error, "number", signal.SIGINT)
    what = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    print(f"mose-fast: {what}{further}", file=sys.stderr)
    return 128 + number


def caution(table: pandas.DataFrame) -> None:
    """Says what differs in the code and the machines that computed the runs of a table."""
    from mose_fast.present.statistics import code_warnings

    for warning in code_warnings(table.to_dict("records")):
        print(f"mose-fast: caution: {warning}", file=sys.stderr)


def follow(out: Path, start: Callable[[Progress], dict[str, Any]]) -> int:
    """Calls ``start(listener)``, shows its progress and, at the end, its results."""
    from mose_fast.runs.clock import PHASES
    from mose_fast.runs.files import RunFolder
    from mose_fast.runs.progress import Progress
    from mose_fast.runs.results import summary

    progress = Progress(out)
    try:
        results = start(progress)
    except KeyboardInterrupt as error:
        again = f"; to continue: mose-fast resume {shlex.quote(str(out))}"
        return interrupted(error, again if progress.started else " before the first batch")
    seconds = results["seconds"]
    folder = RunFolder(out)
    print(f"\n{summary(results)}\n")
    parts = ", ".join(f"{part} {seconds[part]:.1f}" for part in (*PHASES, "other") if seconds[part] > 0)
    since = "the process started" if seconds["wall_since"] == "process" else "the call"
    print(f"time      {seconds['wall']:.1f} s since {since}: {parts}")
    peak = results["peak_memory_bytes"]
    gpu = "" if peak["device"] is None else f", {peak['device'] / 2**20:,.0f} MiB on the GPU (allocated by torch)"
    print(f"memory    at most {peak['host'] / 2**20:,.0f} MiB on the host{gpu}")
    kept = results["kept"]
    beside = f", and {kept['bytes_beside'] / 2**20:.1f} MiB beside" if kept["bytes_beside"] else ""
    print(f"kept      at most {kept['images']:,} images of the stream, {kept['bytes'] / 2**20:.1f} MiB{beside}")
    print(f"results   {folder.results}")
    print(
        f"          {folder.accuracy.name}, {folder.figure.name}, {folder.config.name} and {folder.events.name}/"
        " beside it"
    )
    return 0
