"""Which runs stand behind a table of the paper, and whether they follow its protocol."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mose_fast.config import WITHOUT_BORDERS, ConfigError, RunConfig, method_settings, near_matches
from mose_fast.knobs import as_text, plain
from mose_fast.paper.description import Entry, PaperTable, Part
from mose_fast.paper.rows import DEFAULT_PRESETS, Presets
from mose_fast.paper.tables import describe
from mose_fast.settings import all_settings, dotted, telling_apart, with_absolute_paths, with_changes
from mose_fast.sweep.folder import SweepFolder
from mose_fast.sweep.grid import Cell, folder_name
from mose_fast.sweep.store import read_run
from mose_fast.train.files import RunFolder

__all__ = ["Plan", "departure_lines", "methods_of", "settings_key", "stem_of"]


class Plan:
    """The runs behind a table of the paper.

    Args:
        name: The table's name, a key of :data:`mose_fast.paper.tables.TABLES`.
        seeds: The runs' seeds.
        presets: The presets of MOSE and of the baselines.
        changes: Settings by dotted name that all runs get, whatever the paper says; those that a
            method does not have are left out for its runs.
        methods: The methods whose rows the table shall have; None: all.

    Attributes:
        description: The table's description.
        departures: How the runs differ from the paper's protocol, each ``name value instead of
            value``; only without any are numbers judged.
        command: The command line that makes this plan, without the folder.
        stem: The name of its files without ending: the table's, those of presets that are not the
            default, those of chosen methods, and ``trial`` if there are departures.
        used: The settings of ``changes`` that at least one run has.

    Raises:
        ConfigError: The name is unknown, or a setting is unusable.
    """

    def __init__(
        self,
        name: str,
        seeds: Sequence[int],
        presets: Presets = DEFAULT_PRESETS,
        changes: Mapping[str, Any] | None = None,
        methods: Sequence[str] | None = None,
    ) -> None:
        self.name, self.seeds = name, tuple(map(plain, seeds))
        changes = {setting: plain(value) for setting, value in (changes or {}).items()}
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {list(self.seeds)}; wanted at least one, and each once")
        for setting in ("method", "preset", "seed"):
            if setting in changes:
                raise ConfigError(
                    f"{setting} is set to {changes[setting]!r} for all runs of {name}, whose description says it"
                )
        if changes.get("evaluate_on", "test") != "test":
            raise ConfigError(
                f"evaluate_on is {changes['evaluate_on']!r}, but the numbers of the paper's {name} are of test images;"
                " wanted 'test'"
            )
        if changes.get("stream.kind") in WITHOUT_BORDERS:
            raise ConfigError(
                f"stream.kind is {changes['stream.kind']!r}, but the numbers of the paper's {name} are by task; wanted"
                " a kind with borders"
            )
        self.description: PaperTable = describe(name, presets)
        if methods is not None:
            there = methods_of(self.description)
            self.description = _only(name, self.description, methods)
            if set(methods) == set(there):
                methods = None
        departures: dict[str, None] = {}
        self.used: set[str] = set()
        self._cells: dict[str, list[Cell]] = {}
        settings = [runs for e in self.description.entries for runs in (e.runs, e.over) if runs is not None]
        for runs in {settings_key(runs): runs for runs in settings}.values():
            wanted = with_changes(None, runs)
            known = all_settings(wanted.method)
            self.used |= changes.keys() & known.keys()
            config = with_absolute_paths(
                with_changes(None, {**runs, **{n: value for n, value in changes.items() if n in known}})
            )
            departures |= dict.fromkeys(_departures(config, wanted))
            # A run is named by how it differs from the method's preset, so that tables share
            # their common runs.
            values = {"stream.name": config.stream.name, "memory": config.memory, **_differences(config)}
            for seed in self.seeds:
                of_run = {**values, "seed": seed}
                cell = Cell(folder_name(of_run), dataclasses.replace(config, seed=seed), of_run)
                self._cells.setdefault(settings_key(runs), []).append(cell)
        self.departures = list(departures)
        if methods_of(self.description) == [RunConfig.method]:
            presets = presets._replace(baselines=DEFAULT_PRESETS.baselines)  # there is none
        self.stem = stem_of(name, presets, methods, trial=bool(departures))
        self.command = shlex.join(
            ["mose-fast", "paper", name, "--seeds", ",".join(map(str, self.seeds)), "--preset", presets.mose]
            + (["--baselines", presets.baselines] if presets.baselines != DEFAULT_PRESETS.baselines else [])
            + (["--methods", ",".join(methods)] if methods else [])
            + [part for setting, value in changes.items() for part in ("--set", f"{setting}={as_text(value)}")]
        )

    @property
    def cells(self) -> list[Cell]:
        """All runs, each once. The seed varies slowest, so that every setting is run early."""
        return list(
            {cells[i].name: cells[i] for i in range(len(self.seeds)) for cells in self._cells.values()}.values()
        )

    def cells_of(self, runs: Mapping[str, Any]) -> list[Cell]:
        """The runs behind an entry with these settings, by seed."""
        return self._cells[settings_key(runs)]

    def rename(self, names: Mapping[str, str]) -> None:
        """Replaces the runs' names by those of their folders.

        Args:
            names: The new name by the present one.
        """
        self._cells = {
            key: [dataclasses.replace(cell, name=names[cell.name]) for cell in cells]
            for key, cells in self._cells.items()
        }

    def finished(
        self, runs: Mapping[str, Any], folder: SweepFolder, without: Collection[str]
    ) -> list[tuple[Cell, dict[str, Any], dict[str, Any]]]:
        """The finished runs of :meth:`cells_of`, their rows of the store and their results.

        Args:
            runs: The entry's settings.
            folder: The folder of all runs.
            without: Names of runs to leave out.
        """
        there = [
            c for c in self.cells_of(runs) if c.name not in without and RunFolder(folder.run(c.name)).results.is_file()
        ]
        return [(cell, *read_run(folder.run(cell.name))) for cell in there]


def departure_lines(plans: Sequence[Plan]) -> list[str]:
    """One line if runs of the plans depart from the paper's protocol, else none."""
    found = dict.fromkeys(departure for plan in plans for departure in plan.departures)
    return [f"departs from the protocol: {', '.join(found)}; there is no pass or fail"] if found else []


def stem_of(name: str, presets: Presets, methods: Sequence[str] | None, *, trial: bool) -> str:
    """The name of the files of a table without ending.

    Args:
        name: The table's name.
        presets: Its presets, named unless they are the defaults.
        methods: The methods to which it is restricted, which are named then.
        trial: Its runs depart from the paper's protocol.
    """
    chosen = [given for given, usual in zip(presets, DEFAULT_PRESETS, strict=True) if given != usual]
    return "-".join([name, *chosen, *(methods or ()), *(["trial"] if trial else [])])


def methods_of(description: PaperTable) -> list[str]:
    """The methods that have rows in a table."""
    return list(dict.fromkeys(map(_method, description.entries)))


def _method(entry: Entry) -> str:
    return entry.runs.get("method", RunConfig.method)


def _only(name: str, description: PaperTable, methods: Sequence[str]) -> PaperTable:
    """The rows of some methods alone.

    Raises:
        ConfigError: The table has no such method, or one is named twice.
    """
    there = methods_of(description)
    for method in methods:
        if method not in there:
            raise ConfigError(f"methods has {method!r}, of which {name} has no row{near_matches(method, there)}")
    if not methods or len(set(methods)) < len(methods):
        raise ConfigError(f"methods are {','.join(methods)!r}; wanted at least one, and each once")

    def kept(part: Part) -> Part:
        return dataclasses.replace(part, entries=tuple(e for e in part.entries if _method(e) in methods))

    figures = []
    for figure in description.figures:
        panels = [dataclasses.replace(panel, part=kept(panel.part)) for panel in figure.panels]
        figures.append(dataclasses.replace(figure, panels=tuple(panel for panel in panels if panel.part.entries)))
    return dataclasses.replace(
        description,
        parts=tuple(part for part in map(kept, description.parts) if part.entries),
        figures=tuple(figure for figure in figures if figure.panels),
        notes=tuple(note for note in description.notes if {*description.about.get(note, methods)} & {*methods}),
    )


def settings_key(runs: Mapping[str, Any]) -> str:
    """A text that is equal for equal settings."""
    return json.dumps(runs, sort_keys=True)


def _differences(config: RunConfig) -> dict[str, Any]:
    """Differences from the method's preset, from the default method, and from its first preset."""
    usual = dotted(RunConfig.create(config.preset, method=config.method).to_dict())
    usual |= {"method": RunConfig.method, "preset": method_settings(config.method).preset(None)}
    return {name: value for name, value in _protocol(config).items() if value != usual[name]}


def _departures(config: RunConfig, wanted: RunConfig) -> list[str]:
    found, planned = _protocol(config), _protocol(wanted)
    differing = [name for name in planned if found[name] != planned[name]]
    return [f"{name} {as_text(found[name])} instead of {as_text(planned[name])}" for name in differing]


def _protocol(config: RunConfig) -> dict[str, Any]:
    """What is learned and how, by dotted name: all but the seed, the place and the speed."""
    settings, apart = all_settings(config.method), telling_apart(config.method)
    return {
        name: value
        for name, value in dotted(config.to_dict()).items()
        if name in apart and settings[name].role != "execution"
    }
