"""Which run a checkpoint belongs to: its settings, its data and the code that wrote it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from mose_fast import _loader
from mose_fast._build_info import build_info, code_hash
from mose_fast.config import RunConfig, upgraded
from mose_fast.methods import Learner
from mose_fast.settings import all_settings, dotted
from mose_fast.train.files import RunError

__all__ = ["check_identity", "identity"]


def identity(config: RunConfig, learner: Learner) -> dict[str, Any]:
    """What a checkpoint notes about its run, as plain values."""
    build = build_info()
    return {
        "config": config.to_dict(),
        "code": code_hash(type(learner)),
        "version": build["version"],
        "commit": build["commit"],
        "machine": {
            "torch": torch.__version__,
            "device": learner.device.type,
            "threads": torch.get_num_threads(),
            "native code that the self-check switched off": _off(learner),
        },
    }


def _off(learner: Learner) -> str:
    return "none" if learner.self_check is None or not _loader.off else ", ".join(sorted(_loader.off))


def check_identity(found: dict[str, Any] | None, wanted: dict[str, Any], checkpoint: Path) -> None:
    """Refuses the checkpoint of another run, and warns if the machine is another one.

    Args:
        found: The identity in the checkpoint; None if an old version stored none.
        wanted: The identity of the run that continues.
        checkpoint: The checkpoint's file, for messages.

    Raises:
        RunError: The settings, the data or the code differ; the message says which.
    """
    folder = checkpoint.parent.parent
    afresh = f"start the run again with: mose-fast run --config {folder / 'config.json'} --out {folder} --overwrite"
    if found is None:
        raise RunError(
            f"the checkpoint {checkpoint} was written by a version of mose-fast that did not record which run it"
            f" belongs to; continue with that version, or {afresh}"
        )
    # A setting that is newer than the checkpoint has its preset's value.
    before, now = dotted(RunConfig.from_dict(upgraded(found["config"])).to_dict()), dotted(wanted["config"])
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
        versions = [f"{each['version']}, commit {each['commit'] or 'unknown'}" for each in (found, wanted)]
        raise RunError(
            f"the checkpoint {checkpoint} was written by other code (mose-fast {versions[0]}) than the code that is"
            f" running ({versions[1]}), and the results would mix the two; continue with that code, or {afresh}"
        )
    before, now = found["machine"], wanted["machine"]
    differing = [f"{name} was {before[name]} and is {now[name]} now" for name in now if before[name] != now[name]]
    if differing:
        warnings.warn(
            f"{'; '.join(differing)}: the last digits of the results will differ from those of an uninterrupted run",
            stacklevel=2,
        )
