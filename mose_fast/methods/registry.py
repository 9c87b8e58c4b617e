"""Registers methods and finds them by name, by entry point, or in a file outside the package
(docs/adding_a_method.md).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from mose_fast.config import (
    ENTRY_POINTS,
    METHOD_SETTINGS,
    ConfigError,
    MethodOptions,
    MethodSettings,
    RunConfig,
    near_matches,
)
from mose_fast.methods.base import Learner

__all__ = ["METHODS", "About", "Preset", "find_method", "method", "method_names", "warn_of_other_protocol"]


@dataclass(frozen=True)
class Preset:
    """A named set of values for a method's options, and the protocol that it is meant for.

    Attributes:
        source: Source of the values in ``changes``.
        changes: Values that differ from the options' defaults.
        batch: Incoming images a step.
        epochs: Passes over each task.
    """

    source: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 10
    epochs: int = 1


@dataclass(frozen=True)
class About:
    """Facts about a method for lists of methods.

    Attributes:
        year: Year of publication.
        reference: The paper's title or the method's name, and where it appeared.
        cost: Cost of a step relative to ER's, which is 74 images forward and backward; a forward
            pass alone counts a third.
        presets: Presets by name; the first is the default.
    """

    year: int
    reference: str
    cost: float
    presets: Mapping[str, Preset]


#: Every method by name.
METHODS: dict[str, type[Learner]] = {}

T = TypeVar("T", bound=type)


def method(
    name: str, *, options: type[MethodOptions], presets: Mapping[str, Preset], year: int, reference: str, cost: float
) -> Callable[[T], T]:
    """Class decorator that registers a :class:`Learner` under a name.

    Args:
        name: The value of ``RunConfig.method``.
        options: Dataclass of its switches.
        presets: Presets by name; the first is the default.
        year: See :class:`About`.
        reference: See :class:`About`.
        cost: See :class:`About`.

    Raises:
        ConfigError: The class is not a learner, lacks a function that every learner must have, or
            the name belongs to another class.
    """

    def enter(learner: T) -> T:
        check_learner(learner, f"method {name!r}")
        if name in METHODS:
            raise ConfigError(
                f"method {name!r} is already registered, by {METHODS[name].__module__}.{METHODS[name].__qualname__}"
            )
        learner.about = About(year, reference, cost, presets)
        METHODS[name] = learner
        METHOD_SETTINGS[name] = MethodSettings(options, {preset: values.changes for preset, values in presets.items()})
        return learner

    return enter


def check_learner(learner: Any, owner: str) -> None:
    """Refuses a class that is not a complete learner.

    Raises:
        ConfigError: Functions are missing; the message names them.
    """
    if not isinstance(learner, type) or not issubclass(learner, Learner):
        lacking = [name for name in sorted(Learner.__abstractmethods__) if not hasattr(learner, name)]
        lacks = f", which lacks {', '.join(lacking)}" if lacking else ""
        raise ConfigError(
            f"{owner} is {learner!r}{lacks}; wanted a subclass of mose_fast.methods.Learner or of one of its subclasses"
        )
    if learner.state is not Learner.state:
        raise ConfigError(
            f"{owner} defines state(), which only copies; wanted self.keep(NAME, TENSOR OR MODULE) in"
            f" {learner.__qualname__}.__init__ for what else a checkpoint must hold"
        )
    if inspect.isabstract(learner):
        raise ConfigError(
            f"{owner} lacks {', '.join(sorted(learner.__abstractmethods__))}; wanted {learner.__qualname__} to"
            " define it"
        )


def find_method(name: str) -> type[Learner] | None:
    """The learner with this name, of an entry point with this name, or of ``path/to/file.py:Name``;
    None if there is none.

    Raises:
        ConfigError: The file or entry point cannot be used.
    """
    if name in METHODS:
        return METHODS[name]
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        return _from_file(name, Path(path), attribute)
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        return _from_entry_point(entry)
    return None


def method_names() -> list[str]:
    """The names of all methods of this package and of installed packages."""
    return [*dict.fromkeys([*METHODS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))])]


def find_settings(name: str) -> MethodSettings | None:
    """The settings of a method that is not in the table of ``method_settings``."""
    learner = find_method(name)
    return None if learner is None else METHOD_SETTINGS[name]


def warn_of_other_protocol(config: RunConfig) -> None:
    """Warns if a run's batch size or epochs differ from what its preset is meant for."""
    preset = METHODS[config.method].about.presets[config.preset]
    wrong = []
    if config.stream.batch != preset.batch:
        wrong.append(f"stream.batch is {config.stream.batch}, the preset's {preset.batch}")
    if config.epochs != preset.epochs and config.train_on == "stream":
        wrong.append(f"epochs is {config.epochs}, the preset's {preset.epochs}")
    if wrong:
        warnings.warn(
            f"preset {config.preset!r} of {config.method!r} is meant for another protocol: {'; '.join(wrong)}",
            stacklevel=3,
        )


def _from_file(name: str, path: Path, attribute: str) -> type[Learner]:
    if not path.is_file():
        raise ConfigError(f"method is {name!r}, but there is no file {path}")
    module_name = f"mose_fast_outside_{path.resolve().as_posix()}"
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look their module up there
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[module_name]
            if isinstance(error, ConfigError | KeyboardInterrupt | SystemExit):
                raise
            raise ConfigError(
                f"method is {name!r}, but {path} cannot be imported: {type(error).__name__}: {error}"
            ) from error
    if not hasattr(module, attribute):
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name
        ]
        raise ConfigError(f"method is {name!r}, but {path} has no {attribute!r}{near_matches(attribute, classes)}")
    return _under_another_name(name, getattr(module, attribute))


def _from_entry_point(entry: EntryPoint) -> type[Learner]:
    try:
        learner = entry.load()
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"method {entry.name!r}, entry point {entry.value}, cannot be imported: {why}") from error
    return _under_another_name(entry.name, learner)


def _under_another_name(name: str, learner: Any) -> type[Learner]:
    """Registers a learner also under the name by which it was found."""
    check_learner(learner, f"method {name!r}")
    own = next((known for known, entered in METHODS.items() if entered is learner), None)
    if own is None:
        raise ConfigError(
            f"method {name!r} has no options and presets; wanted the decorator @mose_fast.methods.method(...) on its"
            " class"
        )
    METHODS[name], METHOD_SETTINGS[name] = learner, METHOD_SETTINGS[own]
    return learner
