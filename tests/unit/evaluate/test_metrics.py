"""Metrics of accuracy matrices: worked by hand, and against the released code's values."""

import math

import numpy as np
import pytest
from scipy import stats

from mose_fast import evaluate
from tests.paths import GOLDEN

HAND = [[0.9, 0.0, 0.0], [0.6, 0.8, 0.0], [0.3, 0.5, 0.7]]

# Worked out on paper for HAND.
EXPECTED = {
    "average_accuracy": (0.3 + 0.5 + 0.7) / 3,
    "forgetting_paper": ((0.9 - 0.3) + (0.8 - 0.5)) / 2,
    "forgetting_released": ((0.9 - 0.3) + (0.8 - 0.5) + 0) / 3,
    "backward_transfer": ((0.3 - 0.9) + (0.5 - 0.8)) / 2,
    "new_task_accuracy": [0.9, 0.8, 0.7],
    "running_accuracy": [0.9, 0.7, 0.5],
    "average_anytime_accuracy": (0.9 + 0.7 + 0.5) / 3,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_hand_worked_matrix(name):
    assert getattr(evaluate, name)(HAND) == pytest.approx(EXPECTED[name], abs=1e-12)


def test_without_task_boundaries_there_is_one_column():
    """The accuracy on the classes seen after each part; differences of rows are no forgetting."""
    column = [[0.9], [0.5], [0.7]]
    assert evaluate.average_accuracy(column) == 0.7
    assert evaluate.running_accuracy(column).tolist() == [0.9, 0.5, 0.7]
    assert evaluate.average_anytime_accuracy(column) == pytest.approx(0.7)
    for name in ("forgetting_paper", "forgetting_released", "backward_transfer", "new_task_accuracy"):
        with pytest.raises(ValueError, match=r"has shape \(3, 1\); wanted \[T, T\] with T"):
            getattr(evaluate, name)(column)


def test_forgettings_part_where_a_task_improves_at_the_end():
    improving = [[0.5, 0.0, 0.0], [0.7, 0.4, 0.0], [0.8, 0.3, 0.6]]
    # Task 0 gains 0.1 on its best earlier accuracy: negative for the paper, 0 for the released
    # code.
    assert evaluate.forgetting_paper(improving) == pytest.approx(((0.7 - 0.8) + (0.4 - 0.3)) / 2)
    assert evaluate.forgetting_released(improving) == pytest.approx((0 + (0.4 - 0.3) + 0) / 3)
    assert evaluate.backward_transfer(improving) == pytest.approx(((0.8 - 0.5) + (0.3 - 0.4)) / 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_one_task(name):
    expected = {"forgetting_paper": 0.0, "forgetting_released": 0.0, "backward_transfer": 0.0}.get(name, 0.25)
    value = getattr(evaluate, name)([[0.25]])
    assert np.allclose(value, expected)
    assert np.size(value) == 1


@pytest.mark.parametrize("name", EXPECTED)
def test_input_stays_and_values_repeat(name):
    matrix = np.random.default_rng(5).random((6, 6)) * np.tri(6)
    before = matrix.copy()
    function = getattr(evaluate, name)
    first = function(matrix)
    if isinstance(first, np.ndarray):
        first[:] = -1  # A view into the matrix would change it.
    second = function(matrix)
    assert np.array_equal(matrix, before)
    assert np.array_equal(second, function(before.tolist()))


@pytest.mark.parametrize("matrix", [[], [0.5, 0.5], [[0.5, 0.5]], np.zeros((0, 0))])
@pytest.mark.parametrize("name", EXPECTED)
def test_other_shapes_are_refused(name, matrix):
    with pytest.raises(ValueError, match=r"accuracy matrix has shape .* wanted \[T, T\]"):
        getattr(evaluate, name)(matrix)


def test_masked_arrays_are_refused():
    """Their masked elements would count."""
    masked = np.ma.masked_less(np.eye(3), 0.5)
    for name in {*evaluate.metrics.__all__} - {"buffer_overfitting"}:
        with pytest.raises(ValueError, match="an accuracy matrix is a masked array; wanted a plain one"):
            getattr(evaluate, name)(masked)
    for arguments in ((masked[0], np.ones(3)), (np.ones(3), masked[0])):
        with pytest.raises(ValueError, match="is a masked array"):
            evaluate.buffer_overfitting(*arguments)


def test_buffer_overfitting():
    buffer, test = np.array([0.9, 0.5, math.nan, 0.4, math.nan]), np.array([0.6, 0.0, 0.5, 0.8, 0.0])
    before = buffer.copy(), test.copy()
    expected = [(0.9 - 0.6) / 0.6, math.nan, math.nan, (0.4 - 0.8) / 0.8, math.nan]
    for _ in range(2):
        assert evaluate.buffer_overfitting(buffer, test) == pytest.approx(expected, nan_ok=True)
    assert np.array_equal(buffer, before[0], equal_nan=True)
    assert np.array_equal(test, before[1])


@pytest.mark.parametrize(
    ("group", "function"),
    [
        ("acc_mean_ci", evaluate.average_accuracy),
        ("af_released_mean_ci", evaluate.forgetting_released),
        ("average_accuracy_mean_ci", evaluate.average_anytime_accuracy),
    ],
)
def test_released_code_summary_of_runs(group, function):
    """The released code prints the mean over runs and the half width of its 95 % t interval
    (docs/specification/mose.md section 8).
    """
    golden = np.load(GOLDEN)
    runs = [function(matrix / 100) * 100 for matrix in golden["metrics/matrices"]]
    half_width = stats.t.ppf(0.975, len(runs) - 1) * np.std(runs, ddof=1) / math.sqrt(len(runs))
    assert [np.mean(runs), half_width] == pytest.approx(golden[f"metrics/{group}"], rel=1e-6)
