"""Runs the experiments behind a table of the paper, and writes our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mose_fast.config import ConfigError
from mose_fast.paper.figures import figure_files, write_figures
from mose_fast.paper.page import overview, render
from mose_fast.paper.plan import Plan
from mose_fast.paper.rows import DEFAULT_PRESETS
from mose_fast.sweep.cells import Failure
from mose_fast.sweep.folder import SweepFolder
from mose_fast.sweep.place import Place
from mose_fast.sweep.scheduler import run_grid
from mose_fast.train.files import RunError, write_atomically

__all__ = ["run_table"]


def run_table(
    name: str,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    preset: str = DEFAULT_PRESETS.mose,
    baselines: str = DEFAULT_PRESETS.baselines,
    methods: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    place: Place | None = None,
    dry_run: bool = False,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Path | None, tuple[Failure, ...]]:
    """Runs the experiments behind a table of the paper that are not finished yet, and writes
    ``NAME.md``, ``NAME.csv`` and the figures that the table has.

    Runs that depart from the paper's protocol are not judged, and the files are called
    ``NAME-trial``. With other presets than the defaults, or for some methods alone, the files'
    names contain them.

    Args:
        name: The table's name, a key of :data:`mose_fast.paper.tables.TABLES`.
        out: Folder of the tables and of the runs, as in a sweep. Tables in the same folder share
            their common runs.
        seeds: The runs' seeds; the paper has 15.
        preset: The preset of MOSE.
        baselines: The preset of all other methods, ``table`` or ``sources``.
        methods: The methods whose rows the table shall have; None: all.
        changes: Settings by dotted name for all runs. If one differs from the paper's protocol,
            there is no pass or fail.
        place: Where to compute.
        dry_run: Only report the paper's cells and the forecast; nothing is written.
        wandb: The W&B project to log to, if any.
        say: Called with the plan and the final lines.

    Returns:
        The path of ``NAME.md``, None after a dry run; and the runs that could not be finished,
        which the table then lacks.

    Raises:
        ConfigError: The name or a setting is unusable; nothing has started.
        StreamError: The data are missing.
        RunError: The folder is in use, holds other runs, or cannot be written.
        Interrupted: Ctrl-C; the same call continues.
    """
    plan = Plan(name, seeds, preset, changes, baselines=baselines, methods=methods)
    if unused := [setting for setting in changes or {} if setting not in plan.used]:
        raise ConfigError(f"{', '.join(unused)} is set, but no run of {name} has this setting")
    if dry_run:
        say(f"{overview(plan)}\n")
    else:
        for line in plan.departure_lines():
            say(line)
    path = Path(out) / f"{plan.stem}.md"
    _refuse_foreign(path, plan, figure_files(plan, SweepFolder(out)))
    outcome = run_grid(plan.cells, out, place, dry_run=dry_run, wandb=wandb, say=say)
    if dry_run:
        return None, ()
    plan.rename(outcome.folders)
    page, table = render(plan, SweepFolder(out), outcome.failures)
    write_atomically(path, page)
    write_atomically(path.with_suffix(".csv"), table)
    write_figures(plan, SweepFolder(out), outcome.failures)
    return path, outcome.failures


def _refuse_foreign(page: Path, plan: Plan, figures: Sequence[Path]) -> None:
    """Refuses to replace files that ``mose-fast paper`` did not write."""
    others = [page.with_suffix(".csv"), *figures]
    try:
        ours = page.read_text(encoding="utf-8", errors="replace").startswith(f"# {plan.name}: ")
    except (FileNotFoundError, NotADirectoryError):
        ours = not any(path.exists() for path in others)
    if not ours:
        raise RunError(
            f"{page} or one of {', '.join(path.name for path in others)} beside it was not written by mose-fast paper"
            f" {plan.name}, and would be replaced; choose another --out"
        )
