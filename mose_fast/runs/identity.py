"""Whether a checkpoint belongs to a run: to its settings, its data and its code."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from mose_fast.learner.named_settings import all_settings, dotted
from mose_fast.learner.registry import method_changes
from mose_fast.learner.saved import machine_changes, told_code
from mose_fast.runs.files import RunError
from mose_fast.settings.run import RunConfig


def check_identity(found: dict[str, Any], wanted: dict[str, Any], checkpoint: Path) -> None:
    """Raises RunError for another run's checkpoint, and warns if the machine is another one."""
    folder = checkpoint.parent.parent
    afresh = f"start the run again with: mose-fast run --config {folder / 'config.json'} --out {folder} --overwrite"
    # A setting that is newer than the checkpoint has its preset's value.
    before, now = dotted(RunConfig.from_dict(found["config"]).to_dict()), dotted(wanted["config"])
    settings = all_settings(now["method"])
    # The device belongs to the machine, which is compared below.
    free = {"device", *(name for name, setting in settings.items() if setting.role == "bookkeeping")}
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name) and name not in free]
    if os.sep in before["stream.name"] and os.sep in now["stream.name"] and "stream.fingerprint" not in differing:
        differing = [name for name in differing if name != "stream.name"]  # the same data, in another place
    if differing:
        shown = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r} now" for name in differing[:5])
        raise RunError(
            f"the checkpoint {checkpoint} does not belong to the configuration beside it: {shown}. Change it back, or"
            f" {afresh}"
        )
    if found["code"] != wanted["code"]:
        raise RunError(
            f"the checkpoint {checkpoint} was written by other code (mose-fast {told_code(found)}) than the code that"
            f" is running ({told_code(wanted)}), and the results would mix the two; continue with that code, or"
            f" {afresh}"
        )
    if edited := method_changes(found["method_files"], wanted["method_files"]):
        raise RunError(
            f"the checkpoint {checkpoint} was written by another version of the method ({edited}), and the results"
            f" would mix the two; put the earlier file back, or {afresh}"
        )
    if changes := machine_changes(found["machine"], wanted["machine"]):
        warnings.warn(
            f"{changes}: the last digits of the results will differ from those of an uninterrupted run", stacklevel=2
        )
