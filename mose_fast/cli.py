"""The command line ``mose-fast``: parses, calls, prints. docs/command_line.md describes it for users."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from mose_fast import streams, train
from mose_fast._version import __version__
from mose_fast.config import ConfigError, RunConfig, StreamConfig, annotation, method_settings, near_matches
from mose_fast.doctor import diagnose, report
from mose_fast.methods import find_method, method_names
from mose_fast.progress import Progress
from mose_fast.train.files import RunFolder
from mose_fast.train.results import summary

__all__ = ["build_parser", "main", "read_settings"]


class _Flag(NamedTuple):
    """A flag of ``run`` that sets the field ``setting``, given as ``--set`` takes it."""

    name: str
    setting: str
    kind: type
    help: str


_FLAGS: dict[str, tuple[_Flag, ...]] = {
    "what is learned": (
        _Flag("--stream", "stream.name", str, "a stream of `mose-fast list streams`, a folder with train and test, or an .npz file"),
        _Flag("--data-dir", "stream.data_dir", str, "folder with the data set's files [~/.cache/mose_fast]"),
        _Flag("--tasks", "stream.tasks", int, "tasks that the classes are split into [the stream's own]"),
        _Flag("--class-order-seed", "stream.class_order_seed", int, "draws the order of classes [the natural order]"),
        _Flag("--limit-per-task", "stream.limit_per_task", int, "training images a task, at most [all]"),
        _Flag("--batch", "stream.batch", int, "incoming images a step"),
        _Flag("--normalisation", "stream.normalisation", str, "name of the constants [the stream's own]"),
    ),
    "how": (
        _Flag("--method", "method", str, "a method of `mose-fast list methods`, or path/to/file.py:Name"),
        _Flag("--preset", "preset", str, "mose has released (as the authors' code does it) and paper (the text, literally)"),
        _Flag("--memory", "memory", int, "images that the replay memory holds"),
        _Flag("--width", "width", int, "channels of the first stage; 64 is the full ResNet-18"),
        _Flag("--epochs", "epochs", int, "passes over each task; online learning makes one"),
        _Flag("--seed", "seed", int, "of weights, order within tasks, memory and views"),
    ),
    "where": (
        _Flag("--device", "device", str, "auto (the GPU where there is one), cpu, cuda or cuda:N"),
        _Flag("--precision", "precision", str, "fp32 or bf16"),
        _Flag("--deterministic", "deterministic", bool, "deterministic kernels only, so that resuming is exact on CUDA too"),
        _Flag("--checkpoint-every", "checkpoint_every", int, "batches between checkpoints within a task [at task ends only]"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0; 1 where doctor finds that no run is possible; 2 for unusable settings, data or folders; 130 after Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return arguments.act(arguments)
        except (ConfigError, streams.StreamError, train.RunError) as error:
            print(f"mose-fast: {error}", file=sys.stderr)
            return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. A flag that is not given leaves no trace, so that it never overrides a ``--config`` file."""
    parser = argparse.ArgumentParser(prog="mose-fast", description="Online continual learning with MOSE.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mose-fast {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="train on a stream, evaluate after every task, write results", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Trains on a stream in one pass, evaluates after every task and writes a run folder.",
        epilog="example: mose-fast run --stream digits --width 16 --memory 500 --seed 0",
    )  # fmt: skip
    run.set_defaults(act=_run)
    defaults = RunConfig()
    for title, flags in _FLAGS.items():
        group = run.add_argument_group(title)
        for flag in flags:
            default = _get(defaults, flag.setting)
            text = flag.help if default is None or flag.kind is bool else f"{flag.help} [{default}]"
            how: dict[str, Any] = {"action": "store_true"} if flag.kind is bool else {"type": flag.kind, "metavar": _metavar(flag)}
            group.add_argument(flag.name, dest=flag.setting, help=text, **how)
    files = run.add_argument_group("files and everything else")
    files.add_argument("--out", metavar="DIR", help="the run's folder [runs/STREAM-METHOD-PRESET-mMEMORY-sSEED]")
    files.add_argument("--overwrite", action="store_true", help="replace an earlier run in the folder")
    files.add_argument("--config", metavar="FILE", help="settings from a .json or .toml file; flags beside it override it")
    files.add_argument(
        "--set", metavar="NAME=VALUE", action="append",
        help="any other setting, repeatable: augment=simclr, options.student=2, evaluation_batch=64, per_class_cap=null",
    )  # fmt: skip

    resume = commands.add_parser("resume", help="continue an interrupted run", allow_abbrev=False)
    resume.set_defaults(act=_resume)
    resume.add_argument("folder", metavar="DIR", help="the run's folder")

    listing = commands.add_parser("list", help="what there is to choose from", allow_abbrev=False)
    listing.set_defaults(act=_list)
    listing.add_argument("what", choices=("methods", "streams"))

    doctor = commands.add_parser("doctor", help="what this machine has, what is missing, and how to get it", allow_abbrev=False)
    doctor.set_defaults(act=_doctor)
    doctor.add_argument("--data-dir", metavar="DIR", help="folder with the data sets' files [~/.cache/mose_fast]")
    return parser


def read_settings(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that the arguments of ``run`` ask for: the ``--config`` file, overridden by flags, overridden by ``--set``.

    Where a flag names another method or preset than the file, the options that the file changes from its own preset are kept.
    Paths become absolute, so that the run can be resumed from any folder.

    Raises:
        ConfigError: A name is unknown, a value is out of range, or the file cannot be used.
    """
    given = vars(arguments)
    changes = {flag.setting: given[flag.setting] for flags in _FLAGS.values() for flag in flags if flag.setting in given}
    assigned = [_split(text) for text in given.get("set", [])]
    loaded = RunConfig.load(given["config"]) if "config" in given else None
    method = dict(assigned).get("method", changes.get("method", loaded.method if loaded else RunConfig.method))
    types = _types(method)
    changes.update(_typed(name, value, types) for name, value in assigned)
    values: dict[str, Any] = {"stream": {}, "options": {}}
    if loaded:
        values = loaded.to_dict()
        if method != loaded.method:
            del values["preset"]
        if method != loaded.method or changes.get("preset", loaded.preset) != loaded.preset:
            values["options"] = loaded.changes_from_preset()
    for setting, value in changes.items():
        owner, _, name = setting.rpartition(".")
        (values[owner] if owner else values)[name] = value
    config = RunConfig.from_dict(values)
    stream = config.stream
    return dataclasses.replace(
        config,
        method=_absolute_method(config.method),
        stream=dataclasses.replace(
            stream, name=_absolute_stream(stream.name), data_dir=None if stream.data_dir is None else _absolute(stream.data_dir)
        ),
    )


def _run(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments)
    given = vars(arguments)
    out = Path(given["out"]) if "out" in given else _default_folder(config)
    return _follow(out, lambda listener: train.run(config, out=out, overwrite=given.get("overwrite", False), listeners=[listener]))


def _resume(arguments: argparse.Namespace) -> int:
    out = Path(arguments.folder)
    return _follow(out, lambda listener: train.resume(out, listeners=[listener]))


def _follow(out: Path, start: Callable[[Progress], dict[str, Any]]) -> int:
    """Lets ``start(listener)`` run, shows its progress on the way and its results at the end."""
    progress = Progress(out)
    try:
        results = start(progress)
    except KeyboardInterrupt:
        further = f"; to continue: mose-fast resume {shlex.quote(str(out))}" if progress.started else " before the first batch"
        print(f"mose-fast: interrupted{further}", file=sys.stderr)
        return 130
    seconds = results["seconds"]
    folder = RunFolder(out)
    print(f"\n{summary(results)}\n")
    print(f"time      {seconds['total']:.1f} s: " + ", ".join(f"{k} {v:.1f}" for k, v in seconds.items() if k != "total"))
    print(f"results   {folder.results}")
    print(f"          {folder.accuracy.name}, {folder.figure.name}, {folder.config.name} and {folder.events.name}/ beside it")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    if arguments.what == "methods":
        rows = []
        for name in method_names():
            about = find_method(name).about
            rows.append((name, f"{about.year}  {about.cost:5.2f}x  {about.reference} (presets {', '.join(about.presets)})"))
        rows.append(("file.py:Name", "a method of your own: docs/adding_a_method.md; x: cost of a step, in units of ER's"))
    else:
        rows = [(name, streams.summary(name)) for name in streams.names()]
        rows.append(("a folder or .npz", "your own images: docs/own_data.md"))
    width = max(len(name) for name, _ in rows)
    for name, meaning in rows:
        print(f"{name:<{width}}  {meaning}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    findings = diagnose(arguments.data_dir)
    print(report(findings))
    return 1 if any(finding.mark == "FAIL" for finding in findings) else 0


def _get(config: RunConfig, setting: str) -> Any:
    owner, _, name = setting.rpartition(".")
    return getattr(getattr(config, owner) if owner else config, name)


def _metavar(flag: _Flag) -> str:
    if flag.kind is int:
        return "N"
    return "DIR" if flag.name.endswith("-dir") else "NAME"


def _types(method: str) -> dict[str, str]:
    """The annotation of every single setting of a run of ``method``, by its dotted name."""
    tables = {"": RunConfig, "stream.": StreamConfig, "options.": method_settings(method).options}
    types = {owner + f.name: annotation(f) for owner, table in tables.items() for f in dataclasses.fields(table)}
    return {name: kind for name, kind in types.items() if name not in ("stream", "options")}


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set is {text!r}; wanted NAME=VALUE, for example --set augment=simclr")
    return name, value


def _typed(name: str, value: str, types: dict[str, str]) -> tuple[str, Any]:
    """The dotted name of a setting, and the value that ``value`` means for it: JSON, or a bare string."""
    setting = name if name in types else f"options.{name}"
    if setting not in types:
        raise ConfigError(f"--set {name} is not a setting{near_matches(name, [known.removeprefix('options.') for known in types])}")
    try:
        parsed = json.loads(value)
    except ValueError:
        return setting, value
    # expert=1 and a stream called 2024 are names; null is None only where that is a value.
    if types[setting].startswith("str") and not isinstance(parsed, str) and not (parsed is None and types[setting].endswith("None")):
        return setting, value
    return setting, parsed


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _absolute_method(name: str) -> str:
    path, _, attribute = name.rpartition(":")
    return f"{_absolute(path)}:{attribute}" if path.endswith(".py") else name


def _absolute_stream(name: str) -> str:
    if name in streams.names():
        return name
    path = Path(name).expanduser()
    return _absolute(name) if os.sep in name or path.suffix.lower() == ".npz" or path.exists() else name


def _default_folder(config: RunConfig) -> Path:
    stream, method = Path(config.stream.name).stem, Path(config.method).stem
    return Path("runs") / f"{stream}-{method}-{config.preset}-m{config.memory}-s{config.seed}"


def _show_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
    tqdm.write(f"warning: {message}", file=sys.stderr)
