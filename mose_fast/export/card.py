"""The card of an export, which describes it; to read it, torch is not imported."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from mose_fast.runs.files import RunError, RunFolder, is_configuration

#: Version of the export format; a reader refuses newer ones.
FORMAT = 1

#: The file that describes an export. While the models are written it says that the export is
#: unfinished.
CARD = "card.json"

#: The model's file by format.
MODELS = {"safetensors": "model.safetensors", "onnx": "model.onnx", "torch": "model.pt2"}

#: The folder of an export in that of its run, where none is given.
USUAL = "export"


class ExportError(RunError):
    """A run cannot be exported or an export used; the message says why and what to do."""


def stored_card(folder: Path) -> dict[str, Any] | None:
    """The card of an export of any version in a folder; None where there is none."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return card if isinstance(card, dict) and type(card.get("mose_fast_export")) is int else None


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a complete export of a version that can be read; ExportError if there is none."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ExportError(_no_export(folder)) from error
    except NotADirectoryError as error:
        raise ExportError(f"{folder} is a file; wanted the folder of an export") from error
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is truncated or no JSON ({error}); export the run again") from error
    found = card.get("mose_fast_export") if isinstance(card, dict) else None
    if type(found) is not int:
        raise ExportError(f"{path} is not the card of an export of mose-fast")
    if found > FORMAT:
        raise ExportError(
            f"{path} has format {found}; this version of mose-fast reads {FORMAT} and older: update mose-fast"
        )
    if "unfinished" in card:
        raise ExportError(
            f"the export in {folder} was broken off; make it again with: mose-fast export RUN --out {folder}"
        )
    return card


def _no_export(folder: Path) -> str:
    if not is_configuration(RunFolder(folder).config):
        return f"there is no export in {folder} (no {CARD}); make one with: mose-fast export RUN --out {folder}"
    usual = folder / USUAL
    if (usual / CARD).is_file():
        return f"{folder} is the folder of a run; wanted that of its export, {usual}"
    command = f"mose-fast export {shlex.quote(str(folder))}"
    return f"{folder} is the folder of a run without an export; make one with: {command}; then name {usual}"
