"""Accuracy matrices and what is computed from them; evaluation of a learner in one pass."""

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
from mose_fast.evaluate.one_pass import TaskAccuracy, evaluate_learner

__all__ = [
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
