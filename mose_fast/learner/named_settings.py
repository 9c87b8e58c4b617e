"""Settings by dotted name and as text: what ``--set``, grids and sweep files have in common."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mose_fast import streams
from mose_fast.settings.knob import Setting, plain, settings_of
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig, method_settings, near_matches, shown


def all_settings(method: str) -> dict[str, Setting]:
    """Every setting of a run of ``method``, by dotted name; ConfigError if it is unknown."""
    return {**settings_of(RunConfig), **settings_of(StreamConfig), **settings_of(method_settings(method).options)}


def telling_apart(method: str) -> set[str]:
    """The names of the settings that make two runs of ``method`` different experiments: all but the
    seed and those by which results change by no more than rounding.
    """
    return {setting.name for setting in all_settings(method).values() if setting.changes_results} - {"seed"}


def dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a configuration (:meth:`RunConfig.to_dict`), by its dotted name."""
    values = dict(config)
    for owner in ("stream", "options"):
        values |= {f"{owner}.{name}": value for name, value in values.pop(owner).items()}
    return values


def assignment(text: str, flag: str) -> tuple[str, str]:
    """Splits ``NAME=VALUE``, given to ``flag``; ConfigError if there is no ``=``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{flag} is {text!r}; wanted NAME=VALUE, for example {flag} augment=simclr")
    return name, value


def full_name(name: str, known: Mapping[str, Any], flag: str) -> str:
    """The dotted name of a setting given to ``flag``; ``augment`` stands for ``options.augment``.

    ConfigError with near matches if it is not among ``known``, the result of :func:`all_settings`.
    """
    setting = name if name in known else f"options.{name}"
    if setting not in known:
        told = name if name.isprintable() else shown(name)
        raise ConfigError(
            f"{flag} {told} is not a setting{near_matches(name, [each.removeprefix('options.') for each in known])}"
        )
    return setting


def read_value(setting: Setting, text: str) -> Any:
    """What ``text`` means for a setting: JSON, or a bare string."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # expert=1 and a stream called 2024 are names; null is None only where that is a value.
    if setting.type == "str" and not isinstance(parsed, str) and not (parsed is None and setting.none is not None):
        return text
    return parsed


def with_changes(base: RunConfig | None, changes: Mapping[str, Any]) -> RunConfig:
    """A configuration with some settings changed, by dotted name; without a ``base``, from the
    defaults of the method and preset in ``changes``. ConfigError for an unknown name or a value
    that is out of range.

    Where ``changes`` names another method or preset than ``base``, the options that ``base``
    changes from its own preset are kept and all others come from the new one. Where they name
    another stream, the fingerprint of the earlier one's data goes with it.
    """
    values: dict[str, Any] = {"stream": {}, "options": {}}
    changes = {name: plain(value) for name, value in changes.items()}
    if base is not None:
        values = base.to_dict()
        method = changes.get("method", base.method)
        if method != base.method:
            del values["preset"]
        if method != base.method or changes.get("preset", base.preset) != base.preset:
            values["options"] = base.changes_from_preset()
        if changes.get("stream.name", base.stream.name) != base.stream.name:
            values["stream"]["fingerprint"] = None
    for setting, value in changes.items():
        owner, _, name = setting.rpartition(".")
        (values[owner] if owner else values)[name] = value
    return RunConfig.from_dict(values)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths, so that its run continues from any folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    stream, (path, _, attribute) = config.stream, config.method.rpartition(":")
    method = f"{absolute(path)}:{attribute}" if path.endswith(".py") else config.method
    data_dir = None if stream.data_dir is None else absolute(stream.data_dir)
    name, data = stream.name, Path(stream.name).expanduser()
    if name not in streams.names() and (os.sep in name or data.suffix.lower() == ".npz" or data.exists()):
        name = absolute(name)
    stream = dataclasses.replace(stream, name=name, data_dir=data_dir)
    return dataclasses.replace(config, method=method, stream=stream)
