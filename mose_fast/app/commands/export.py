"""``mose-fast export``: the deployable classifier."""

from __future__ import annotations

import argparse
import json

from mose_fast.app.flags import command
from mose_fast.runs.files import RunError, RunFolder


def add(commands: argparse._SubParsersAction) -> None:
    export = command(
        commands,
        "export",
        _act,
        help="write the deployable classifier of a finished run",
        description="Writes the backbone and class means of a finished run, and leaves out what only training needs.",
    )
    export.add_argument("run", metavar="RUN", help="the run's folder")
    export.add_argument("--out", metavar="DIR", help="the export's folder [RUN/export]")
    export.add_argument(
        "--format", metavar="F1,F2", default="safetensors", help="any of safetensors, onnx, torch [safetensors]"
    )
    export.add_argument("--classifier", metavar="NAME", help="what classifies: ncm, linear, lda, ... [the run's own]")
    export.add_argument(
        "--expert", metavar="NAME", help="last, mean or all [last with --classifier, else the run's own]"
    )
    export.add_argument("--overwrite", action="store_true", help="replace an earlier export in the folder")


def _act(arguments: argparse.Namespace) -> int:
    if reason := RunFolder(arguments.run).unfinished:
        raise RunError(f"{arguments.run}: {reason}")
    from mose_fast.export import CARD, export_run

    folder = export_run(
        arguments.run,
        arguments.out,
        formats=arguments.format.split(","),
        classifier=arguments.classifier,
        expert=arguments.expert,
        overwrite=arguments.overwrite,
    )
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    parameters, sizes = card["parameters"], card["bytes"]
    head = "class means" if card["head"] == "ncm" else f"{card['head']} head"
    evaluated = card["accuracy"] is not None
    accuracy = f"{100 * card['accuracy']:.1f} % (ACC of the run)" if evaluated else "not evaluated in the run"
    print(
        f"backbone  {parameters['backbone']:,} parameters, {sizes['backbone']:,} bytes; {head} of"
        f" {len(card['class_order'])} classes, {sizes['head']:,} bytes\naccuracy  {accuracy}"
    )
    for name in (*card["files"], CARD):
        print(folder / name)
    return 0
