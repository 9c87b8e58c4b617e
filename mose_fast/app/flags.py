"""Flags that several commands have, and the settings that they give."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mose_fast.learner.named_settings import (
    all_settings,
    assignment,
    full_name,
    read_value,
    with_absolute_paths,
    with_changes,
)
from mose_fast.settings.knob import settings_of, usual_name
from mose_fast.settings.run import RunConfig, StreamConfig

if TYPE_CHECKING:
    from mose_fast.experiments.place import Place
    from mose_fast.runs.listeners import Listener

# Titles of the groups of flags, by the role of the settings.
_GROUPS = {
    "problem": "what is learned",
    "method": "how",
    "execution": "where and how fast",
    "bookkeeping": "data files and checkpoints",
}
# Settings of a run that have a flag, by dotted name.
FLAGS = {
    name: setting for name, setting in {**settings_of(StreamConfig), **settings_of(RunConfig)}.items() if setting.flag
}


class Parser(argparse.ArgumentParser):
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
        named |= {name: f"--{known.flag}" for name, known in FLAGS.items() if f"--{known.flag}" in flags}
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


def command(
    commands: argparse._SubParsersAction,
    name: str,
    act: Callable[[argparse.Namespace], int],
    *,
    prints_result: bool = False,
    **how: Any,
) -> argparse.ArgumentParser:
    """Adds a command, which ``act`` carries out and returns the exit code of. ``prints_result``:
    what it prints is its result, which no file has. ``how``: arguments of the parser.
    """
    made = commands.add_parser(name, allow_abbrev=False, **how)
    made.set_defaults(act=act, prints_result=prints_result)
    return made


def add_flags(parser: argparse.ArgumentParser, names: Collection[str] = tuple(FLAGS)) -> None:
    """The flags of some settings, by default of all that have one, and ``--set``."""
    parser.set_defaults(flags=names)
    for role, title in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            setting = FLAGS[name]
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


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where runs compute, to a command that continues unfinished ones."""
    parser.set_defaults(again="; to continue, run the same command again")
    place = parser.add_argument_group("parallel runs")
    place.add_argument("--workers", type=int, metavar="N", help="runs at a time on the CPU; they share its cores")
    place.add_argument("--per-gpu", type=int, metavar="N", help="runs at a time on each GPU [1]")
    place.add_argument(
        "--mps",
        action="store_true",
        help="runs on one GPU compute at the same time, by a server of CUDA's MPS that is started for them",
    )
    place.add_argument("--gpus", metavar="0,1", help="GPUs to use, numbered as in CUDA_VISIBLE_DEVICES [all]")
    place.add_argument("--engine", metavar="NAME", help="local, or ray to use a Ray cluster [local]")
    place.add_argument("--address", metavar="HOST:PORT", help="Ray cluster; auto finds it, local starts one [auto]")


def place(arguments: argparse.Namespace) -> Place:
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


def add_wandb(parser: argparse.ArgumentParser) -> None:
    meaning = "also log to this project of Weights & Biases (install mose-fast[wandb])"
    parser.add_argument("--wandb", metavar="PROJECT", default=argparse.SUPPRESS, help=meaning)


def loggers(arguments: argparse.Namespace, out: Path) -> list[Listener]:
    project = vars(arguments).get("wandb")
    if project is None:
        return []
    from mose_fast.runs.weights_and_biases import WeightsAndBiases

    return [WeightsAndBiases(project, out)]


def read_settings(arguments: argparse.Namespace) -> RunConfig:
    """Builds the configuration that the arguments of ``run`` ask for: the ``--config`` file,
    overridden by flags, overridden by ``--set``; ConfigError if one of them cannot be used.

    Where a flag names another method or preset than the file, the options that the file changes
    from its own preset are kept. Paths become absolute, so that the run can be resumed from any
    folder.
    """
    given = vars(arguments)
    loaded = RunConfig.load(given["config"]) if "config" in given else None
    return with_absolute_paths(with_changes(loaded, changes_of(arguments, loaded)))


def changes_of(
    arguments: argparse.Namespace, base: RunConfig | None, methods: Sequence[str] | None = None
) -> dict[str, Any]:
    """What flags and ``--set`` change, by dotted name, of ``methods`` or the one that is run."""
    given = vars(arguments)
    # Numbers are checked here, before a method is asked for, which needs torch; names have hints.
    changes = {
        name: setting.check(given[name]) if setting.type in ("int", "float") else given[name]
        for name, setting in FLAGS.items()
        if name in given
    }
    assigned = [assignment(text, "--set") for text in given.get("set", [])]
    method = dict(assigned).get("method", changes.get("method", base.method if base else RunConfig.method))
    known = {name: setting for one in methods or [method] for name, setting in all_settings(one).items()}
    for name, text in assigned:
        setting = full_name(name, known, "--set")
        changes[setting] = read_value(known[setting], text)
    return changes
