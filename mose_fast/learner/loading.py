"""Reads a learner from its file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from mose_fast.learner.learner import Learner
from mose_fast.learner.registry import find_method, method_changes
from mose_fast.learner.room import check_room
from mose_fast.learner.saved import FORMAT, KIND, machine_changes, made_by, rebuilt, told_code
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.state_file import StateFileError, read_state

__all__ = ["load_learner"]


def load_learner(path: str | Path, *, device: str | None = None, method: str | None = None) -> Learner:
    """Reads a learner that :meth:`mose_fast.methods.Learner.save` wrote. It continues bit for bit
    on the same kind of machine.

    Args:
        path: The file.
        device: Where to compute now, for example ``cpu``; None: where the configuration says. With
            a device, ``step`` and ``feed`` become ``auto``.
        method: Where the file of a method of your own is now, ``path/to/file.py:Name``; None: where
            it was.

    Raises:
        StateFileError: The file is missing, damaged, of something else, or of a newer version.
        ConfigError: The method is not found, the device does not exist, or the memory is too small.
    """
    path = Path(path)
    tensors, values = read_state(path, KIND, FORMAT, called="saved learner")
    name = values["config"]["method"] if method is None else method
    try:
        found = find_method(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; wanted load_learner(..., method='path/to/file.py:Name')") from error
    if found is None:
        raise ConfigError(
            f"{path} holds a learner of method {name!r}, which is unknown here; import the module that defines it first"
        )
    values["config"]["method"] = name
    if device is not None:
        values["config"] |= {"device": device, "step": "auto", "feed": "auto"}
    config = RunConfig.from_dict(values["config"])
    check_room(config, tuple(values["stream"]["image_size"]), values["stream"]["classes"])
    try:
        learner = rebuilt(found, tensors, values)
    except ConfigError:
        raise
    except ValueError as error:
        raise StateFileError(f"{path} belongs to another version of method {name!r}: {error}") from error
    _warn_of_changes(path, values["identity"], made_by(learner))
    return learner


def _warn_of_changes(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changes = [method_changes(before["method_files"], now["method_files"])]
    if before["code"] != now["code"]:
        changes.append(f"mose-fast was {told_code(before)} and is {told_code(now)} now")
    changes.append(machine_changes(before["machine"], now["machine"]))
    if any(changes):
        warnings.warn(
            f"{path} was saved by other code or on another machine, so the learner may continue otherwise than it would"
            f" have there: {'; '.join(filter(None, changes))}",
            stacklevel=3,
        )
