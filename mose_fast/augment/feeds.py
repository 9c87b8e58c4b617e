"""Chooses the back end that makes the views: DALI, the native op or plain PyTorch. All make the
same pixels from the same parameters.
"""

from __future__ import annotations

import torch

from mose_fast import _dali
from mose_fast.device import Choice
from mose_fast.ops.augment_parameters import Recipe
from mose_fast.settings.run import ConfigError

__all__ = ["choose_feed"]


def choose_feed(wanted: str, device: torch.device, recipe: Recipe | None) -> Choice:
    """The back end that the setting ``feed`` (``auto``, ``dali``, ``fused`` or ``torch``) means on
    a device. Raises ConfigError if DALI is asked for and cannot be used.

    ``auto`` is ``dali`` on CUDA if DALI can be imported, else ``fused``. For recipes with colour
    jitter ``fused`` replaces ``dali``: DALI rotates hues in another colour space (YIQ, not HSV), so
    its pixels would differ.
    """
    if wanted == "auto" and device.type != "cuda":
        return Choice("fused")
    if wanted in ("auto", "dali"):
        obstacle = _dali.obstacle()
        if obstacle and wanted == "dali":
            raise ConfigError(f"feed is 'dali', but {obstacle}; wanted: {_dali.INSTALL}, or feed fused")
        if obstacle:
            return Choice("fused", f"{obstacle}: {_dali.INSTALL}")
        if recipe is not None and recipe.jitter_p > 0:
            return Choice("fused", "not dali, whose colour jitter gives other pixels")
        return Choice("dali")
    return Choice(wanted)
