"""``mose-fast list``: methods, streams, tables."""

from __future__ import annotations

import argparse

from mose_fast import streams
from mose_fast.app.flags import command
from mose_fast.learner.named_settings import all_settings
from mose_fast.settings.knob import as_text
from mose_fast.settings.run import ConfigError


def add(commands: argparse._SubParsersAction) -> None:
    listing = command(
        commands, "list", _act, prints_result=True, help="list the methods, the streams or the paper's tables"
    )
    listing.add_argument("what", choices=("methods", "streams", "paper"))
    listing.add_argument("name", nargs="?", metavar="METHOD", help="a method, also FILE.py:NAME: list its switches")


def _act(arguments: argparse.Namespace) -> int:
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
