"""The command line ``mose-fast``: it parses the arguments, calls the package and prints.

Users find it described in docs/command_line.md.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from mose_fast import streams
from mose_fast._version import __version__
from mose_fast.errors import MoseFastError
from mose_fast.export.card import read_card
from mose_fast.learner.named_settings import (
    all_settings,
    assignment,
    full_name,
    read_value,
    with_absolute_paths,
    with_changes,
)
from mose_fast.output import Guarded, guarded_output
from mose_fast.runs.files import RunError, RunFolder, check_folders
from mose_fast.settings.knob import as_text, settings_of, usual_name
from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.signals import raised_at_once

# Commands import the rest when they need it: torch, pandas and scipy take seconds to import, and
# help, lists and the messages on wrong flags and missing folders should not wait for them.
if TYPE_CHECKING:
    import pandas

    from mose_fast.experiments.place import Place
    from mose_fast.runs.progress import Progress
    from mose_fast.train import Listener

__all__ = ["build_parser", "main", "read_settings"]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, without the usage; an unknown flag gets a hint."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Here and not in the parser of all commands, since each command knows its own flags.
            flag = next((text for text in unknown if text.startswith("-")), unknown[0])
            self.error(f"{flag.partition('=')[0]} is not an argument{self._hint(flag)}")
        return found, unknown

    def _hint(self, flag: str) -> str:
        """A hint at what was probably meant: a flag of this command or a setting for ``--set``."""
        given = flag.partition("=")[0].lstrip("-").replace("-", "_")
        flags = {option for action in self._actions for option in action.option_strings}
        named = {option.lstrip("-").replace("-", "_"): option for option in flags}
        named |= {name: f"--{known.flag}" for name, known in _FLAGS.items() if f"--{known.flag}" in flags}
        usual = usual_name(given)
        for name in (usual, *get_close_matches(given, named, n=1, cutoff=0.75)):
            if name in named:
                return f"; did you mean {named[name]}?"
        if "--set" not in flags:
            return ""
        # Only now, since the switches of a method need torch.
        settings = [name.removeprefix("options.") for name in all_settings(RunConfig.method)]
        found = [name for name in (usual, *get_close_matches(given, settings, n=1)) if name in settings]
        return f"; wanted --set {found[0]}=VALUE" if found else ""


# Titles of the groups of flags, by the role of the settings.
_GROUPS = {
    "problem": "what is learned",
    "method": "how",
    "execution": "where and how fast",
    "bookkeeping": "data files and checkpoints",
}
# Settings of a run that have a flag, by dotted name.
_FLAGS = {
    name: setting for name, setting in {**settings_of(StreamConfig), **settings_of(RunConfig)}.items() if setting.flag
}
# What `bench` has flags for; it chooses or varies the others itself.
_BENCHED = ("stream.batch", "preset", "memory", "width", "device", "precision")
# What the description of a table of the paper says.
_DESCRIBED = ("method", "preset", "memory", "epochs", "seed", "evaluate_on")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0; 1 where runs failed, or doctor finds that none is possible; 2 for
        unusable settings, data or folders; 128 and the signal's number after Ctrl-C (130), SIGTERM
        (143) and SIGHUP (129).
    """
    with guarded_output() as shown, raised_at_once(), warnings.catch_warnings():
        arguments = build_parser().parse_args(argv)
        warnings.showwarning = _show_warning
        if arguments.act is not _list and "torch" not in sys.modules:
            from mose_fast.threads import settle_threads

            settle_threads(os.environ)
        try:
            code = arguments.act(arguments)
        except MoseFastError as error:
            print(f"mose-fast: {error}{_instead(error, vars(arguments).get('flags'))}", file=sys.stderr)
            return error.exit_code
        except OSError as error:
            # With a file name, the user named that file or its folder; without one, the program is
            # at fault.
            if error.filename is None:
                raise
            print(f"mose-fast: cannot use {os.fsdecode(error.filename)}: {error.strerror}", file=sys.stderr)
            return 2
        except KeyboardInterrupt as error:
            return _interrupted(error)
        return _lost(shown, arguments.act in (_list, _collect, _predict, _bench, _doctor)) or code


def _instead(error: MoseFastError, flags: Collection[str] | None) -> str:
    """How to give the setting that an error names as probably meant, to a command with these
    settings' flags; None: it takes no settings.
    """
    if error.instead is None or flags is None:
        return ""
    name, value = error.instead
    return f" (--{_FLAGS[name].flag} {value})" if name in flags else f" (--set {name}={as_text(value)})"


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands.

    A flag that is not given sets no attribute, so that it never overrides a ``--config`` file.
    """
    parser = _Parser(prog="mose-fast", description="Online continual learning with MOSE.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mose-fast {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], int], **how: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, allow_abbrev=False, **how)
        made.set_defaults(act=act)
        return made

    run = command(
        "run",
        _run,
        help="train on a stream, evaluate after every task, write results",
        argument_default=argparse.SUPPRESS,
        description=(
            "Trains on a stream in one pass, evaluates after every task and writes a run folder. `mose-fast list"
            " streams` and `mose-fast list methods` show the choices."
        ),
        epilog="example: mose-fast run --stream digits --width 16 --memory 500 --seed 0",
    )
    _add_flags(run)
    files = run.add_argument_group("files and everything else")
    files.add_argument("--out", metavar="DIR", help="the run's folder [runs/STREAM-METHOD-PRESET-mMEMORY-sSEED]")
    files.add_argument("--overwrite", action="store_true", help="replace an earlier run in the folder")
    files.add_argument("--config", metavar="FILE", help="settings from a .json or .toml file; flags override it")
    _add_wandb(run)

    resume = command("resume", _resume, help="continue an interrupted run")
    resume.add_argument("folder", metavar="DIR", help="the run's folder")
    _add_wandb(resume)

    many = command(
        "sweep",
        _sweep,
        help="run every combination of some settings' values",
        argument_default=argparse.SUPPRESS,
        description=(
            "Runs every combination of some settings' values, each in a run folder of its own. Finished runs are not"
            " repeated."
        ),
        epilog=(
            "example: mose-fast sweep --width 8 --grid memory=200,500 --grid preset=released,paper --seeds 0-4 --out"
            " runs/first"
        ),
    )
    many.add_argument(
        "file", metavar="FILE", nargs="?", help=".toml or .json file: settings as for run --config, and a table [grid]"
    )
    grid = many.add_argument_group("what varies")
    grid.add_argument(
        "--grid", metavar="NAME=V1,V2", action="append", help="a setting, named as for --set, with values; repeatable"
    )
    grid.add_argument("--seeds", metavar="0-14", help="seeds: numbers and ranges, 0-4 or 0,1,5-9")
    _add_flags(many)
    _add_place(many)
    files = many.add_argument_group("files")
    files.add_argument("--out", metavar="DIR", required=True, help="the sweep's folder; an unfinished one is continued")
    files.add_argument("--dry-run", action="store_true", help="print plan and forecast of time and memory, then stop")
    _add_wandb(many)

    search = command(
        "tune",
        _tune,
        help="search settings of a method on held-out training images",
        argument_default=argparse.SUPPRESS,
        description=(
            "Searches settings of a method with Optuna. Runs are evaluated on training images that are held out; no"
            " test image is read. To continue after an interruption, run the same command again."
        ),
        epilog="example: mose-fast tune --method er --trials 12 --seeds 0-1 --width 8 --limit-per-task 200",
    )
    search.add_argument("--trials", type=int, metavar="N", required=True, help="trials in all, earlier ones included")
    search.add_argument(
        "--space", metavar="FILE", help=".toml or .json file with a table [space] [the ranges of docs/tuning.md]"
    )
    search.add_argument("--seeds", metavar="0-14", help="seeds of each trial: 0-4 or 0,1,5-9 [0-1]")
    _add_flags(search, [name for name in _FLAGS if name not in ("seed", "evaluate_on")])
    _add_place(search)
    files = search.add_argument_group("files")
    files.add_argument("--out", metavar="DIR", help="the study's folder [runs/tune-STREAM-METHOD]")
    files.add_argument("--dry-run", action="store_true", help="print the forecast of time, then stop")

    table = command(
        "paper",
        _paper,
        help="run the experiments of one of the paper's tables and compare the results",
        argument_default=argparse.SUPPRESS,
        description=(
            "Runs the experiments of one of the paper's tables or figures and writes our results beside the paper's,"
            " with pass or miss. To continue after an interruption, run the same command again. With settings that"
            " depart from the paper's protocol it is a trial run, and no pass or miss is reported."
        ),
        epilog=(
            "example: mose-fast paper table1-cifar --data-dir DIR --seeds 0-14; for a small trial run add --width 8"
            " --limit-per-task 20"
        ),
    )
    table.add_argument("name", metavar="NAME", help="a table of `mose-fast list paper`, or all")
    table.add_argument("--seeds", metavar="0-14", help="numbers and ranges, 0-4 or 0,1,5-9; the paper uses 15 [0-2]")
    table.add_argument("--preset", metavar="NAME", help=f"MOSE's preset: released or paper [{RunConfig.preset}]")
    table.add_argument(
        "--baselines", metavar="NAME", help="the other methods' preset: table or sources, their own values [table]"
    )
    table.add_argument("--methods", metavar="A,B", help="the rows of some methods alone: mose, er, ... [all]")
    table.add_argument("--without", metavar="A,B", help="leave out the rows of some data sets, such as tiny [none]")
    _add_flags(table, [name for name in _FLAGS if name not in _DESCRIBED])
    _add_place(table)
    files = table.add_argument_group("files")
    files.add_argument(
        "--out", metavar="DIR", help="folder for tables and runs; tables in one folder share runs [runs/paper]"
    )
    files.add_argument(
        "--dry-run", action="store_true", help="print the paper's numbers and a forecast of time and memory, then stop"
    )
    _add_wandb(table)

    gather = command("collect", _collect, help="rebuild the table of runs from the run folders")
    gather.add_argument("folder", metavar="DIR", help="folder of a sweep, or any folder above run folders")

    page = command("report", _report, help="one page of tables and figures from many runs")
    page.add_argument("folders", metavar="DIR", nargs="+", help="run folders, or folders that hold some at any depth")
    page.add_argument("--out", metavar="DIR", help="the report's folder [report in the first DIR]")
    page.add_argument(
        "--force", action="store_true", help="put runs of different problems into one table, with a caution"
    )

    export = command(
        "export",
        _export,
        help="write the deployable classifier of a finished run",
        description="Writes the backbone and class means of a finished run, and leaves out what only training needs.",
    )
    export.add_argument("run", metavar="RUN", help="the run's folder")
    export.add_argument("--out", metavar="DIR", help="the export's folder [RUN/export]")
    export.add_argument(
        "--format", metavar="F1,F2", default="safetensors", help="any of safetensors, onnx, torch [safetensors]"
    )
    export.add_argument("--classifier", metavar="NAME", help="last expert's classifier: ncm or linear [the run's own]")
    export.add_argument("--overwrite", action="store_true", help="replace an earlier export in the folder")

    predict = command("predict", _predict, help="classify image files with an export")
    predict.add_argument("export", metavar="EXPORT", help="folder of an export that contains model.safetensors")
    predict.add_argument(
        "images", metavar="IMAGE", nargs="+", help="image files of the size that the run had, or folders of them"
    )
    predict.add_argument("--json", action="store_true", help="print one JSON object a line instead of columns")

    listing = command("list", _list, help="list the methods, the streams or the paper's tables")
    listing.add_argument("what", choices=("methods", "streams", "paper"))
    listing.add_argument("name", nargs="?", metavar="METHOD", help="a method, also FILE.py:NAME: list its switches")

    check = command(
        "check",
        _check,
        help="check whether a method of your own keeps the rules",
        description=(
            "Trains the method for a few seconds on made-up images, on the CPU: state, undoing, planning ahead, random"
            " numbers, and whether a GPU would have to wait (docs/adding_a_method.md)."
        ),
        epilog="example: mose-fast check smooth_er.py:SmoothEr",
    )
    check.add_argument("method", metavar="METHOD", help="path/to/file.py:Name, or the name of an installed method")

    speed = command(
        "bench",
        _bench,
        help="measure what training costs on this machine, beside plain PyTorch",
        argument_default=argparse.SUPPRESS,
        description=(
            "Measures MOSE's step alone and inside the training loop, with PyTorch's own modules (eager, compiled, as a"
            " CUDA graph) and with our kernels, for each feed; then an evaluation and the machine's peak rates. Images"
            " are random. Close other programs first."
        ),
        epilog="example: mose-fast bench --memory 5000; on a CPU: --width 8",
    )
    speed.set_defaults(seconds=2.0, only="", csv=None, traceback=False)
    _add_flags(speed, _BENCHED)
    speed.add_argument("--seconds", type=float, metavar="S", help="seconds for each measurement, after its warm-up [2]")
    speed.add_argument("--only", metavar="TEXT", help="run only the measurements whose names contain this text")
    speed.add_argument("--csv", metavar="FILE", help="also write the rows to this file")
    speed.add_argument("--traceback", action="store_true", help="print where a measurement failed, too")

    doctor = command("doctor", _doctor, help="check what this machine has, what is missing and how to install it")
    doctor.add_argument("--data-dir", metavar="DIR", help="folder with the data sets' files [~/.cache/mose_fast]")
    doctor.add_argument(
        "--check", action="store_true", help="check the native library's kernels on the cards here anew, and keep that"
    )
    return parser


def _add_flags(parser: argparse.ArgumentParser, names: Collection[str] = tuple(_FLAGS)) -> None:
    """The flags of some settings, by default of all that have one, and ``--set``."""
    parser.set_defaults(flags=names)
    for role, title in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            setting = _FLAGS[name]
            if setting.role != role:
                continue
            if setting.type == "bool":
                how: dict[str, Any] = {"action": "store_true", "help": setting.meaning}
            else:
                default = setting.none if setting.default is None else setting.default
                kind, metavar = {"int": (int, "N"), "float": (float, "X"), "str": (str, "NAME")}[setting.type]
                how = {"type": kind, "metavar": "DIR" if name.endswith("_dir") else metavar}
                how["help"] = f"{setting.meaning} [{default}]".replace("%", "%%")
            group.add_argument(f"--{setting.flag}", dest=name, **how)
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        help=(
            "any other setting; may be repeated: augment=simclr, options.student=2, evaluation_batch=64,"
            " per_class_cap=null (docs/settings.md lists all)"
        ),
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where the runs of a sweep compute."""
    place = parser.add_argument_group("parallel runs")
    place.add_argument("--workers", type=int, metavar="N", help="runs at a time on the CPU; they share its cores")
    place.add_argument("--per-gpu", type=int, metavar="N", help="runs at a time on each card [1]")
    place.add_argument(
        "--mps",
        action="store_true",
        help="runs on one card compute at the same time, by a server of CUDA's MPS that is started for them",
    )
    place.add_argument("--gpus", metavar="0,1", help="cards to use, numbered as in CUDA_VISIBLE_DEVICES [all]")
    place.add_argument("--engine", metavar="NAME", help="local, or ray to use a Ray cluster [local]")
    place.add_argument("--address", metavar="HOST:PORT", help="Ray cluster; auto finds it, local starts one [auto]")


def _place(arguments: argparse.Namespace) -> Place:
    from mose_fast.experiments.place import Place

    given = vars(arguments)
    return Place(
        given.get("workers"),
        given.get("per_gpu"),
        tuple(given["gpus"].split(",")) if "gpus" in given else None,
        given.get("engine", "local"),
        given.get("address", "auto"),
        given.get("mps", False),
    )


def _add_wandb(parser: argparse.ArgumentParser) -> None:
    meaning = "also log to this project of Weights & Biases (install mose-fast[wandb])"
    parser.add_argument("--wandb", metavar="PROJECT", default=argparse.SUPPRESS, help=meaning)


def read_settings(arguments: argparse.Namespace) -> RunConfig:
    """Builds the configuration that the arguments of ``run`` ask for: the ``--config`` file,
    overridden by flags, overridden by ``--set``.

    Where a flag names another method or preset than the file, the options that the file changes
    from its own preset are kept. Paths become absolute, so that the run can be resumed from any
    folder.

    Raises:
        ConfigError: A name is unknown, a value is out of range, or the file cannot be used.
    """
    given = vars(arguments)
    loaded = RunConfig.load(given["config"]) if "config" in given else None
    return with_absolute_paths(with_changes(loaded, _changes(arguments, loaded)))


def _changes(
    arguments: argparse.Namespace, base: RunConfig | None, methods: Sequence[str] | None = None
) -> dict[str, Any]:
    """The settings that flags and ``--set`` change, by dotted name: of ``methods``, else of the
    one that is run.
    """
    given = vars(arguments)
    changes = {name: setting.check(given[name]) for name, setting in _FLAGS.items() if name in given}
    assigned = [assignment(text, "--set") for text in given.get("set", [])]
    method = dict(assigned).get("method", changes.get("method", base.method if base else RunConfig.method))
    known = {name: setting for one in methods or [method] for name, setting in all_settings(one).items()}
    for name, text in assigned:
        setting = full_name(name, known, "--set")
        changes[setting] = read_value(known[setting], text)
    return changes


def _run(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments)
    from mose_fast import train

    given = vars(arguments)
    out = Path(given["out"]) if "out" in given else _default_folder(config)
    listeners = _loggers(arguments, out)
    how = {"out": out, "overwrite": given.get("overwrite", False), "whole_process": True}
    return _follow(out, lambda shown: train.run(config, **how, listeners=[shown, *listeners]))


def _resume(arguments: argparse.Namespace) -> int:
    out = Path(arguments.folder)
    RunFolder(out).check_resumable()
    from mose_fast import train

    listeners = _loggers(arguments, out)
    return _follow(out, lambda shown: train.resume(out, listeners=[shown, *listeners], whole_process=True))


def _loggers(arguments: argparse.Namespace, out: Path) -> list[Listener]:
    project = vars(arguments).get("wandb")
    if project is None:
        return []
    from mose_fast.runs.weights_and_biases import WeightsAndBiases

    return [WeightsAndBiases(project, out)]


def _sweep(arguments: argparse.Namespace) -> int:
    from mose_fast.experiments.grid import Grid, axes_of, read_axes, read_file, read_seeds
    from mose_fast.experiments.sweep import run_grid
    from mose_fast.runs.store import STORE

    given = vars(arguments)
    values, table = read_file(given["file"]) if "file" in given else ({}, {})
    base = RunConfig.from_dict(values) if values else None
    changes = _changes(arguments, base)
    texts = given.get("grid", [])
    varied = {"method": table.get("method", ())} | dict(
        assignment(text, "--grid") for text in texts if text.startswith("method=")
    )
    methods = varied["method"].split(",") if isinstance(varied["method"], str) else list(varied["method"])
    methods = methods or [changes.get("method", base.method if base else RunConfig.method)]
    axes = {**axes_of(table, methods, "[grid]"), **read_axes(texts, methods)}
    if "seeds" in given:
        if "seed" in axes:
            raise ConfigError("--seeds and a grid over seed are both given; wanted all seeds together, in one of them")
        axes["seed"] = read_seeds(given["seeds"])
    out = Path(given["out"])
    grid = Grid(axes, changes, base)
    try:
        outcome = run_grid(grid, out, _place(arguments), dry_run=given.get("dry_run", False), wandb=given.get("wandb"))
    except KeyboardInterrupt as error:
        return _interrupted(error, "; to continue, run the same command again")
    if outcome.table is not None:
        print(f"table     {out / STORE}")
        _caution(outcome.table)
    return 1 if outcome.failures else 0


def _caution(table: pandas.DataFrame) -> None:
    """Says what differs in the code and the machines that computed the runs of a table."""
    from mose_fast.present.statistics import code_warnings

    for warning in code_warnings(table.to_dict("records")):
        print(f"mose-fast: caution: {warning}", file=sys.stderr)


def _tune(arguments: argparse.Namespace) -> int:
    from mose_fast.experiments.grid import read_seeds
    from mose_fast.experiments.tune import tune

    given = vars(arguments)
    changes = _changes(arguments, None)
    method = changes.pop("method", RunConfig.method)
    stream = Path(changes.get("stream.name", StreamConfig.name)).stem
    try:
        tune(
            method,
            trials=given["trials"],
            out=given.get("out", Path("runs") / f"tune-{stream}-{Path(method).stem}"),
            space=given.get("space"),
            seeds=read_seeds(given.get("seeds", "0-1")),
            changes=changes,
            place=_place(arguments),
            dry_run=given.get("dry_run", False),
        )
    except KeyboardInterrupt as error:
        return _interrupted(error, "; to continue, run the same command again")
    return 0


def _paper(arguments: argparse.Namespace) -> int:
    from mose_fast.experiments.grid import read_seeds
    from mose_fast.experiments.paper.reproduce import ALL, run_table
    from mose_fast.experiments.paper.rows import DEFAULT_PRESETS
    from mose_fast.present.published import BASELINES

    given = vars(arguments)
    changes = _changes(arguments, None, [*BASELINES, RunConfig.method])
    preset = changes.pop("preset", RunConfig.preset)
    try:
        page, failures = run_table(
            given["name"],
            given.get("out", Path("runs") / "paper"),
            seeds=read_seeds(given.get("seeds", "0-2")),
            preset=preset,
            baselines=given.get("baselines", DEFAULT_PRESETS.baselines),
            methods=given["methods"].split(",") if "methods" in given else None,
            without=given["without"].split(",") if "without" in given else (),
            changes=changes,
            place=_place(arguments),
            dry_run=given.get("dry_run", False),
            wandb=given.get("wandb"),
        )
    except KeyboardInterrupt as error:
        return _interrupted(error, "; to continue, run the same command again")
    if page is not None:
        print(f"{'page' if given['name'] == ALL else 'table':<9} {page}")
    return 1 if failures else 0


def _interrupted(error: KeyboardInterrupt, further: str = "") -> int:
    """Prints what ended the command; returns a shell's exit code for a death by that signal."""
    number = getattr(error, "number", signal.SIGINT)
    what = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    print(f"mose-fast: {what}{further}", file=sys.stderr)
    return 128 + number


def _lost(shown: Guarded, needed: bool) -> int:
    """Says if standard output failed; returns the exit code, 0 unless the output was ``needed``."""
    shown.flush()
    if shown.failure is None:
        return 0
    if shown.failure.errno != errno.EPIPE:
        told = "" if needed else "; the results are saved in files"
        print(f"mose-fast: standard output cannot be written: {shown.failure.strerror}{told}", file=sys.stderr)
    elif needed:
        return 128 + signal.SIGPIPE
    return 2 if needed else 0


def _collect(arguments: argparse.Namespace) -> int:
    check_folders([arguments.folder])
    from mose_fast.runs.store import STORE, collect

    table, skipped = collect(arguments.folder)
    for line in skipped:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"{len(table)} runs in {Path(arguments.folder) / STORE}, {len(skipped)} folders skipped")
    _caution(table)
    return 0


def _follow(out: Path, start: Callable[[Progress], dict[str, Any]]) -> int:
    """Calls ``start(listener)``, shows its progress and, at the end, its results."""
    from mose_fast.runs.clock import PHASES
    from mose_fast.runs.files import RunFolder
    from mose_fast.runs.progress import Progress
    from mose_fast.runs.results import summary

    progress = Progress(out)
    try:
        results = start(progress)
    except KeyboardInterrupt as error:
        again = f"; to continue: mose-fast resume {shlex.quote(str(out))}"
        return _interrupted(error, again if progress.started else " before the first batch")
    seconds = results["seconds"]
    folder = RunFolder(out)
    print(f"\n{summary(results)}\n")
    parts = ", ".join(f"{part} {seconds[part]:.1f}" for part in (*PHASES, "other") if seconds[part] > 0)
    since = "the process started" if seconds["wall_since"] == "process" else "the call"
    print(f"time      {seconds['wall']:.1f} s since {since}: {parts}")
    peak = results["peak_memory_bytes"]
    card = "" if peak["device"] is None else f", {peak['device'] / 2**20:,.0f} MiB on the card (allocated by torch)"
    print(f"memory    at most {peak['host'] / 2**20:,.0f} MiB on the host{card}")
    kept = results["kept"]
    beside = f", and {kept['bytes_beside'] / 2**20:.1f} MiB beside" if kept["bytes_beside"] else ""
    print(f"kept      at most {kept['images']:,} images of the stream, {kept['bytes'] / 2**20:.1f} MiB{beside}")
    print(f"results   {folder.results}")
    print(
        f"          {folder.accuracy.name}, {folder.figure.name}, {folder.config.name} and {folder.events.name}/"
        " beside it"
    )
    return 0


def _report(arguments: argparse.Namespace) -> int:
    check_folders(arguments.folders)
    from mose_fast.present.report import write_report

    page, skipped = write_report(arguments.folders, arguments.out, force=arguments.force)
    for folder, reason in skipped:
        print(f"left out: {folder}: {reason}", file=sys.stderr)
    print(page)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    if reason := RunFolder(arguments.run).unfinished:
        raise RunError(f"{arguments.run}: {reason}")
    from mose_fast.export import CARD, export_run

    folder = export_run(
        arguments.run,
        arguments.out,
        formats=arguments.format.split(","),
        classifier=arguments.classifier,
        overwrite=arguments.overwrite,
    )
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    parameters, sizes = card["parameters"], card["bytes"]
    head = "class means" if card["head"] == "ncm" else f"{card['head']} head"
    print(
        f"backbone  {parameters['backbone']:,} parameters, {sizes['backbone']:,} bytes; {head} of"
        f" {len(card['class_order'])} classes, {sizes['head']:,} bytes\naccuracy  {100 * card['accuracy']:.1f} % (ACC"
        " of the run)"
    )
    for name in (*card["files"], CARD):
        print(folder / name)
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    read_card(Path(arguments.export))
    from mose_fast.export import Classifier, classify_files

    failures = 0

    def unusable(error: MoseFastError) -> None:
        nonlocal failures
        failures += 1
        print(f"mose-fast: {error}", file=sys.stderr)

    for found in classify_files(Classifier.load(arguments.export), arguments.images, unusable):
        if arguments.json:
            print(json.dumps(found))
        else:
            margin = "-" if found["margin"] is None else f"{found['margin']:.4f}"
            print(found["path"], found["name"], found["label"], margin, sep="\t")
    return 2 if failures else 0


def _check(arguments: argparse.Namespace) -> int:
    from mose_fast.app.check import check_method

    broken = 0
    for rule, problem in check_method(arguments.method):
        broken += problem is not None
        print(
            f"{'ok    ' if problem is None else 'broken'}  {rule}{'' if problem is None else f': {problem}'}",
            flush=True,
        )
    return 1 if broken else 0


def _list(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        if arguments.what != "methods":
            raise ConfigError(f"list {arguments.what} has no names; wanted list methods {arguments.name}")
        own = {name: s for name, s in all_settings(arguments.name).items() if name.startswith("options.")}
        rows = [(n.removeprefix("options."), f"{as_text(s.default)}  {s.full_meaning}") for n, s in own.items()]
    elif arguments.what == "methods":
        from mose_fast.methods import find_method, method_names

        abouts = {name: find_method(name).about for name in sorted(method_names())}
        rows = [
            (name, f"{a.year}  {a.cost:5.2f}x  {a.reference} (presets {', '.join(a.presets)})")
            for name, a in abouts.items()
        ]
        rows.append(
            ("file.py:Name", "a method of your own: docs/adding_a_method.md; 2x: a step costs twice as much as ER's")
        )
    elif arguments.what == "paper":
        from mose_fast.experiments.paper.tables import TABLES, describe

        rows = [(name, describe(name).title) for name in TABLES]
    else:
        rows = [(name, streams.summary(name)) for name in streams.names()]
        rows.append(("a folder or .npz", "your own images: docs/own_data.md"))
    width = max(len(name) for name, _ in rows)
    for name, meaning in rows:
        print(f"{name:<{width}}  {meaning}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from mose_fast.app.bench import benchmark

    report = benchmark(
        read_settings(arguments),
        seconds=arguments.seconds,
        only=arguments.only,
        watch=lambda name: print(f"... {name}", file=sys.stderr),
    )
    print(report.text())
    for name, trace in report.failures.items() if arguments.traceback else ():
        print(f"\n{name} failed:\n{trace}", file=sys.stderr)
    if arguments.csv is not None:
        Path(arguments.csv).write_text(report.table(), encoding="utf-8")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from mose_fast.app.doctor import check_kernels, diagnose, report, rows_of_check

    if arguments.check:
        verdicts = check_kernels()
        for name, verdict in verdicts:
            print(f"{name}\n{rows_of_check(verdict)}")
        if not verdicts:
            print("there is no card that the native library has kernels for; mose-fast doctor says why")
        return int(any(verdict.state != "passed" for _, verdict in verdicts))
    findings = diagnose(arguments.data_dir)
    print(report(findings))
    return 1 if any(finding.mark == "FAIL" for finding in findings) else 0


def _default_folder(config: RunConfig) -> Path:
    stream, method = Path(config.stream.name).stem, Path(config.method).stem
    return Path("runs") / f"{stream}-{method}-{config.preset}-m{config.memory}-s{config.seed}"


def _show_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
    tqdm.write(f"warning: {message}", file=sys.stderr)
