"""The loop, checkpoints, results."""

from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names
from mose_fast.runs.files import RunError
from mose_fast.signals import Interrupted

if TYPE_CHECKING:
    from mose_fast.runs.checkpoint import CheckpointError
    from mose_fast.runs.listeners import Listener, TensorBoard
    from mose_fast.train.loop import TrainingDiverged
    from mose_fast.train.start import resume, run

__all__ = ["CheckpointError", "Interrupted", "Listener", "RunError", "TensorBoard", "TrainingDiverged", "resume", "run"]

# These need torch; the refusal of a folder without a run does not.
__getattr__ = lazy_names(
    __name__,
    {
        "CheckpointError": "mose_fast.runs.checkpoint",
        "Listener": "mose_fast.runs.listeners",
        "TensorBoard": "mose_fast.runs.listeners",
        "TrainingDiverged": "mose_fast.train.loop",
        "resume": "mose_fast.train.start",
        "run": "mose_fast.train.start",
    },
)
