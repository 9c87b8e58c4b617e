"""A learner as a file or a pickle: what makes it again, and what it continues from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast._build_info import build_info, code_hash
from mose_fast._files import replace_file
from mose_fast.learner.hooks import MethodHooks
from mose_fast.learner.named_settings import with_absolute_paths
from mose_fast.learner.registry import check_unchanged, find_method, method_changes, method_files
from mose_fast.learner.room import check_room
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.state_file import StateFileError, read_state, state_file

# The kind of file, and the number of its format.
_KIND, _FORMAT = "mose_fast_learner", 1


def made_by(learner: MethodHooks) -> dict[str, Any]:
    """The code and the machine that computed a learner, as plain values; ConfigError if the
    method's files were edited after they had been imported.
    """
    check_unchanged(type(learner))
    build = build_info()
    off = [] if learner.self_check is None else sorted(_loader.off)
    return {
        "code": code_hash(),
        "method_files": dict(method_files(type(learner))),
        "version": build["version"],
        "commit": build["commit"],
        "machine": {
            "torch": torch.__version__,
            "device": learner.device.type,
            "threads": torch.get_num_threads(),
            "native code that the self-check switched off": ", ".join(off) or "none",
        },
    }


def machine_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two machines of :func:`made_by`, in words; empty if nothing does."""
    return "; ".join(f"{name} was {before[name]} and is {now[name]} now" for name in now if before[name] != now[name])


def told_code(made: dict[str, Any]) -> str:
    """The version of this package in a result of :func:`made_by`, in words."""
    return f"{made['version']}, commit {made['commit'] or 'unknown'}, code {made['code']}"


def parts(learner: MethodHooks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What makes a learner again: the tensors of its state, and values for JSON; ConfigError if it
    has planned steps or holds what is no state.
    """
    if learner.data.ahead:
        raise ConfigError(
            f"the learner has {learner.data.ahead} planned steps that were not taken; wanted take() or undo() of each"
            " prepared batch before it is saved"
        )
    learner.check_kept()
    tensors, values = learner.state()
    config = with_absolute_paths(learner.config)
    stream = {
        "classes": int(learner.classes),
        "image_size": list(map(int, learner.image_size)),
        "mean": list(map(float, learner.mean)),
        "std": list(map(float, learner.std)),
        "mirror_safe": bool(learner.mirrored),
    }
    return tensors, {"config": config.to_dict(), "stream": stream, "learner": values}


def class_of(learner: MethodHooks) -> type[MethodHooks] | None:
    """The class for :func:`rebuilt`; None for one from a file, which no process can import."""
    name, kind = learner.config.method, type(learner)
    return None if name.rpartition(":")[0].endswith(".py") and find_method(name) is kind else kind


def rebuilt(kind: type[MethodHooks] | None, tensors: dict[str, Tensor], values: dict[str, Any]) -> MethodHooks:
    """The inverse of :func:`parts`; ``kind`` None finds the learner's class by its name. ValueError
    if the state belongs to another version of the method.
    """
    config = RunConfig.from_dict(values["config"])
    learner = (find_method(config.method) if kind is None else kind)(config, **values["stream"])
    learner.load_state(tensors, values["learner"])
    return learner


def save_learner(learner: MethodHooks, path: str | Path) -> None:
    """See :meth:`mose_fast.methods.Learner.save`."""
    name = learner.config.method
    if find_method(name) is not type(learner):
        raise ConfigError(
            f"{type(learner).__qualname__} is not the class of method {name!r}, by which it would be loaded; wanted the"
            " decorator @mose_fast.methods.method(...) on it, and its name as the configuration's method"
        )
    tensors, values = parts(learner)
    values["identity"] = made_by(learner)
    content = state_file(_KIND, _FORMAT, {key: tensor.cpu() for key, tensor in tensors.items()}, values)
    try:
        replace_file(Path(path), content)
    except OSError as error:
        raise StateFileError(f"cannot write {path} ({len(content):,} bytes): {error.strerror}") from error


def read_learner(path: Path, device: str | None, method: str | None) -> MethodHooks:
    """See :func:`mose_fast.load_learner`."""
    tensors, values = read_state(path, _KIND, _FORMAT, called="saved learner")
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
    config, stream = RunConfig.from_dict(values["config"]), values["stream"]
    check_room(config, tuple(stream["image_size"]), stream["classes"])
    try:
        learner = rebuilt(found, tensors, values)
    except ConfigError:
        raise
    except ValueError as error:
        raise StateFileError(f"{path} belongs to another version of method {name!r}: {error}") from error
    before, now = values["identity"], made_by(learner)
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
    return learner
