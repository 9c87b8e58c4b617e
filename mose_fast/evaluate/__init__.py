"""Accuracy matrices and what is computed from them; evaluation of a learner in one pass."""

from typing import TYPE_CHECKING

from mose_fast._lazy import lazy_names
from mose_fast.evaluate.metrics import (
    average_accuracy,
    average_anytime_accuracy,
    backward_transfer,
    buffer_overfitting,
    forgetting_paper,
    forgetting_released,
    new_task_accuracy,
    running_accuracy,
)

if TYPE_CHECKING:
    from mose_fast.evaluate.anytime import AnytimeSample
    from mose_fast.evaluate.one_pass import TaskAccuracy, evaluate_learner

__all__ = [
    "AnytimeSample",
    "TaskAccuracy",
    "average_accuracy",
    "average_anytime_accuracy",
    "backward_transfer",
    "buffer_overfitting",
    "evaluate_learner",
    "forgetting_paper",
    "forgetting_released",
    "new_task_accuracy",
    "running_accuracy",
]

# Evaluating needs torch; computing with accuracies does not.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AnytimeSample": "mose_fast.evaluate.anytime",
        "TaskAccuracy": "mose_fast.evaluate.one_pass",
        "evaluate_learner": "mose_fast.evaluate.one_pass",
    },
)
