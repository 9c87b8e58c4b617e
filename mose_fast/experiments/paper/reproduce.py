"""Runs the experiments behind tables of the paper, and writes our numbers beside the paper's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mose_fast import streams
from mose_fast.experiments.cells import Failure
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.paper.description import DATA_SETS, DEFAULT_PRESETS, Presets
from mose_fast.experiments.paper.measured import FinishedRuns
from mose_fast.experiments.paper.pages import MARK, Section, cautions, listing, overview, text_page, web_page
from mose_fast.experiments.paper.paper_figures import figure_files, write_figures
from mose_fast.experiments.paper.plan import Plan, all_plans, data_sets, departure_lines, stem_of
from mose_fast.experiments.place import Place
from mose_fast.experiments.sweep import run_grid
from mose_fast.runs.files import RunError, write_atomically
from mose_fast.settings.knob import plain
from mose_fast.settings.run import ConfigError
from mose_fast.streams import StreamError

#: The name that stands for all tables.
ALL = "all"

# Seconds for measuring the first steps of runs, before them and in a dry run. All tables have some
# two hundred settings, and expensive ones take minutes on a CPU.
_MEASURE_FOR = {False: 60.0, True: 300.0}

# Seconds between two times that the files are written while runs go on, and how many times as long
# as the writing took.
_EVERY, _SHARE = 60.0, 50.0


def run_table(
    name: str,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    preset: str = DEFAULT_PRESETS.mose,
    baselines: str = DEFAULT_PRESETS.baselines,
    methods: Sequence[str] | None = None,
    without: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    place: Place | None = None,
    dry_run: bool = False,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Path | None, tuple[Failure, ...]]:
    """Runs the experiments behind a table of the paper that are not finished yet, and writes
    ``NAME.md``, ``NAME.csv``, the figures that the table has and ``NAME.html``, which shows them:
    with what there is as runs finish, and when all have ended.

    Args:
        name: The table's name, a key of :data:`.tables.TABLES`; or ``all``: all tables, and
            ``paper.html``, which shows them on one page.
        out: Folder of the tables and of the runs, as in a sweep. Tables in it share common runs.
        preset: MOSE's, ``released`` or ``paper``. The files' names contain what is not usual.
        baselines: The preset of all other methods, ``table`` or ``sources``.
        methods: The methods whose rows the table shall have; None: all. Of all tables, those
            without any are left out.
        without: The data sets whose rows the table shall not have, by names or parts of names:
            ``tiny``.
        changes: Settings by dotted name for all runs. If one differs from the paper's protocol,
            the files are called ``NAME-trial``, and there is no pass or fail.

    Returns:
        The path of ``NAME.md`` or ``paper.html``, None after a dry run; and the runs that could not
        be finished, which the tables then lack.

    Raises:
        ConfigError: The name or a setting is unusable; nothing has started.
        StreamError: The data are missing. The message names all data sets that are absent.
        RunError: The folder is in use, holds other runs, or cannot be written.
        Interrupted: Ctrl-C; the same call continues.
    """
    presets, changes = Presets(plain(preset), plain(baselines)), changes or {}
    left_out, methods = data_sets(without), None if methods is None else [*map(plain, methods)]
    if name == ALL:
        plans = all_plans(seeds, presets, changes, methods, left_out)
    else:
        plans = [Plan(name, seeds, presets, changes, methods, left_out)]
    if unused := [setting for setting in changes if not any(setting in plan.used for plan in plans)]:
        raise ConfigError(f"{', '.join(unused)} is set, but no run of {name} has this setting")
    departures = departure_lines(plans)
    if not dry_run:
        for line in departures:
            say(line)
    elif name != ALL:
        say(f"{overview(plans[0])}\n")
    folder = SweepFolder(out)
    stem = stem_of("paper", presets, methods, left_out, trial=bool(departures)) if name == ALL else plans[0].stem
    page = folder.path / f"{stem}.html"
    if page.exists() and f'content="{MARK[1]}"' not in page.read_text(encoding="utf-8", errors="replace"):
        raise RunError(f"{page} was not written by mose-fast paper, and would be replaced; choose another --out")
    for plan in plans:
        _refuse_foreign(folder.path / f"{plan.stem}.md", plan, figure_files(plan, folder))
    pages = _Pages(plans, folder, page, left_out, say)
    # The seed varies slowest, so that every setting is run early.
    cells = {cell.name: cell for plan in plans for cell in plan.cells}.values()
    ordered = sorted(cells, key=lambda cell: plans[0].seeds.index(cell.config.seed))
    options = {"dry_run": dry_run, "measure_for": _MEASURE_FOR[dry_run], "wandb": wandb, "say": say}
    try:
        outcome = run_grid(ordered, out, place, **options, on_done=pages.update)
    except StreamError as error:
        raise _with_absent(error, ordered) from error
    if dry_run:
        if name == ALL:
            say(listing(plans, outcome.folders, outcome.forecast))
        return None, ()
    sections = pages.write(outcome.folders, outcome.failures)
    for line in cautions(run for section in sections for run in section.measured.runs):
        say(line)
    if name == ALL:
        return page, outcome.failures
    say(f"page      {page}")
    return folder.path / f"{stem}.md", outcome.failures


class _Pages:
    """The files of the tables, and the page that shows them."""

    def __init__(
        self,
        plans: Sequence[Plan],
        folder: SweepFolder,
        page: Path,
        left_out: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.plans, self.folder, self.page, self.left_out, self.say = plans, folder, page, left_out, say
        self.finished: FinishedRuns | None = None
        self.next = 0.0

    def update(self, folders: Mapping[str, str]) -> None:
        """Writes the files after a run, unless they were just written: this waits for the next
        results, and may take minutes where there are thousands of runs.
        """
        began = time.monotonic()
        if began < self.next:
            return
        try:
            self.write(folders)
        except RunError as error:
            self.say(f"warning: {error}")
        ended = time.monotonic()
        self.next = ended + max(_EVERY, _SHARE * (ended - began))

    def write(self, folders: Mapping[str, str], failures: Sequence[Failure] = ()) -> list[Section]:
        """Writes the files without the runs that could not be finished; returns what they show.

        Args:
            folders: Name of the run folder by name of the cell.
        """
        if self.finished is None:
            self.finished = FinishedRuns(self.plans, self.folder, folders)
        sections = []
        for plan in self.plans:
            names = {folders[cell.name] for cell in plan.cells}
            own = [failure for failure in failures if failure.name in names]
            measured = self.finished.measure(plan, own)
            text, table = text_page(measured, own)
            write_atomically(self.folder.path / f"{plan.stem}.md", text)
            write_atomically(self.folder.path / f"{plan.stem}.csv", table)
            sections.append(Section(measured, write_figures(measured, self.folder)))
        write_atomically(self.page, web_page(sections, failures, self.left_out))
        return sections


def _with_absent(error: StreamError, cells: Sequence[Cell]) -> StreamError:
    """The error, with the names of all data sets of the runs that are absent."""
    configs = [cell.config.stream for cell in cells]
    used = {(config.name, config.data_dir) for config in configs if config.name in DATA_SETS}
    absent = sorted(name for name, data_dir in used if not streams.locate(name, data_dir)[0])
    if not absent:
        return error
    without = f"; to do without: --without {','.join(absent)}" if len(absent) < len(used) else ""
    return StreamError(f"{error}. Absent here: {', '.join(absent)}{without}")


def _refuse_foreign(page: Path, plan: Plan, figures: Sequence[Path]) -> None:
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
