"""The training loop of a run."""

from mose_fast.runs.checkpoint import CheckpointError
from mose_fast.runs.files import RunError
from mose_fast.runs.listeners import Listener, TensorBoard
from mose_fast.signals import Interrupted
from mose_fast.train.loop import TrainingDiverged
from mose_fast.train.start import resume, run

__all__ = ["CheckpointError", "Interrupted", "Listener", "RunError", "TensorBoard", "TrainingDiverged", "resume", "run"]
