"""The self-check's captured steps, on the simulated GPU: a clean capture passes; one that gives
other numbers, or none, is found, and steps are then taken eagerly.
"""

from __future__ import annotations

import pytest

from mose_fast import _loader
from mose_fast.methods import create_learner
from mose_fast.self_check.verdict import switched_off
from mose_fast.settings.run import RunConfig
from mose_fast.train import captured as captured_module
from mose_fast.train import self_check
from tests.races.simulated_gpu import SimulatedGpu

pytestmark = pytest.mark.skipif(
    _loader.native is None, reason="there is no native library, without which nothing is captured"
)

CONFIG = {"device": "cuda", "memory": 64, "width": 8, "feed": "fused", "precision": "fp32"}


@pytest.fixture(autouse=True)
def nothing_off(monkeypatch):
    monkeypatch.setattr(_loader, "off", {})


def rows_of_captured_steps() -> list:
    with SimulatedGpu() as gpu:
        rows = list(self_check.captured_rows("cuda", small=True))
    assert not gpu.races
    return rows


@pytest.mark.slow
def test_a_clean_capture_passes():
    with SimulatedGpu() as gpu:
        rows = list(self_check.captured_rows("cuda", small=True))
    assert [row.said for row in rows] == ["losses that differ", "weights that differ"]
    assert all(row.passed and row.error == 0 for row in rows) and gpu.replays == self_check.STEPS - 1


@pytest.mark.slow
def test_a_replay_of_old_inputs_is_found(monkeypatch):
    monkeypatch.setattr(captured_module, "copied_into", lambda static, inputs: None)
    rows = rows_of_captured_steps()
    assert not any(row.passed for row in rows)
    assert set(switched_off(rows)) == {"captured"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no CUDA graph of a step could be captured")
@pytest.mark.usefixtures("steps_wait")
def test_a_capture_that_fails_is_found():
    (row,) = rows_of_captured_steps()
    assert not row.passed and "no graph could be captured: CUDA error: operation not permitted" in row.said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no CUDA graph of a step could be captured")
def test_an_op_that_is_off_and_waits_for_the_gpu_takes_captured_steps_along():
    """PyTorch's form of the losses reads the counts of rows on the host."""
    _loader.switch_off({"expert_losses": "a row"})
    with SimulatedGpu():
        (row,) = self_check.captured_rows("cuda", small=True)
    assert not row.passed and "no graph" in row.said


@pytest.mark.slow
def test_steps_are_captured_beside_other_ops_that_are_off():
    ops = ("adam", "align_conv", "augment", "augment_parameters", "batch_norm_act", "norm_pool", "reservoir")
    _loader.switch_off(dict.fromkeys(ops, "a row"))
    with SimulatedGpu() as gpu:
        rows = list(self_check.captured_rows("cuda", small=True))
    assert [str(row) for row in rows if not row.passed] == [] and gpu.replays == self_check.STEPS - 1


@pytest.mark.parametrize("step", ["auto", "captured"])
def test_steps_are_eager_after_a_capture_that_failed(step):
    _loader.switch_off({"captured": "5 steps: losses that differ"})
    with SimulatedGpu():
        learner = create_learner(RunConfig.create(**CONFIG, step=step), classes=4, image_size=(8, 8))
    assert learner.stepping.name == "eager"
    assert learner.stepping.reason == "the self-check of captured steps failed: 5 steps: losses that differ"


def test_views_are_made_outside_the_graph_where_their_op_is_off():
    with SimulatedGpu():
        assert create_learner(RunConfig.create(**CONFIG), classes=4, image_size=(8, 8)).views.capturable
        _loader.switch_off({"augment": "a row"})
        assert not create_learner(RunConfig.create(**CONFIG), classes=4, image_size=(8, 8)).views.capturable
