"""``mose-fast predict``: classify images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mose_fast.app.flags import command
from mose_fast.errors import MoseFastError
from mose_fast.export.card import read_card


def add(commands: argparse._SubParsersAction) -> None:
    predict = command(commands, "predict", _act, prints_result=True, help="classify image files with an export")
    predict.add_argument("export", metavar="EXPORT", help="folder of an export that contains model.safetensors")
    predict.add_argument(
        "images", metavar="IMAGE", nargs="+", help="image files of the size that the run had, or folders of them"
    )
    predict.add_argument("--json", action="store_true", help="print one JSON object a line instead of columns")


def _act(arguments: argparse.Namespace) -> int:
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
