"""The space of a study: the settings that are searched, and their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mose_fast.learner.named_settings import all_settings, full_name, with_changes
from mose_fast.settings.knob import Search, Setting
from mose_fast.settings.run import ConfigError, RunConfig, read_table, shown


@dataclass(frozen=True)
class Axis:
    """A setting that is searched: a range of numbers, ``search``, or some values, ``choices``."""

    setting: Setting
    search: Search | None = None
    choices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.search is None:
            return " | ".join(map(str, self.choices))
        return f"{self.search.low:g} to {self.search.high:g}{', logarithmic' if self.search.log else ''}"

    def holds(self, value: Any) -> bool:
        if self.search is None:
            return value in self.choices
        return isinstance(value, int | float) and self.search.low <= value <= self.search.high

    def corners(self) -> tuple[Any, ...]:
        """The ends of the range, or the values."""
        return self.choices or (self.search.low, self.search.high)

    def described(self) -> dict[str, Any] | list[Any]:
        """The axis as a space file has it."""
        if self.search is None:
            return list(self.choices)
        return {"low": self.search.low, "high": self.search.high, "log": self.search.log}


def declared_space(method: str) -> dict[str, Axis]:
    """The axes that the settings of a method declare, by dotted name."""
    return {name: Axis(s, s.search) for name, s in all_settings(method).items() if s.search is not None}


def read_space(path: str | Path, method: str) -> dict[str, Axis]:
    """Reads the axes in the table ``space`` of a ``.toml`` or ``.json`` file (docs/tuning.md)."""
    path = Path(path)
    values = read_table(path, "the space")
    if not isinstance(values, dict) or values.keys() != {"space"} or not isinstance(values["space"], dict):
        raise ConfigError(f"{path}: wanted a table [space], and nothing else")
    if not values["space"]:
        raise ConfigError(f"{path}: the space is empty; wanted a setting with a range, lr = {{low = 1e-4, high = 0.1}}")
    known = all_settings(method)
    axes: dict[str, Axis] = {}
    for name, value in values["space"].items():
        setting = known[full_name(name, known, f"{path}:")]
        if setting.role != "method" or setting.name in ("method", "preset", "seed", "init_seed"):
            raise ConfigError(f"{path}: {name} is in the space; wanted switches of the method alone")
        if setting.name in axes:
            raise ConfigError(f"{path}: {setting.name} is in the space twice")
        try:
            axes[setting.name] = _axis(setting, value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return axes


def _axis(setting: Setting, value: Any) -> Axis:
    if isinstance(value, list) and len(value) > 1:
        axis = Axis(setting, choices=tuple(value))
    elif isinstance(value, Mapping) and {"low", "high"} <= value.keys() <= {"low", "high", "log"}:
        axis = Axis(setting, Search(value["low"], value["high"], value.get("log", False)))
        if setting.type not in ("int", "float") or setting.choices is not None:
            raise ConfigError(f"{setting.name} is given a range; wanted a list of values")
    else:
        raise ConfigError(
            f"{setting.name} is {shown(value)}; wanted {{low = ..., high = ..., log = true or false}}, or a list of at"
            " least two values"
        )
    for corner in axis.corners():
        setting.check(corner)
    if axis.search is not None:
        low, high, log, _ = axis.search
        if not isinstance(log, bool) or low is None or high is None or not low < high or (log and low <= 0):
            raise ConfigError(
                f"{setting.name} has the range {shown(axis.described())}; wanted low below high, and above 0"
                " where log is true"
            )
    return axis


def check_values(axes: Mapping[str, Axis], changes: Mapping[str, Any]) -> RunConfig:
    """The configuration with these changes. ConfigError if a run could not have one of these
    values or the ends of an axis, or if a setting is given a value and searched.
    """
    for name, axis in axes.items():
        if name in changes:
            raise ConfigError(f"{name} is set to {shown(changes[name])} and is searched, too; wanted one of them")
        for value in axis.corners():
            with_changes(None, {**changes, name: value})
    return with_changes(None, changes)
