"""The loop, checkpoints, results."""

from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names
from mose_fast.signals import Interrupted
from mose_fast.train.files import RunError

if TYPE_CHECKING:
    from mose_fast.train.checkpoint import CheckpointError
    from mose_fast.train.listeners import Listener, TensorBoard
    from mose_fast.train.loop import TrainingDiverged
    from mose_fast.train.start import resume, run

__all__ = ["CheckpointError", "Interrupted", "Listener", "RunError", "TensorBoard", "TrainingDiverged", "resume", "run"]

# These need torch; the refusal of a folder without a run does not.
__getattr__ = lazy_names(
    __name__,
    {
        "CheckpointError": "mose_fast.train.checkpoint",
        "Listener": "mose_fast.train.listeners",
        "TensorBoard": "mose_fast.train.listeners",
        "TrainingDiverged": "mose_fast.train.loop",
        "resume": "mose_fast.train.start",
        "run": "mose_fast.train.start",
    },
)
