"""A learner as a file or a pickle: what makes it again, and what it continues from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast._build_info import build_info, code_hash
from mose_fast._files import replace_file
from mose_fast.learner.hooks import MethodHooks
from mose_fast.learner.named_settings import with_absolute_paths
from mose_fast.learner.registry import check_unchanged, find_method, method_files
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.state_file import StateFileError, state_file

__all__ = ["FORMAT", "KIND", "class_of", "machine_changes", "made_by", "parts", "rebuilt", "save_learner", "told_code"]

#: The kind of file, and the number of its format.
KIND, FORMAT = "mose_fast_learner", 1


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
    has planned steps that were not taken, or holds what is not part of its state.
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
    """The inverse of :func:`parts`; ``kind`` None finds the learner's class by its name.

    Raises:
        ConfigError: There is no such method here, or it has other options.
        ValueError: The state belongs to another version of the method.
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
    content = state_file(KIND, FORMAT, {key: tensor.cpu() for key, tensor in tensors.items()}, values)
    try:
        replace_file(Path(path), content)
    except OSError as error:
        raise StateFileError(f"cannot write {path} ({len(content):,} bytes): {error.strerror}") from error
