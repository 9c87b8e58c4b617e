"""The page of a report: one HTML file that needs no other, and its tables and figures beside it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mose_fast._version import __version__
from mose_fast.present.page import fill
from mose_fast.present.report_figures import figures
from mose_fast.present.report_runs import Group, Skipped, group_runs, read_folders
from mose_fast.present.report_tables import (
    comparison_table,
    comparisons,
    deviations,
    images,
    part_name,
    seeds,
    streams,
    tables,
)
from mose_fast.present.statistics import FEW_SEEDS, check_comparable
from mose_fast.present.table import counted
from mose_fast.runs.files import RunError, remove_leftovers, write_atomically
from mose_fast.runs.lock import FolderLock

#: Endings of the files of a table.
FORMATS = ("csv", "md", "tex")

_PAGE = "report.html"

# In the head of a page, the files beside it that are the report's.
_OWN_FILES = "mose-fast-files"

# Rows of a table that a reader scrolls past without being asked, and sentences that one reads.
_LONG, _SENTENCES = 100, 24


def write_report(
    folders: Iterable[str | Path], out: str | Path | None = None, *, force: bool = False, against: str | None = None
) -> tuple[Path, list[Skipped]]:
    """Reads finished runs and writes ``report.html``, ``tables/*.csv``, ``.md`` and ``.tex``, and
    ``figures/*.pdf`` and ``.svg``.

    Args:
        folders: Run folders, or folders that hold some at any depth, such as a sweep's.
        out: Folder of the report; an earlier report in it is replaced, all other files stay. None:
            ``report`` in the first of ``folders``.
        force: Put runs of different problems into the same tables, and say so on the page, instead
            of refusing.
        against: The label of the setting that all others are compared with; None: at each memory
            the one with the highest mean ACC.

    Returns:
        The page, and the folders that were skipped, which it names too.

    Raises:
        RunError: A folder does not exist, there is no finished run, no setting has the label
            ``against``, or the report cannot be written.
        IncomparableRuns: The runs are of different problems and ``force`` is False.
    """
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise RunError("there is no folder to report on; wanted at least one")
    runs, skipped = read_folders(folders)
    groups, repeated = group_runs(runs)
    skipped += repeated
    warnings = check_comparable([run.row for g in groups for run in g.runs], force=force)
    labels = list(dict.fromkeys(g.label for g in groups))
    if against is not None and against not in labels:
        raise RunError(f"against is {against!r}; wanted one of {', '.join(labels)}")
    contents = render_page(groups, skipped, warnings, against)
    out = folders[0] / "report" if out is None else Path(out)
    try:
        for name in ("tables", "figures"):
            (out / name).mkdir(parents=True, exist_ok=True)
        with FolderLock(out, "report"):
            _remove_earlier(out, contents)
            # The page first: it is what tells that the other files are a report's.
            for name, content in contents.items():
                write_atomically(out / name, content)
    except OSError as error:
        raise RunError(f"cannot write the report into {out}: {error.strerror}; choose another --out") from error
    return out / _PAGE, skipped


def _remove_earlier(out: Path, contents: Iterable[str]) -> None:
    """Deletes the files that the report in ``out`` names as its own; refuses to replace others."""
    page = out / _PAGE
    own: list[str] = []
    if page.exists():
        found = re.search(
            f'<meta name="{_OWN_FILES}" content="([^"]*)">', page.read_text(encoding="utf-8", errors="replace")
        )
        if found is None:
            raise RunError(
                f"{page} is not a report of this version of mose-fast; choose another --out, or move it away"
            )
        own = [name for name in html.unescape(found[1]).split() if re.fullmatch(r"(tables|figures)/[\w.-]+", name)]
    foreign = [name for name in contents if name != _PAGE and name not in own and (out / name).exists()]
    if foreign:
        raise RunError(
            f"{out} holds {', '.join(foreign[:5])}, which no report wrote and this one would replace; choose another"
            " --out"
        )
    for name in own:
        (out / name).unlink(missing_ok=True)
    for folder in (out, out / "tables", out / "figures"):
        remove_leftovers(folder, {re.escape(Path(name).name) for name in (*own, *contents)})


def render_page(
    groups: Sequence[Group], skipped: Sequence[Skipped], warnings: Sequence[str], against: str | None = None
) -> dict[str, str | bytes]:
    """The files of a report by their paths in its folder, the page first."""
    pictures = figures(groups)
    by_name = {table.name: table for table in tables(groups)}
    found = comparisons(groups, against)
    if found:
        by_name["comparisons"] = comparison_table(found, against)
    contents: dict[str, str | bytes] = {}
    for name, table in by_name.items():
        for ending, text in zip(FORMATS, (table.csv(), table.markdown(), table.latex()), strict=True):
            contents[f"tables/{name}.{ending}"] = text
    for picture in pictures:
        contents |= {f"figures/{picture.name}.svg": picture.svg, f"figures/{picture.name}.pdf": picture.pdf}
    notes = [f"{w[:1].upper()}{w[1:]}." for w in warnings]
    if few := sum(len(c.seeds) < FEW_SEEDS for _, c in found):
        notes.append(
            f"{few} of {counted(len(found), 'comparison')} rest on fewer than {FEW_SEEDS} common seeds, too few to"
            " show much."
        )
    notes += _notes(groups)
    told = [f"M = {memory}: {c.a} against {c.b}: {c.sentence()}." for memory, c in found[:_SENTENCES]]
    told += [f"And {len(found) - len(told)} more in the table."] if len(found) > len(told) else []
    early = ("accuracy", "anytime", "new-task-and-bof", "tradeoffs")
    sections = [
        ("results", "Results", [by_name["main"], by_name["estimates"]]),
        *([("comparison", "Comparison", [told, by_name["comparisons"]])] if found else []),
        *((p.name, p.title, [p]) for p in pictures if p.name in early),
        ("per-expert", "Experts", [by_name["experts"]]),
        ("per-task", "Accuracy by task", [by_name["tasks"]]),
        *((p.name, p.title, [p]) for p in pictures if p.name not in early),
        ("costs", "Cost", [by_name["cost"], by_name["size"]]),
    ]
    heading = f"Report on {streams(groups)}, {images(groups)} images"
    acc = "mean accuracy over all tasks after the last one"
    if part_name(groups) == "part":
        acc = "accuracy on all of them at the end of the stream, which has no task boundaries and so no forgetting"
    lead = (
        f"{counted(sum(g.n for g in groups), 'run')} in {counted(len(groups), 'setting')}, {seeds(groups)} each."
        f" Accuracies are percent of {images(groups)} images; tasks count from 1. ACC: {acc};"
        f" AF: average forgetting. Every table is in tables/ as {', '.join(FORMATS)}, every figure"
        f" in figures/ as pdf and svg. mose-fast {__version__}."
    )
    page = fill(
        "report.html",
        mark=(_OWN_FILES, " ".join(contents)),
        title=heading,
        heading=heading,
        lead=lead,
        notes=notes,
        sections=[dict(zip(("name", "title", "parts"), section, strict=True)) for section in sections],
        long=_LONG,
        runs=by_name["runs"],
        skipped=[f"{s.folder}: {s.reason}" for s in skipped],
    )
    return {_PAGE: page, **contents}


def _notes(groups: Sequence[Group]) -> list[str]:
    """What a careful reader would ask about these runs."""
    notes = []
    single = [g.name for g in groups if g.n == 1]
    if single:
        notes.append(f"One seed alone, without any interval: {_some(single)}.")
    counts = sorted({g.n for g in groups})
    if len(counts) > 1:
        notes.append(f"The settings do not have equally many seeds: {counts[0]} to {counts[-1]}, see column n.")
    untaught = [
        g.name
        for g in groups
        if np.mean([*g.values("acc", g.view).values()]) <= np.mean([run.untrained[g.view] for run in g.runs])
    ]
    if untaught:
        notes.append(
            "Training gained nothing over the untrained network with the same memory (column untrained):"
            f" {_some(untaught)}."
        )
    if any(run.config["train_on"] != "stream" for g in groups for run in g.runs):
        notes.append(
            "Runs that trained on the final memory were evaluated once, so they have no forgetting, curves or accuracy"
            " matrix."
        )
    for what, told in (
        ("Tuned by mose-fast tune", lambda g: g.first.config["tuned"]),
        ("Not the protocol of the paper's numbers", lambda g: ", ".join(deviations(g))),
    ):
        alike: dict[str | None, list[str]] = {}
        for g in groups:
            alike.setdefault(told(g), []).append(g.name)
        notes += [f"{what} ({how}): {_some(names)}." for how, names in alike.items() if how]
    return notes


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:6]) + (f"; and {len(names) - 6} more" if len(names) > 6 else "")
