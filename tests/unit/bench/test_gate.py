"""The gate measures a ratio, retries a miss once, and fails if the ratio is still missed."""

from __future__ import annotations

import time

import pytest
import torch

from bench import gate
from bench.common import Case


def make_sleeper(case: Case):
    milliseconds = case.shape[case.impl]
    return lambda: time.sleep(milliseconds / 1e3)


def make_case(reference: int, native: int) -> Case:
    return Case("sleep", "native", "cpu", torch.float32, shape={"reference": reference, "native": native})


def test_ratio_of_two_sleeps():
    assert gate.ratio(lambda: time.sleep(0.004), lambda: time.sleep(0.001), rounds=5) == pytest.approx(4, rel=0.4)


def test_check(capsys):
    assert gate.check([(make_case(4, 1), make_sleeper, 1.5)])
    assert "ok" in capsys.readouterr().out
    assert not gate.check([(make_case(1, 4), make_sleeper, 1.5), (make_case(4, 1), make_sleeper, 1.5)])
    first, second = capsys.readouterr().out.splitlines()
    assert "wanted 1.5: TOO SLOW (first try: " in first
    assert second.endswith("ok")


def test_one_miss_is_measured_again(monkeypatch, capsys):
    measured = iter([1.2, 1.6])
    monkeypatch.setattr(gate, "ratio", lambda slow, fast: next(measured))
    assert gate.check([(make_case(1, 1), make_sleeper, 1.5)])
    assert "1.60 times faster, wanted 1.5: ok (first try: 1.20)" in capsys.readouterr().out


def test_the_gates_are_the_issue_s():
    wanted = {("expert_losses", "forward+backward"), ("augment", "forward")}
    assert {(case.op, case.direction) for case, _, _ in gate.GATES} == wanted
    assert all(
        (case.device, case.dtype, case.shape["N"], least) == ("cpu", torch.float32, 384, 1.5)
        for case, _, least in gate.GATES
    )
