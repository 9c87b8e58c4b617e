"""Registers methods and finds them by name, by entry point, or in a file outside the package
(docs/adding_a_method.md).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from mose_fast.learner.about import About, Preset
from mose_fast.learner.hooks import MethodHooks
from mose_fast.settings.run import (
    ENTRY_POINTS,
    METHOD_SETTINGS,
    ConfigError,
    MethodOptions,
    MethodSettings,
    RunConfig,
    near_matches,
)

_PACKAGE = Path(__file__).resolve().parents[1]

# What the names of modules begin with that were imported from a method's file.
_FROM_FILE = "mose_fast_outside_"

#: Every method by name.
METHODS: dict[str, type[MethodHooks]] = {}

T = TypeVar("T", bound=type)


def method(
    name: str, *, options: type[MethodOptions], presets: Mapping[str, Preset], year: int, reference: str, cost: float
) -> Callable[[T], T]:
    """Class decorator that registers a :class:`mose_fast.methods.Learner` under a name, the value
    of ``RunConfig.method``, with the dataclass of its switches and its presets, of which the first
    is the default; :class:`About` has the others. ConfigError if the class is no complete learner
    or the name is taken.
    """

    def enter(learner: T) -> T:
        check_learner(learner, f"method {name!r}")
        if name in METHODS:
            raise ConfigError(
                f"method {name!r} is already registered, by {METHODS[name].__module__}.{METHODS[name].__qualname__}"
            )
        learner.about = About(year, reference, cost, presets, _files_now(learner))
        METHODS[name] = learner
        METHOD_SETTINGS[name] = MethodSettings(options, {preset: values.changes for preset, values in presets.items()})
        return learner

    return enter


def check_learner(learner: Any, owner: str) -> None:
    """Refuses a class that is not a complete learner by a ConfigError that names what it lacks."""
    # A learner can predict, too: its class itself imports this module.
    if not isinstance(learner, type) or not issubclass(learner, MethodHooks) or not hasattr(learner, "predict"):
        lacking = [name for name in sorted(MethodHooks.__abstractmethods__) if not hasattr(learner, name)]
        lacks = f", which lacks {', '.join(lacking)}" if lacking else ""
        raise ConfigError(
            f"{owner} is {learner!r}{lacks}; wanted a subclass of mose_fast.methods.Learner or of one of its subclasses"
        )
    if inspect.isabstract(learner):
        raise ConfigError(
            f"{owner} lacks {', '.join(sorted(learner.__abstractmethods__))}; wanted {learner.__qualname__} to"
            " define it"
        )


def find_method(name: str) -> type[MethodHooks] | None:
    """The learner of this name, of an entry point of this name, or of ``path/to/file.py:Name``;
    None if there is none. ConfigError if the file or entry point cannot be used.
    """
    import_module("mose_fast.methods")  # whose files import this module
    if name in METHODS:
        return METHODS[name]
    path, _, attribute = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    if path.endswith(".py"):
        return _from_file(name, Path(path), attribute)
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        return _from_entry_point(entry)
    return None


def method_files(learner: type[MethodHooks]) -> Mapping[str, str]:
    """The files outside this package that a method is made of, as they were when it was entered:
    those of its class and its base classes, and what these import from their own folder. Returns 16
    hex digits of each file's SHA-256 by name; none for a class that was defined interactively.
    """
    about = vars(learner).get("about")
    return _files_now(learner) if about is None else about.files


def check_unchanged(learner: type[MethodHooks]) -> None:
    """Raises ConfigError if a method's files were edited since: the old code would run."""
    if edited := method_changes(method_files(learner), _files_now(learner)):
        raise ConfigError(
            f"the files of method {learner.__qualname__} were edited after this process had imported them ({edited});"
            " restart Python to use them as they are"
        )


def method_changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two results of :func:`method_files`, in words; empty if nothing does."""
    return ", ".join(
        f"{name} was {before.get(name, 'absent')} and is {now.get(name, 'absent')} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )


def _files_now(learner: type[MethodHooks]) -> dict[str, str]:
    found: dict[Path, str] = {}
    for kind in learner.__mro__:
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        if file is None or kind.__module__ in sys.stdlib_module_names:
            continue
        path = Path(file).resolve()
        if path.is_file() and not path.is_relative_to(_PACKAGE):
            found = _imported(path, module.__name__) | found
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path, name in sorted(found.items())}


def _imported(path: Path, module: str) -> dict[Path, str]:
    """A module's file and all that it imports from its own folder, or a package's from its root,
    with their names there. Imports are read, not made.
    """
    importable = not module.startswith(_FROM_FILE) and module != "__main__"
    root = path.parents[module.count(".") + (path.name == "__init__.py") if importable else 0]
    found: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file() or file.is_relative_to(_PACKAGE):
            continue
        found[file] = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
        if not {"site-packages", "dist-packages"} & set(root.parts):  # where others have installed theirs
            waiting += _named_by(file, root)
    return found


def _named_by(file: Path, root: Path) -> list[Path]:
    """The files that would hold the modules which a file imports, if they are its own."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):
        return []  # What cannot be imported is no part of a method that was.
    places = []
    for node in nodes:
        if isinstance(node, ast.Import):
            places += [root.joinpath(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = root if node.level == 0 else file.parents[node.level - 1]
            owner = start.joinpath(*(node.module or "").split("."))
            places += [owner, *(owner / alias.name for alias in node.names)]
    places += [above for place in places for above in place.parents]
    inside = [place for place in dict.fromkeys(places) if root in place.parents]
    return [path for place in inside for path in (place.with_name(f"{place.name}.py"), place / "__init__.py")]


def method_names() -> list[str]:
    """The names of all methods of this package and of installed packages."""
    import_module("mose_fast.methods")
    return [*dict.fromkeys([*METHODS, *(entry.name for entry in entry_points(group=ENTRY_POINTS))])]


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


def _from_file(name: str, path: Path, attribute: str) -> type[MethodHooks]:
    if not path.is_file():
        raise ConfigError(
            f"method is {name!r}, but there is no file {path}; put it there, or name it where it is:"
            " path/to/file.py:Name"
        )
    module_name = f"{_FROM_FILE}{path.resolve().as_posix()}"
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
        own = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module_name}
        classes = [key for key, value in own.items() if issubclass(value, MethodHooks)] or [*own]
        if not attribute:
            wanted = " or ".join(f"{path}:{key}" for key in classes or ["Name"])
            raise ConfigError(f"method is {name!r}, without the name of its class; wanted {wanted}")
        raise ConfigError(f"method is {name!r}, but {path} has no {attribute!r}{near_matches(attribute, classes)}")
    return _under_another_name(name, getattr(module, attribute))


def _from_entry_point(entry: EntryPoint) -> type[MethodHooks]:
    try:
        learner = entry.load()
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"method {entry.name!r}, entry point {entry.value}, cannot be imported: {why}") from error
    return _under_another_name(entry.name, learner)


def _under_another_name(name: str, learner: Any) -> type[MethodHooks]:
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
