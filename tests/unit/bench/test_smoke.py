"""The smoke run says what is wrong with two runs that should be equal."""

from __future__ import annotations

import pytest

from bench.smoke import GRAPHS, Trained, complaints


def results(seed=0, *, step="captured", eager=GRAPHS, gpu="H100"):
    resolved = {"step": step, "feed": "fused", "reasons": {} if step == "captured" else {"step": "out of memory"}}
    return {"seed": seed, "gpu": gpu, "resolved": resolved, "steps": 300, "eager_steps": eager}


def trained(*losses: float, **how) -> Trained:
    return Trained([{"loss": loss} for loss in losses], results(**how))


GOOD = trained(2.0, 1.5, 1.0)


def test_nothing_is_wrong_with_equal_runs():
    assert complaints(GOOD, trained(2.0, 1.5, 1.0, step="eager"), trained(2.01, 9.0), near=0.03) == []
    assert complaints(trained(2.0, step="eager", gpu=None), trained(2.0, gpu=None), None, near=0.03) == []


@pytest.mark.parametrize(
    ("captured", "eager", "plain", "told"),
    [
        (trained(2.0, eager=3), trained(2.0), None, "3 of 300 steps eager; wanted captured and 2"),
        (
            trained(2.0, step="eager", eager=300),
            trained(2.0),
            None,
            "seed 0, feed fused: step eager (out of memory), 300 of 300 steps eager",
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
