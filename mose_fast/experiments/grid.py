"""Grids: the settings that vary, their values, and the runs that result."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mose_fast.learner.named_settings import (
    all_settings,
    assignment,
    full_name,
    read_value,
    telling_apart,
    with_absolute_paths,
    with_changes,
)
from mose_fast.settings.knob import plain
from mose_fast.settings.run import ConfigError, RunConfig, read_table, shown

# Largest number of runs or seeds of a sweep. More are a typing error, and planning them would take
# minutes.
_MOST_RUNS = 10_000


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: Name of its run folder in the sweep's folder.
        values: Values that the grid sets, by dotted name.
    """

    name: str
    config: RunConfig
    values: dict[str, Any]

    @property
    def label(self) -> str:
        """The values that the grid sets, without the seed, as readable text."""
        return _told({n: v for n, v in self.values.items() if n != "seed"}) or "only the seed varies"


def grid_cells(
    axes: Mapping[str, tuple[Any, ...]], changes: Mapping[str, Any], base: RunConfig | None = None
) -> list[Cell]:
    """All runs of a grid; ConfigError if it is empty, names a setting twice, or holds a value that
    a run cannot use. The seed varies slowest, so that the first runs cover all settings.

    Args:
        axes: Values of the settings that vary, by dotted name.
        changes: Values that differ from ``base`` in every run, by dotted name.
        base: Configuration that all runs start from; None: the defaults.
    """
    if not axes:
        raise ConfigError(
            "the grid is empty; wanted a setting with values: --grid NAME=V1,V2, --seeds 0-4, or [grid] in the file"
        )
    for name, values in axes.items():
        if not values:
            raise ConfigError(f"the grid has no values for {name}; wanted at least one")
        if name in changes:
            raise ConfigError(f"{name} is set to {changes[name]!r} and is in the grid, too; wanted one of them")
        repeated = [value for i, value in enumerate(values) if value in values[:i]]
        if repeated:
            raise ConfigError(f"the grid has {name} = {repeated[0]!r} twice; wanted each value once")
    runs = math.prod(map(len, axes.values()))
    if runs > _MOST_RUNS:
        sizes = ", ".join(f"{name} {len(values):,}" for name, values in axes.items())
        raise ConfigError(f"the grid has {runs:,} runs (values: {sizes}); wanted at most {_MOST_RUNS:,}")
    order = sorted(axes, key=lambda name: name != "seed")
    cells = []
    for point in itertools.product(*(axes[name] for name in order)):
        chosen = dict(zip(order, point, strict=True))
        values = {name: chosen[name] for name in sorted(axes, key=lambda name: name == "seed")}
        try:
            config = with_absolute_paths(with_changes(base, {**changes, **values}))
        except ConfigError as error:
            raise ConfigError(f"in the cell {_told(values)}: {error}") from error
        cells.append(Cell(folder_name(values), config, values))
    apart = {"seed"}.union(*map(telling_apart, {cell.config.method for cell in cells}))
    for name in axes:
        if name not in apart:
            raise ConfigError(
                f"{name} is in the grid; wanted it the same for all runs, since it must not change their results"
            )
    return _with_unique_names(cells)


def read_axes(texts: Iterable[str], methods: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Reads axes from texts ``NAME=V1,V2,...`` as ``--grid`` takes them."""
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, values = assignment(text, "--grid")
        if any(mark in values for mark in "[]{}\"'") or ("," in values and os.path.exists(values)):
            raise ConfigError(
                f"--grid {name} is {values!r}; wanted plain values between commas: a value that itself has a comma, a"
                " bracket or a quote goes into a table [grid] of a .toml file, mose-fast sweep FILE (docs/sweeps.md)"
            )
        _add_axis(axes, name, [value.strip() for value in values.split(",") if value.strip()], methods, "--grid")
    return axes


def read_seeds(text: str) -> tuple[int, ...]:
    """Reads seeds from a text such as ``0-14`` or ``0,1,5-9``; ConfigError if it is none."""
    seeds: list[int] = []
    for part in str(text).split(","):
        found = re.fullmatch(r"\s*([0-9]{1,19})(?:\s*-\s*([0-9]{1,19}))?\s*", part)
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise ConfigError(f"seeds are {shown(text)}; wanted numbers and ranges, for example 0-14 or 0,1,5-9")
        more = range(int(found[1]), int(found[2] or found[1]) + 1)
        # len() of a range fails above 2**63.
        if len(seeds) + more.stop - more.start > _MOST_RUNS:
            raise ConfigError(f"seeds are {shown(text)}; wanted at most {_MOST_RUNS:,} of them")
        seeds += more
    return tuple(seeds)


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a ``.toml`` or ``.json`` file; returns its settings, which are those of
    ``run --config``, and its table ``grid``. ConfigError, which names the file, if it is none.
    """
    path = Path(path)
    values = read_table(path, "the sweep")
    if not isinstance(values, dict) or not isinstance(values.get("grid", {}), dict):
        raise ConfigError(f"{path}: wanted settings and a table [grid]")
    return values, values.pop("grid", {})


def axes_of(grid: Mapping[str, Any], methods: Sequence[str], owner: str) -> dict[str, tuple[Any, ...]]:
    """Reads axes from a mapping of names to values. Texts are read as on the command line; seeds
    may be given as ranges. ``owner`` holds the grid, for the ConfigError on an unusable one.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for name, values in grid.items():
        if isinstance(values, Mapping):
            for inner, inner_values in values.items():
                _add_axis(axes, f"{name}.{inner}", inner_values, methods, owner)
        else:
            seeds = name == "seed" and isinstance(values, str)
            _add_axis(axes, name, read_seeds(values) if seeds else values, methods, owner)
    return axes


def _add_axis(axes: dict[str, tuple[Any, ...]], name: str, values: Any, methods: Sequence[str], owner: str) -> None:
    # The first of the methods tells what a name means.
    known = {name: setting for method in reversed(methods) for name, setting in all_settings(method).items()}
    setting = full_name(name, known, owner)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{owner} {name} is {shown(values)}; wanted a list of values")
    if setting in axes:
        raise ConfigError(f"{owner} names {name} twice; wanted all its values together")
    axes[setting] = tuple(read_value(known[setting], v) if isinstance(v, str) else v for v in map(plain, values))


def _short_name(setting: str) -> str:
    return "stream" if setting == "stream.name" else setting.rpartition(".")[2]


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return Path(value).stem if os.sep in value else value
    return "none" if value is None else json.dumps(value)


def _told(values: Mapping[str, Any]) -> str:
    return " ".join(f"{_short_name(name)}={_shown(value)}" for name, value in values.items())


def folder_name(values: Mapping[str, Any]) -> str:
    """Name of a cell's folder, made from the values that the grid sets by dotted name."""
    parts = (f"{_short_name(name)}-{_shown(value)}" for name, value in values.items())
    return "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part)[:60] for part in parts)


def _with_unique_names(cells: list[Cell]) -> list[Cell]:
    """Numbers cells of the same name, such as of equally named data files in different folders."""
    counts = Counter(cell.name for cell in cells)
    numbers = defaultdict(lambda: itertools.count(1))
    return [
        cell if counts[cell.name] == 1 else replace(cell, name=f"{cell.name}_{next(numbers[cell.name])}")
        for cell in cells
    ]
