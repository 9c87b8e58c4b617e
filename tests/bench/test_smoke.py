"""The smoke run says what is wrong with two runs that should be equal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.smoke import GRAPHS, Trained, complaints


def trained(*losses: float, graphs: int | None = GRAPHS, obstacle: str = "") -> Trained:
    steps = (
        None
        if graphs is None
        else SimpleNamespace(graphs=graphs, obstacle=obstacle, traceback=f"in train_on: {obstacle}")
    )
    return Trained([{"loss": loss} for loss in losses], steps, 1.0, 0)


GOOD = trained(2.0, 1.5, 1.0)


def test_nothing_is_wrong_with_equal_runs():
    assert complaints(GOOD, trained(2.0, 1.5, 1.0, graphs=0), trained(2.01, 9.0), near=0.03) == []
    assert complaints(trained(2.0, graphs=None), trained(2.0, graphs=None), None, near=0.03) == []


@pytest.mark.parametrize(
    ("captured", "eager", "plain", "told"),
    [
        (trained(2.0, graphs=3), trained(2.0), None, "3 graphs served the run; wanted 2"),
        (
            trained(2.0, obstacle="out of memory"),
            trained(2.0),
            None,
            "steps were not captured: out of memory\nin train_on: out of memory",
        ),
        (
            trained(2.0, 1.5),
            trained(2.0, 1.5000001),
            None,
            "step 2 of 2: captured {'loss': 1.5}, eager {'loss': 1.5000001}",
        ),
        (trained(2.0), trained(2.0, 1.5), None, "1 captured and 2 eager steps were told"),
        (trained(), trained(), None, "0 captured and 0 eager steps were told"),
        (trained(float("inf")), trained(float("inf")), None, "an eager loss is not finite"),
        (trained(2.0), trained(2.0), trained(2.1), "the first loss is 2 by our kernels, 2.1 by PyTorch's"),
        (trained(2.0), trained(2.0), trained(float("nan")), "the first loss is 2 by our kernels, nan by PyTorch's"),
    ],
)
def test_what_is_wrong_is_told(captured, eager, plain, told):
    (complaint,) = complaints(captured, eager, plain, near=0.03)
    assert told in complaint
