"""Searches the settings of a method on held-out training images (docs/tuning.md)."""

from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names

if TYPE_CHECKING:
    from mose_fast.experiments.tune.tuning import Tuned, tune

__all__ = ["Tuned", "tune"]

# It needs torch; the command line's help does not.
__getattr__ = lazy_names(__name__, dict.fromkeys(("Tuned", "tune"), "mose_fast.experiments.tune.tuning"))
