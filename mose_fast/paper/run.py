"""Runs the experiments behind a table of the paper, and writes our numbers beside the paper's."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mose_fast.config import ConfigError, RunConfig, method_settings
from mose_fast.knobs import as_text
from mose_fast.paper.description import RULE, Entry, PaperTable, Part, Verdict, judge, target
from mose_fast.paper.metrics import Metric, Results
from mose_fast.paper.tables import describe
from mose_fast.report.published import RUNS
from mose_fast.report.statistics import Summary, summarise
from mose_fast.report.table import Cell as Shown
from mose_fast.report.table import Interval, Number, Spread, Table
from mose_fast.settings import all_settings, dotted, telling_apart, with_absolute_paths, with_changes
from mose_fast.sweep.cells import Failure
from mose_fast.sweep.folder import SweepFolder
from mose_fast.sweep.grid import Cell, folder_name
from mose_fast.sweep.place import Place
from mose_fast.sweep.scheduler import run_grid
from mose_fast.sweep.store import read_run
from mose_fast.train.files import RunError, RunFolder, write_atomically
from mose_fast.train.results import precision_of

__all__ = ["Plan", "run_table"]


@dataclass(frozen=True)
class Measured:
    """A cell of ours.

    Attributes:
        entry: What it stands beside.
        ours: Over the seeds; None where no finished run has it.
        verdict: None where nothing is judged.
    """

    entry: Entry
    ours: Summary | None
    verdict: Verdict | None


class Plan:
    """The runs behind a table of the paper.

    Args:
        name: The table's name, a key of :data:`mose_fast.paper.tables.TABLES`.
        seeds: The runs' seeds.
        preset: The preset of MOSE.
        changes: Settings by dotted name that all runs get, whatever the paper says; those that a
            method does not have are left out for its runs.

    Attributes:
        description: The table's description.
        departures: How the runs differ from the paper's protocol, ``name value instead of value``;
        empty where they may be judged.
        command: That makes this plan, where the folder is left out.
        stem: Name of its files: that of the table, the preset unless it is the default, and
            ``trial`` where the runs depart.

    Raises:
        ConfigError: The name is unknown, or a setting is unusable.
    """

    def __init__(
        self, name: str, seeds: Sequence[int], preset: str = "released", changes: Mapping[str, Any] | None = None
    ) -> None:
        self.name, self.seeds, changes = name, tuple(seeds), dict(changes or {})
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {list(self.seeds)}; wanted at least one, and each once")
        for setting in ("method", "preset", "seed"):
            if setting in changes:
                raise ConfigError(
                    f"{setting} is set to {changes[setting]!r} for all runs of {name}, whose description says it"
                )
        self.description: PaperTable = describe(name, preset)
        departures: dict[str, None] = {}
        self._cells: dict[str, list[Cell]] = {}
        for runs in {_key(entry.runs): entry.runs for entry in self.description.entries}.values():
            wanted = with_changes(None, runs)
            known = all_settings(wanted.method)
            config = with_absolute_paths(
                with_changes(None, {**runs, **{n: value for n, value in changes.items() if n in known}})
            )
            departures |= dict.fromkeys(_departures(config, wanted))
            # Named by what sets it apart from the method's preset, so that tables share the runs
            # that they have in common.
            values = {"stream.name": config.stream.name, "memory": config.memory, **_differences(config)}
            self._cells[_key(runs)] = [
                Cell(
                    folder_name({**values, "seed": seed}),
                    dataclasses.replace(config, seed=seed),
                    {**values, "seed": seed},
                )
                for seed in self.seeds
            ]
        self.departures = list(departures)
        self.stem = "-".join(
            [name, *([preset] if preset != RunConfig.preset else []), *(["trial"] if departures else [])]
        )
        settings = [part for setting, value in changes.items() for part in ("--set", f"{setting}={as_text(value)}")]
        self.command = shlex.join(
            ["mose-fast", "paper", name, "--seeds", ",".join(map(str, self.seeds)), "--preset", preset, *settings]
        )

    @property
    def cells(self) -> list[Cell]:
        """All runs, each once. The seed varies slowest, so that every setting is seen early."""
        return list(
            {cells[i].name: cells[i] for i in range(len(self.seeds)) for cells in self._cells.values()}.values()
        )

    def cells_of(self, runs: Mapping[str, Any]) -> list[Cell]:
        """The runs behind an entry with these settings, by seed."""
        return self._cells[_key(runs)]

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives the runs other names, by the ones that they have: those of their folders."""
        self._cells = {
            key: [dataclasses.replace(cell, name=names[cell.name]) for cell in cells]
            for key, cells in self._cells.items()
        }

    def finished(
        self, runs: Mapping[str, Any], folder: SweepFolder, without: Collection[str]
    ) -> list[tuple[Cell, Results]]:
        """Those of :meth:`cells_of` that are finished, but those of some names, with their
        results.
        """
        there = [
            c for c in self.cells_of(runs) if c.name not in without and RunFolder(folder.run(c.name)).results.is_file()
        ]
        return [(cell, read_run(folder.run(cell.name))[1]) for cell in there]

    def told_departures(self) -> list[str]:
        """A line for a trial; nothing for runs that follow the paper's protocol."""
        return (
            [f"departs from the protocol: {', '.join(self.departures)}; nothing is judged"] if self.departures else []
        )

    def __str__(self) -> str:
        """The paper's cells, for people."""
        lines = [f"{self.name}: {self.description.title}"]
        for part in self.description.parts:
            lines += ["", f"{part.title} ({part.source})", _paper_table(part).markdown().rstrip()]
        return "\n".join([*lines, "", *self.description.notes, RULE, *self.told_departures()])


def run_table(
    name: str,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    preset: str = "released",
    changes: Mapping[str, Any] | None = None,
    place: Place | None = None,
    dry_run: bool = False,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Path | None, tuple[Failure, ...]]:
    """Runs what stands behind a table of the paper, or goes on with it, and writes ``NAME.md`` and
    ``NAME.csv``.

    Where the runs depart from the paper's protocol, nothing is judged and the files are called
    ``NAME-trial``. With another preset than the default, its name stands in them, too.

    Args:
        name: Of the table: a key of :data:`mose_fast.paper.tables.TABLES`.
        out: Folder of the tables and, as of a sweep, of the runs. Tables in the same folder share
        the runs that they have in common.
        seeds: Of the runs; the paper has 15.
        preset: Of MOSE.
        changes: Settings by dotted name that all runs get; with one that the paper's protocol has
        otherwise, nothing is judged.
        place: Where to compute.
        dry_run: Say the paper's cells and the forecast, and stop; nothing is written.
        wandb: Project of Weights & Biases to log to; None: no.
        say: Takes the plan and the final lines.

    Returns:
        Path of the first file, None after a dry run, and the runs that could not be finished; the
        table then has the others.

    Raises:
        ConfigError: The name or a setting is unusable; nothing has started.
        StreamError: The data are missing.
        RunError: The folder is in use, holds other runs, or cannot be written.
        Interrupted: Ctrl-C; the same call continues.
    """
    plan = Plan(name, seeds, preset, changes)
    if dry_run:
        say(f"{plan}\n")
    else:
        for line in plan.told_departures():
            say(line)
    path = Path(out) / f"{plan.stem}.md"
    _refuse_foreign(path, plan)
    outcome = run_grid(plan.cells, out, place, dry_run=dry_run, wandb=wandb, say=say)
    if dry_run:
        return None, ()
    plan.rename(outcome.folders)
    page, table = _render(plan, SweepFolder(out), outcome.failures)
    write_atomically(path, page)
    write_atomically(path.with_suffix(".csv"), table)
    return path, outcome.failures


def _refuse_foreign(page: Path, plan: Plan) -> None:
    """Refuses to replace a page or a table that ``mose-fast paper`` did not write."""
    table = page.with_suffix(".csv")
    try:
        ours = page.read_text(encoding="utf-8", errors="replace").startswith(f"# {plan.name}: ")
    except (FileNotFoundError, NotADirectoryError):
        ours = not table.exists()
    if not ours:
        raise RunError(
            f"{page} or {table.name} beside it was not written by mose-fast paper {plan.name}, and would be replaced;"
            " choose another --out"
        )


def _render(plan: Plan, folder: SweepFolder, failures: Sequence[Failure]) -> tuple[str, str]:
    """The page, and all cells as CSV."""
    parts = plan.description.parts
    by_runs: dict[str, list[tuple[int, Entry]]] = {}
    for number, part in enumerate(parts):
        for entry in part.entries:
            by_runs.setdefault(_key(entry.runs), []).append((number, entry))
    measured: list[dict[tuple[str, str], Measured]] = [{} for _ in parts]
    by_name: dict[str, tuple[Cell, Results]] = {}
    for entries in by_runs.values():
        # One setting at a time: the matrices of a hundred tasks are large.
        found = plan.finished(entries[0][1].runs, folder, [failure.name for failure in failures])
        results = [run for _, run in found]
        for number, entry in entries:
            measured[number][entry.row, entry.column] = _measure(entry, results, judged=not plan.departures)
        by_name |= {cell.name: (cell, _facts(run)) for cell, run in found}
    runs = list(by_name.values())

    verdicts = [m.verdict for cells in measured for m in cells.values() if m.verdict is not None]
    lines = [f"# {plan.name}: {plan.description.title}", "", f"    {plan.command}", ""]
    lines += [f"**{line[:1].upper()}{line[1:]}.**\n" for line in plan.told_departures()]
    if verdicts:
        passed, unsure = sum(v.passed for v in verdicts), sum(not v.sure for v in verdicts)
        lines += [
            f"{passed} of {len(verdicts)} judged cells pass; {unsure} of these verdicts are not sure with these seeds.",
            "",
        ]
    for part, cells in zip(parts, measured, strict=True):
        lines += [f"## {part.title}", "", _table(part, cells).markdown()]
    lines += ["## Notes", "", *(f"- {note}" for note in plan.description.notes)]
    lines += [] if plan.departures else [f"- {RULE}"]
    lines += [
        "- Ours: mean ± standard deviation over the seeds, and 95 % interval of the mean by Student's t; the paper's:"
        f" {RUNS} runs."
    ]
    lines += [f"- Not finished: {failure.name}: {failure.reason}" for failure in failures]
    lines += ["", "## Runs", "", _runs_table(runs).markdown(), *_provenance([run for _, run in runs])]
    return "\n".join(lines) + "\n", _long_table(parts, measured).csv()


def _measure(entry: Entry, results: Sequence[Results], *, judged: bool) -> Measured:
    values = [value for value in (entry.metric.read(results) if results else []) if value is not None]
    ours = summarise(values, resamples=0) if values else None
    return Measured(entry, ours, judge(entry.metric, entry.paper, ours) if judged else None)


def _paper_table(part: Part) -> Table:
    """The paper's numbers alone, and what passes."""
    entries = {(entry.row, entry.column): entry for entry in part.entries}
    table = Table("paper", "", ["", "", *part.columns])
    for row in part.rows:
        line = [entries.get((row, column)) for column in part.columns]
        table.rows.append([row, "paper", *(_published(entry, part.digits) for entry in line)])
        to_pass = [None if entry is None else _to_pass(entry, part.digits) for entry in line]
        table.rows += [[row, "to pass", *to_pass]] if any(to_pass) else []
    return table


def _table(part: Part, measured: Mapping[tuple[str, str], Measured]) -> Table:
    """Ours, its interval, the paper's, and the verdict: a line each for every row of the paper's
    table, where there is any.
    """
    numbers = any(entry.paper is not None for entry in part.entries)
    about = f"The paper's numbers: {part.source}." if numbers else f"{part.source} has no numbers."
    table = Table(part.title, about, ["", "", *part.columns])
    for row in part.rows:
        cells = [measured.get((row, column)) for column in part.columns]
        summaries = [m.ours if m is not None else None for m in cells]
        table.rows.append([row, "ours", *(_spread(s, part.digits) for s in summaries)])
        lines: dict[str, list[Shown]] = {
            "95 % interval": [_interval(s, part.digits) for s in summaries],
            "paper": [_published(None if m is None else m.entry, part.digits) for m in cells] if numbers else [],
            "verdict": [str(m.verdict) if m is not None and m.verdict is not None else None for m in cells],
        }
        table.rows += [[row, name, *line] for name, line in lines.items() if any(line)]
    return table


def _long_table(parts: Sequence[Part], measured: Sequence[Mapping[tuple[str, str], Measured]]) -> Table:
    """A row a cell."""
    columns = (
        "part",
        "source",
        "row",
        "column",
        "metric",
        "n",
        "ours",
        "interval",
        "paper",
        "difference",
        "to pass",
        "verdict",
    )
    table = Table("cells", "", columns, spreads=("ours", "paper"), intervals=("interval",))
    for part, cells in zip(parts, measured, strict=True):
        digits = part.digits + 1
        for entry in part.entries:
            m = cells[entry.row, entry.column]
            table.rows.append(
                [
                    part.title,
                    part.source,
                    entry.row,
                    entry.column,
                    entry.metric.name,
                    m.ours.n if m.ours else 0,
                    _spread(m.ours, digits),
                    _interval(m.ours, digits),
                    Spread(entry.paper.mean, entry.paper.sd, part.digits) if entry.paper else None,
                    Number(m.ours.mean - entry.paper.mean, digits) if m.ours and entry.paper else None,
                    _to_pass(entry, part.digits),
                    str(m.verdict) if m.verdict else None,
                ]
            )
    return table


def _spread(summary: Summary | None, digits: int) -> Shown:
    return None if summary is None else Spread(summary.mean, summary.sd if summary.n > 1 else None, digits)


def _interval(summary: Summary | None, digits: int) -> Shown:
    return None if summary is None or summary.n < 2 else Interval(*summary.t_interval, digits)


def _published(entry: Entry | None, digits: int) -> Shown:
    if entry is None:
        return None
    return "no number" if entry.paper is None else Spread(entry.paper.mean, entry.paper.sd, digits)


def _to_pass(entry: Entry, digits: int) -> str | None:
    wanted = target(entry.metric, entry.paper)
    return None if wanted is None else f"{_relation(entry.metric)} {wanted:.{digits}f}"


def _relation(metric: Metric) -> str:
    return ">=" if metric.kind == "accuracy" else "<="


def _facts(results: Results) -> Results:
    """What the list of runs needs, without the accuracies."""
    names = ("seconds", "card", "processor", "threads", "versions", "commit", "native_backend", "config", "resolved")
    return {name: results[name] for name in names}


def _runs_table(runs: Sequence[tuple[Cell, Results]]) -> Table:
    by_setting: dict[str, list[tuple[Cell, Results]]] = {}
    for cell, results in runs:
        by_setting.setdefault(cell.label, []).append((cell, results))
    about = (
        "Settings that differ from the method's preset; each run lies in the folder that is named by them and its seed."
    )
    table = Table("runs", about, ["setting", "seeds", "minutes a run"])
    for label, same in by_setting.items():
        minutes = summarise([results["seconds"]["total"] / 60 for _, results in same], resamples=0)
        table.rows.append([label, ", ".join(str(cell.config.seed) for cell, _ in same), _spread(minutes, 2)])
    return table


def _provenance(runs: Sequence[Results]) -> list[str]:
    """Where, by which code and how the runs were made; more than one value where they differ."""

    def told(value: Callable[[Results], Any]) -> str:
        return ", ".join(dict.fromkeys(as_text(value(run)) for run in runs))

    def place(run: Results) -> str:
        return run["card"] or f"{run['processor']}, {run['threads']} thread{'' if run['threads'] == 1 else 's'}"

    if not runs:
        return ["No run is finished."]
    return [
        f"- computed on: {told(place)}",
        f"- commit: {told(lambda run: run['commit'])}; native library: {told(lambda run: run['native_backend'])}",
        "- versions: "
        + "; ".join(f"{name} {told(lambda run, name=name: run['versions'][name])}" for name in runs[0]["versions"]),
        f"- data: {told(lambda run: run['config']['stream'].get('fingerprint') or 'of runs before fingerprints')}",
        f"- precision: {told(precision_of)}; deterministic: {told(lambda run: run['config']['deterministic'])}",
    ]


def _key(runs: Mapping[str, Any]) -> str:
    return json.dumps(runs, sort_keys=True)


def _differences(config: RunConfig) -> dict[str, Any]:
    """What sets a configuration apart from its method's preset, from the default method, and from
    the method's first preset.
    """
    usual = dotted(RunConfig.create(config.preset, method=config.method).to_dict())
    usual |= {"method": RunConfig.method, "preset": method_settings(config.method).preset(None)}
    return {name: value for name, value in _protocol(config).items() if value != usual[name]}


def _departures(config: RunConfig, wanted: RunConfig) -> list[str]:
    found, planned = _protocol(config), _protocol(wanted)
    differing = [name for name in planned if found[name] != planned[name]]
    return [f"{name} {as_text(found[name])} instead of {as_text(planned[name])}" for name in differing]


def _protocol(config: RunConfig) -> dict[str, Any]:
    """What is learned and how, by dotted name: all but the seed, and where and how fast the run
    computes.
    """
    settings, apart = all_settings(config.method), telling_apart(config.method)
    return {
        name: value
        for name, value in dotted(config.to_dict()).items()
        if name in apart and settings[name].role != "execution"
    }
