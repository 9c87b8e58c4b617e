"""Where users meet a verdict: the heading of a run, ``results.json``, the table of runs, reports, a
resumed run, ``doctor``.
"""

from __future__ import annotations

import json
import shutil
import warnings
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch

from mose_fast import _loader
from mose_fast.app import doctor
from mose_fast.app.cli import main
from mose_fast.learner import learner
from mose_fast.present.statistics import check_comparable
from mose_fast.runs.progress import Progress
from mose_fast.runs.results import schema
from mose_fast.runs.store import read_run
from mose_fast.self_check import SWITCH
from mose_fast.self_check.rows import Row
from mose_fast.self_check.verdict import Verdict
from mose_fast.streams import from_arrays
from mose_fast.train import Interrupted, resume, run
from tests.listeners import StopAt

PASSED = Verdict("passed", (Row("null", "some", 0.5, 1.0, "y"),), at="2026-11-29T12:00:00+00:00")
ROWS = (
    Row("align_conv", "backward", 3.0, 1.0, "gradient of x"),
    Row("captured", "5 steps", None, None, "no graph could be captured: no luck"),
    Row("null", "some", 0.5, 1.0, "y"),
)
FAILED = Verdict("failed", ROWS, at="2026-11-29T12:00:00+00:00", seconds=8.25)
OFF = {
    "align_conv": "backward: gradient of x is off by 3; wanted at most 1",
    "captured": "5 steps: no graph could be captured: no luck",
}


@pytest.fixture(autouse=True)
def nothing_off(monkeypatch, one_thread):
    monkeypatch.setattr(_loader, "off", {})


@pytest.fixture
def obeyed(monkeypatch):
    """A function that has all learners find a verdict."""

    def obey(verdict):
        def settle(device):
            if verdict is not None:
                _loader.switch_off(verdict.off)
            return verdict

        monkeypatch.setattr(_loader, "off", {})
        monkeypatch.setattr(learner, "settle", settle)

    return obey


def a_run(out, **how):
    labels = np.arange(60) % 4
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    stream = from_arrays(images, labels, images[:8], labels[:8], tasks=2)
    return stream, run(stream=stream, out=out, method="er", width=1, memory=64, device="cpu", **how)


@pytest.mark.parametrize(
    ("verdict", "state", "off", "heading"),
    [
        (None, None, {}, None),
        (PASSED, "passed", {}, None),
        (Verdict("skipped"), "skipped", {}, "kernels  self-check skipped"),
        (
            FAILED,
            "failed",
            OFF,
            "kernels  self-check failed; switched off: align_conv, captured (mose-fast doctor --check)",
        ),
    ],
)
def test_a_run_says_what_is_off(obeyed, tmp_path, capsys, verdict, state, off, heading):
    obeyed(verdict)
    _, results = a_run(tmp_path / "run", listeners=[Progress(tmp_path / "run")])
    assert (results["resolved"]["self_check"], results["resolved"]["switched_off"]) == (state, off)
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(stored)) == []
    row, _ = read_run(tmp_path / "run")
    assert row["switched_off"] == ", ".join(off)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernels ")]
    assert told == ([] if heading is None else [heading])
    cautions = [line for line in check_comparable([row, {**row, "switched_off": ""}]) if "self-check" in line]
    wanted = "the self-check of the native library had switched something off in 1 of 2 runs: align_conv, captured"
    assert cautions == ([wanted] if off else [])


def test_a_resumed_run_is_told_what_is_off_now(obeyed, tmp_path):
    obeyed(PASSED)
    with pytest.raises(Interrupted):
        a_run(tmp_path / "run", checkpoint_every=2, listeners=[StopAt(4)])
    stream, _ = a_run(None)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    obeyed(FAILED)
    changed = "switched off was none and is align_conv, captured now: the last digits of the results will differ"
    with pytest.warns(UserWarning, match=changed):
        assert resume(tmp_path / "run", stream=stream)["resumed"] == 1
    obeyed(PASSED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume(tmp_path / "again", stream=stream)


@pytest.fixture
def emulated(monkeypatch):
    """A machine with an emulated GPU; a function that says which verdict is kept."""
    monkeypatch.setattr(_loader, "native", SimpleNamespace())
    monkeypatch.setattr(_loader, "record", {**(_loader.record or {}), "backend": "emulated"})
    monkeypatch.delenv(SWITCH)
    return lambda verdict: monkeypatch.setattr(doctor, "stored", lambda device: verdict)


def test_doctor_shows_the_verdict(emulated, monkeypatch):
    def found():
        return [doctor._verdict(device) for device in doctor._kinds()]

    emulated(PASSED)
    passed = "1 of 1 rows passed, 2026-11-29T12:00:00+00:00"
    assert found() == [doctor.Finding("ok", "self-check, cpu", passed)]
    emulated(FAILED)
    (line,) = found()
    assert line.mark == "--" and line.fix.endswith("mose-fast doctor --check")
    assert "1 of 3 rows passed" in line.found and "switched off: align_conv, captured" in line.found
    emulated(None)
    (line,) = found()
    assert (line.mark, line.found) == ("--", "not yet: the first run does it, once")
    monkeypatch.setenv(SWITCH, "0")
    assert f"{SWITCH}=0 forbids it" in found()[0].found


def test_doctor_has_a_line_for_each_kind_of_gpu(monkeypatch):
    gpus = [("Imagined 5000", 9, 0), ("Imagined 5000", 9, 0), ("Imagined 3000", 8, 6), ("Imagined 7000", 7, 5)]
    monkeypatch.setattr(_loader, "native", SimpleNamespace())
    monkeypatch.setattr(_loader, "record", {"backend": "cuda", "archs": ["8.0", "9.0"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    properties = [SimpleNamespace(name=name, major=major, minor=minor) for name, major, minor in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    assert [device.index for device in doctor._kinds()] == [0, 2]


def test_doctor_checks_anew_and_prints_each_row(emulated, capsys, monkeypatch):
    for verdict, status in ((FAILED, 1), (PASSED, 0)):
        monkeypatch.setattr(doctor, "check", lambda device, verdict=verdict: verdict)
        assert main(["doctor", "--check"]) == status
    lines = doctor.rows_of_check(FAILED).splitlines()
    assert lines == [
        "      part        case      error  bound  of",
        "FAIL  align_conv  backward  3      1      gradient of x",
        "FAIL  captured    5 steps   -      -      no graph could be captured: no luck",
        "ok    null        some      0.5    1      y",
        "failed after 8.2 s; switched off: align_conv, captured",
    ]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:6] == ["cpu", *lines] and printed[6] == "cpu" and len(printed) == 10


def test_doctor_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(_loader, "native", None)
    assert main(["doctor", "--check"]) == 0
    assert capsys.readouterr().out.startswith("there is no GPU that the native library has kernels for")
