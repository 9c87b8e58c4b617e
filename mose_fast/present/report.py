"""The page of a report: one HTML file that needs no other, and its tables and figures beside it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mose_fast._version import __version__
from mose_fast.present.report_figures import Picture, figures
from mose_fast.present.report_runs import Group, Skipped, group_runs, read_folders
from mose_fast.present.report_tables import (
    comparison_table,
    comparisons,
    counted,
    deviations,
    images,
    part_name,
    seeds,
    sentence,
    streams,
    tables,
)
from mose_fast.present.statistics import FEW_SEEDS, check_comparable, summarise
from mose_fast.present.table import Table
from mose_fast.runs.files import RunError, remove_leftovers, write_atomically
from mose_fast.runs.lock import FolderLock

__all__ = ["FORMATS", "render_page", "write_report"]

#: Endings of the files of a table.
FORMATS = ("csv", "md", "tex")

_PAGE = "report.html"

# In the head of a page, the files beside it that are the report's.
_OWN_FILES = '<meta name="mose-fast-files" content="{}">'

# Rows of a table that a reader scrolls past without being asked, and sentences that one reads.
_LONG, _SENTENCES = 100, 24

# On a narrow screen figures keep their size, at which their letters are those of the page, and
# scroll as tables do. Tables may be wider than lines of text; the widest, of 16 columns, fits into
# 1280 pixels, where texts and intervals wrap.
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { margin: 2rem auto; max-width: 90rem; padding: 0 1rem; overflow-wrap: break-word; }
p, ul, nav, figcaption, .notes { max-width: 72rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
nav a { margin-right: 1rem; } a { color: #0050a0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .4rem; text-align: left; border-bottom: 1px solid #ddd; }
th { border-top: 2px solid #333; border-bottom: 1px solid #333; vertical-align: bottom; }
tbody tr:last-child td { border-bottom: 2px solid #333; }
td.number { text-align: right; white-space: nowrap; }
td.interval { white-space: normal; } td.interval span { white-space: nowrap; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; vertical-align: bottom; }
figcaption { font-size: .9rem; color: #333; padding: .3rem 0; }
th.number { text-align: right; }
.notes { margin-top: 1rem; background: #fff6e0; border-left: 4px solid #e69f00; padding: .5rem 1rem; }
.notes ul { margin: .3rem 0; padding-left: 1.2rem; }
summary { cursor: pointer; color: #0050a0; }
@media screen and (max-width: 1100px) { figure img { max-width: none; } }
@media screen and (max-width: 600px) { body { margin: 1rem auto; padding: 0 .6rem; } }
@media print { body { margin: 0; max-width: none; font-size: 10pt; } nav { display: none; }
  figure, tr { break-inside: avoid; }
  .wide { overflow: visible; } td.number { white-space: normal; } }
"""


def write_report(
    folders: Iterable[str | Path], out: str | Path | None = None, *, force: bool = False
) -> tuple[Path, list[Skipped]]:
    """Reads finished runs and writes ``report.html``, ``tables/*.csv``, ``.md`` and ``.tex``, and
    ``figures/*.pdf`` and ``.svg``.

    Args:
        folders: Run folders, or folders that hold some at any depth, such as a sweep's.
        out: Folder of the report; an earlier report in it is replaced, all other files stay. None:
        ``report`` in the first of ``folders``.
        force: Put runs of different problems into the same tables, and say so on the page, instead
            of refusing.

    Returns:
        The page, and the folders that were skipped, which it names too.

    Raises:
        RunError: A folder does not exist, there is no finished run, or the report cannot be
        written.
        IncomparableRuns: The runs are of different problems and ``force`` is False.
    """
    folders = [Path(folder) for folder in folders]
    if not folders:
        raise RunError("there is no folder to report on; wanted at least one")
    runs, skipped = read_folders(folders)
    groups, repeated = group_runs(runs)
    skipped += repeated
    warnings = check_comparable([run.row for g in groups for run in g.runs], force=force)
    page, all_tables, pictures = render_page(groups, skipped, warnings)

    contents: dict[str, str | bytes] = {_PAGE: page}
    for table in all_tables:
        for ending, text in zip(FORMATS, (table.csv(), table.markdown(), table.latex()), strict=True):
            contents[f"tables/{table.name}.{ending}"] = text
    for picture in pictures:
        contents |= {f"figures/{picture.name}.svg": picture.svg, f"figures/{picture.name}.pdf": picture.pdf}
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
        found = re.search(_OWN_FILES.format('([^"]*)'), page.read_text(encoding="utf-8", errors="replace"))
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
    groups: Sequence[Group], skipped: Sequence[Skipped], warnings: Sequence[str]
) -> tuple[str, list[Table], list[Picture]]:
    """The HTML of a report, and the tables and figures in it.

    Args:
        groups: The groups of :func:`mose_fast.present.report_runs.group_runs`.
        skipped: Folders to name as left out.
        warnings: What differs between the runs, a sentence each.
    """
    pictures = figures(groups)
    by_name = {table.name: table for table in tables(groups)}
    found = comparisons(groups)
    if found:
        by_name["comparisons"] = comparison_table(found)
    notes = [f"{w[:1].upper()}{w[1:]}." for w in warnings]
    if few := sum(len(c.seeds) < FEW_SEEDS for _, c in found):
        notes.append(
            f"{few} of {counted(len(found), 'comparison')} rest on fewer than {FEW_SEEDS} common seeds, too few to"
            " show much."
        )
    notes += _notes(groups)
    told = [sentence(memory, c) for memory, c in found[:_SENTENCES]]
    told += [f"And {len(found) - len(told)} more in the table."] if len(found) > len(told) else []
    compared = [_list(told), _folded_if_long(by_name["comparisons"])] if found else []
    figure = {picture.name: _figure(picture) for picture in pictures}

    sections = [
        ("results", "Results", [by_name["main"].html(), _folded_if_long(by_name["estimates"])]),
        ("comparison", "Comparison", compared),
        *(
            (p.name, p.title, [figure[p.name]])
            for p in pictures
            if p.name in ("accuracy", "anytime", "new-task-and-bof", "tradeoffs")
        ),
        ("per-expert", "Experts", [_folded_if_long(by_name["experts"])]),
        ("per-task", "Accuracy by task", [_folded_if_long(by_name["tasks"])]),
        *((p.name, p.title, [figure[p.name]]) for p in pictures if p.name in ("accuracy-matrix", "confusion", "time")),
        ("costs", "Cost", [_folded_if_long(by_name["cost"]), _folded_if_long(by_name["size"])]),
        (
            "all-runs",
            "Runs",
            [_fold(f"All {counted(sum(g.n for g in groups), 'run')}", by_name["runs"].html()), _skipped(skipped)],
        ),
    ]
    sections = [(name, title, parts) for name, title, parts in sections if parts]
    heading = f"Report on {streams(groups)}, {images(groups)} images"
    acc = "mean accuracy over all tasks after the last one"
    if part_name(groups) == "part":
        acc = "accuracy on all of them at the end of the stream, which has no borders and so no forgetting"
    lead = (
        f"{counted(sum(g.n for g in groups), 'run')} in {counted(len(groups), 'setting')}, {seeds(groups)} each."
        f" Accuracies are percent of {images(groups)} images; tasks count from 1. ACC: {acc};"
        f" AF: average forgetting. Every table is in tables/ as {', '.join(FORMATS)}, every figure"
        f" in figures/ as pdf and svg. mose-fast {__version__}."
    )
    links = " ".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, title, _ in sections)
    body = "\n".join(
        f'<section id="{name}"><h2>{html.escape(title)}</h2>\n' + "\n".join(parts) + "</section>"
        for name, title, parts in sections
    )
    own = [f"tables/{name}.{ending}" for name in by_name for ending in FORMATS]
    own += [f"figures/{picture.name}.{ending}" for picture in pictures for ending in ("svg", "pdf")]
    own_files = _OWN_FILES.format(html.escape(" ".join(own)))
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width">'
        f"{own_files}<title>{html.escape(heading)}</title><style>{_STYLE}</style></head>\n<body><h1>{html.escape(heading)}</h1>\n"
        f"<p>{html.escape(lead)}</p>\n<nav>{links}</nav>\n{_box('Cautions', notes)}\n{body}\n</body></html>\n"
    )
    return page, list(by_name.values()), pictures


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
        g.name for g in groups if _mean(g.values("acc", g.view)) <= _mean({r.seed: r.untrained[g.view] for r in g.runs})
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
    tuned: dict[str, list[str]] = {}
    for g in groups:
        if how := g.runs[0].config["tuned"]:
            tuned.setdefault(how, []).append(g.name)
    notes += [f"Tuned by mose-fast tune ({how}): {_some(names)}." for how, names in tuned.items()]
    departing: dict[str, list[str]] = {}
    for g in groups:
        if differing := deviations(g):
            departing.setdefault(", ".join(differing), []).append(g.name)
    notes += [
        f"Not the protocol of the paper's numbers ({differing}): {_some(names)}."
        for differing, names in departing.items()
    ]
    return notes


def _mean(values: dict[int, float]) -> float:
    return summarise(values.values(), resamples=0).mean


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:6]) + (f"; and {len(names) - 6} more" if len(names) > 6 else "")


def _figure(picture: Picture) -> str:
    # As an image of its own, since names inside two SVG drawings on one page would clash.
    data = base64.b64encode(picture.svg).decode()
    caption = html.escape(picture.caption)
    return (
        f'<figure id="figure-{picture.name}"><div class="wide" tabindex="0"><img alt="{html.escape(picture.title)}" '
        f'src="data:image/svg+xml;base64,{data}"></div><figcaption>{caption}</figcaption></figure>'
    )


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _folded_if_long(table: Table) -> str:
    return _fold(f"The table, {len(table.rows)} rows", table.html()) if len(table.rows) > _LONG else table.html()


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def _box(title: str, notes: Sequence[str]) -> str:
    return f'<div class="notes"><strong>{html.escape(title)}</strong>{_list(notes)}</div>' if notes else ""


def _skipped(skipped: Sequence[Skipped]) -> str:
    lines = _list(f"{s.folder}: {s.reason}" for s in skipped)
    return f'<div id="skipped"><p>Left out: {counted(len(skipped), "folder")}.</p>{lines}</div>' if skipped else ""
