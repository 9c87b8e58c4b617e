"""Launches that are recorded in place of running: what build_tools/predict.py computes with."""

from __future__ import annotations

import pytest
import torch

from build_tools.predict import parse_record
from mose_fast import _loader
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act


@pytest.mark.skipif(_loader.card() != "cpu", reason="only the emulated card records launches")
def test_a_record_has_the_plans_of_the_launching_code(tmp_path, monkeypatch):
    x = torch.randn(384, 128, 16, 16).to(torch.bfloat16).to(memory_format=torch.channels_last)
    norm = Norm.of(torch.nn.BatchNorm2d(128))
    monkeypatch.setenv("MOSE_FAST_LAUNCHES", str(tmp_path / "launches"))
    batch_norm_act(x, norm)
    assert norm.running_mean.abs().max() == 0  # nothing ran
    statistics, forward = parse_record((tmp_path / "launches").read_text())
    size = 2 * x.numel()
    # Two tiles of 64 channels; as many blocks as 132 processors hold: one with sums, three without.
    assert (statistics.kernel, statistics.blocks, statistics.threads) == (
        "norm_statistics_kernel<__nv_bfloat16, false>",
        132,
        512,
    )
    assert (statistics.bytes, statistics.parts) == (size, pytest.approx(66 / (512 / 64), abs=0.06))
    assert (forward.kernel, forward.blocks, forward.threads) == (
        "batch_norm_act_forward_kernel<__nv_bfloat16, (NormForm)0>",
        396,
        256,
    )
    assert forward.early and statistics.early
    assert forward.bytes == 2 * size + size / 16  # and a bit an element
    monkeypatch.delenv("MOSE_FAST_LAUNCHES")
    batch_norm_act(x[:2], norm)
    assert norm.running_mean.abs().max() > 0
