"""Which runs stand behind a table of the paper, and whether they follow its protocol."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mose_fast.experiments.grid import Cell, folder_name
from mose_fast.experiments.paper.description import DATA_SETS, DEFAULT_PRESETS, PaperTable, Presets
from mose_fast.experiments.paper.tables import TABLES, describe
from mose_fast.learner.named_settings import all_settings, dotted, telling_apart, with_absolute_paths, with_changes
from mose_fast.settings.knob import as_text, plain
from mose_fast.settings.run import WITHOUT_BOUNDARIES, ConfigError, RunConfig, method_settings, near_matches


class Plan:
    """The runs behind a table of the paper.

    Args:
        changes: Settings by dotted name that all runs get whose method has them.

    Attributes:
        left_out: Those of ``without`` that the table would have rows of.
        departures: How the runs differ from the paper's protocol, each ``name value instead of
            value``; only without any are numbers judged.
        command: The command line that makes this plan, without the folder.
        stem: The name of its files without ending, see :func:`stem_of`.
        used: The settings of ``changes`` that at least one run has.

    Raises:
        ConfigError: The name is unknown, a setting is unusable, or no row remains.
    """

    def __init__(
        self,
        name: str,
        seeds: Sequence[int],
        presets: Presets = DEFAULT_PRESETS,
        changes: Mapping[str, Any] | None = None,
        methods: Sequence[str] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self.name, self.seeds = name, tuple(map(plain, seeds))
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {list(self.seeds)}; wanted at least one, and each once")
        changes = {setting: plain(value) for setting, value in (changes or {}).items()}
        _check_changes(name, changes)
        whole = describe(name, presets)
        there = list(dict.fromkeys(entry.stream for entry in whole.entries))
        self.left_out = [data_set for data_set in there if data_set in without]
        if self.left_out == there:
            raise ConfigError(f"without is {','.join(without)}, but {name} has no other data set")
        self.description = whole.only(lambda entry: entry.stream not in without)
        if methods is not None:
            _check_methods(name, methods, there := _methods_of(self.description))
            self.description = self.description.only(lambda entry: entry.method in methods)
            if set(methods) == set(there):
                methods = None
        departures: dict[str, None] = {}
        self.used: set[str] = set()
        self._cells: dict[str, list[Cell]] = {}
        settings = [runs for e in self.description.entries for runs in (e.runs, e.over) if runs is not None]
        for key, runs in {_key(runs): runs for runs in settings}.items():
            wanted = with_changes(None, runs)
            applied = {n: value for n, value in changes.items() if n in all_settings(wanted.method)}
            self.used |= applied.keys()
            config = with_absolute_paths(with_changes(None, {**runs, **applied}))
            departures |= dict.fromkeys(_departures(config, wanted))
            # A run is named by how it differs from the method's preset, so that tables share
            # their common runs.
            values = {"stream.name": config.stream.name, "memory": config.memory, **_differences(config)}
            self._cells[key] = []
            for seed in self.seeds:
                of_run = {**values, "seed": seed}
                cell = Cell(folder_name(of_run), dataclasses.replace(config, seed=seed), of_run)
                self._cells[key].append(cell)
        self.departures = list(departures)
        if _methods_of(self.description) == [RunConfig.method]:
            presets = presets._replace(baselines=DEFAULT_PRESETS.baselines)  # there is none
        self.stem = stem_of(name, presets, methods, self.left_out, trial=bool(departures))
        self.command = shlex.join(
            ["mose-fast", "paper", name, "--seeds", ",".join(map(str, self.seeds)), "--preset", presets.mose]
            + (["--baselines", presets.baselines] if presets.baselines != DEFAULT_PRESETS.baselines else [])
            + (["--methods", ",".join(methods)] if methods else [])
            + (["--without", ",".join(self.left_out)] if self.left_out else [])
            + [part for setting, value in changes.items() for part in ("--set", f"{setting}={as_text(value)}")]
        )

    @property
    def cells(self) -> list[Cell]:
        """All runs, each once."""
        return list({cell.name: cell for cells in self._cells.values() for cell in cells}.values())

    def cells_of(self, runs: Mapping[str, Any]) -> list[Cell]:
        """The runs behind an entry with these settings, by seed."""
        return self._cells[_key(runs)]


def all_plans(
    seeds: Sequence[int],
    presets: Presets,
    changes: Mapping[str, Any],
    methods: Sequence[str] | None,
    without: Collection[str] = (),
) -> list[Plan]:
    """The plans of all tables that have rows of the methods on the data sets.

    Raises:
        ConfigError: No table has one of the methods, or a setting is unusable.
    """
    tables = {name: describe(name, presets).only(lambda entry: entry.stream not in without) for name in TABLES}
    there = {name: _methods_of(table) for name, table in tables.items()}
    known = list(dict.fromkeys(method for found in there.values() for method in found))
    for method in methods or ():
        if method not in known:
            raise ConfigError(f"methods has {method!r}, of which no table has a row{near_matches(method, known)}")
    plans = []
    for name, found in there.items():
        own = [method for method in (found if methods is None else methods) if method in found]
        if own:
            plans.append(Plan(name, seeds, presets, changes, methods and own, without))
    if not plans:
        nothing = "methods are ''; wanted at least one"
        raise ConfigError(nothing if methods is not None else f"without is {','.join(without)}: no table remains")
    return plans


def departure_lines(plans: Sequence[Plan]) -> list[str]:
    """One line if runs of the plans depart from the paper's protocol, else none."""
    found = dict.fromkeys(departure for plan in plans for departure in plan.departures)
    return [f"departs from the protocol: {', '.join(found)}; there is no pass or fail"] if found else []


def stem_of(name: str, presets: Presets, methods: Sequence[str] | None, left_out: Sequence[str], *, trial: bool) -> str:
    """The name of the files of a table without ending."""
    chosen = [given for given, usual in zip(presets, DEFAULT_PRESETS, strict=True) if given != usual]
    without = ["without", *left_out] if left_out else []
    return "-".join([name, *chosen, *(methods or ()), *without, *(["trial"] if trial else [])])


def data_sets(names: Sequence[str]) -> list[str]:
    """The data sets of the paper's tables that are meant by names or parts of them.

    Raises:
        ConfigError: There is none of the name, or several.
    """
    found = {name: [known for known in DATA_SETS if name and name in known] for name in names}
    for name, meant in found.items():
        if len(meant) != 1:
            raise ConfigError(f"without has {name!r}; wanted some of {', '.join(DATA_SETS)}, or a part of a name")
    return list(dict.fromkeys(meant[0] for meant in found.values()))


def _methods_of(description: PaperTable) -> list[str]:
    return list(dict.fromkeys(entry.method for entry in description.entries))


def _check_changes(name: str, changes: Mapping[str, Any]) -> None:
    """Refuses settings with which runs would not be of the paper's table."""
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
    if changes.get("stream.kind") in WITHOUT_BOUNDARIES:
        raise ConfigError(
            f"stream.kind is {changes['stream.kind']!r}, but the numbers of the paper's {name} are by task; wanted"
            " a kind with task boundaries"
        )


def _check_methods(name: str, methods: Sequence[str], there: Sequence[str]) -> None:
    """Refuses a method without a row in the table, and one that is named twice."""
    for method in methods:
        if method not in there:
            raise ConfigError(f"methods has {method!r}, of which {name} has no row{near_matches(method, there)}")
    if not methods or len(set(methods)) < len(methods):
        raise ConfigError(f"methods are {','.join(methods)!r}; wanted at least one, and each once")


def _key(runs: Mapping[str, Any]) -> str:
    return json.dumps(runs, sort_keys=True)


def _differences(config: RunConfig) -> dict[str, Any]:
    """Differences from the method's preset, from the default method, and from its first preset."""
    usual = dotted(RunConfig.create(config.preset, method=config.method).to_dict())
    usual |= {"method": RunConfig.method, "preset": method_settings(config.method).preset(None)}
    return {name: value for name, value in _protocol(config).items() if value != usual[name]}


def _departures(config: RunConfig, wanted: RunConfig) -> list[str]:
    found = _protocol(config)
    return [
        f"{name} {as_text(found[name])} instead of {as_text(value)}"
        for name, value in _protocol(wanted).items()
        if found[name] != value
    ]


def _protocol(config: RunConfig) -> dict[str, Any]:
    """What is learned and how, by dotted name: all but the seed, the place and the speed."""
    settings, apart = all_settings(config.method), telling_apart(config.method)
    return {
        name: value
        for name, value in dotted(config.to_dict()).items()
        if name in apart and settings[name].role != "execution"
    }
