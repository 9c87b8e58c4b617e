"""Metrics of an accuracy matrix (docs/specification/mose.md section 8; paper, appendix on
evaluation metrics).

A matrix is float [T, T] with ``matrix[k, j]`` the accuracy on task j after task k, in [0, 1];
entries with j > k are 0. For a stream without task boundaries it is [P, 1], the accuracy on the
classes seen after each of P parts, and only the mean and the running accuracy are defined. All
functions take whatever NumPy can convert to such a matrix, and do not change it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mose_fast.settings.knob import MASKED, is_masked

__all__ = [
    "average_accuracy",
    "average_anytime_accuracy",
    "backward_transfer",
    "buffer_overfitting",
    "forgetting_paper",
    "forgetting_released",
    "new_task_accuracy",
    "running_accuracy",
]


def _numbers(values: ArrayLike, what: str) -> NDArray[np.float64]:
    if is_masked(values):
        raise ValueError(f"{what} is {MASKED}")
    return np.asarray(values, np.float64)


def _matrix(values: ArrayLike, *, boundaries: bool = True) -> NDArray[np.float64]:
    matrix = _numbers(values, "an accuracy matrix")
    column = not boundaries and matrix.shape[1:] == (1,)
    if matrix.ndim != 2 or (matrix.shape[0] != matrix.shape[1] and not column) or matrix.size == 0:
        wanted = "[T, T]" if boundaries else "[T, T], or [P, 1] without task boundaries,"
        raise ValueError(f"an accuracy matrix has shape {matrix.shape}; wanted {wanted} with T of at least 1")
    return matrix


def average_accuracy(matrix: ArrayLike) -> float:
    """ACC: the mean over all tasks of the accuracy after the last one."""
    return float(_matrix(matrix, boundaries=False)[-1].mean())


def forgetting_paper(matrix: ArrayLike) -> float:
    """AF of the paper: mean over the first T - 1 tasks of (best accuracy before the last task -
    accuracy after it). 0 for one task.
    """
    a = _matrix(matrix)
    return float((a[:-1].max(axis=0) - a[-1])[:-1].mean()) if len(a) > 1 else 0.0


def forgetting_released(matrix: ArrayLike) -> float:
    """AF of the released code: mean over all T tasks of (best accuracy ever, the last included -
    accuracy after the last).
    """
    a = _matrix(matrix)
    return float((a.max(axis=0) - a[-1]).mean())


def backward_transfer(matrix: ArrayLike) -> float:
    """BWT: mean over the first T - 1 tasks of (accuracy at the end - accuracy just after learning
    it). 0 for one task.
    """
    a = _matrix(matrix)
    return float((a[-1] - a.diagonal())[:-1].mean()) if len(a) > 1 else 0.0


def new_task_accuracy(matrix: ArrayLike) -> NDArray[np.float64]:
    """Accuracy on each task just after learning it, [T]."""
    return _matrix(matrix).diagonal().copy()


def running_accuracy(matrix: ArrayLike) -> NDArray[np.float64]:
    """Mean accuracy over the tasks seen so far, after each task, [T]; without task boundaries,
    accuracy on the classes seen after each part, [P].
    """
    a = _matrix(matrix, boundaries=False)
    return np.array([a[k, : k + 1].mean() for k in range(len(a))])


def average_anytime_accuracy(matrix: ArrayLike) -> float:
    """Mean over time of :func:`running_accuracy`."""
    return float(running_accuracy(matrix).mean())


def buffer_overfitting(buffer: ArrayLike, test: ArrayLike) -> NDArray[np.float64]:
    """BOF of each task, [T]: (accuracy on its memory samples - accuracy on its test images) /
    accuracy on its test images (paper eq. BOF); NaN where the test accuracy is 0, or ``buffer`` [T]
    is NaN since the memory has no samples of the task.
    """
    buffer, test = _numbers(buffer, "buffer"), _numbers(test, "test")
    return np.divide(buffer - test, test, out=np.full(test.shape, np.nan), where=test != 0)
