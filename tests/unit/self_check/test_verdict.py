"""What a check's process says, keeps and switches off; the process is a script that says what a
test wants, so that no kernel runs.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from mose_fast import _loader
from mose_fast.nn.kernels import choose_kernels
from mose_fast.processes import python
from mose_fast.self_check import verdict as module
from mose_fast.self_check.rows import OPS
from mose_fast.self_check.verdict import SWITCH, check, settle, stored

CPU = torch.device("cpu")
KIND = {"library": "0123", "code": "4567", "torch": "2.14", "gpu": "Imagined 5000", "driver": "580, CUDA 13.0"}

# Reports the parts "adam" and "null", and does in a part what the test says.
SCRIPT = """
import json, os, signal, sys, time
def tell(**message):
    print(json.dumps(message), flush=True)
def row(op, error, bound=1.0):
    tell(row=dict(op=op, case="some", error=error, bound=bound, said="y"))
def main():
    wanted = json.loads(sys.argv[1])
    with open({log!r}, "a") as log:
        print(json.dumps([wanted["done"], wanted["off"]]), file=log)
    {before}
    for op in ("adam", "null", "step"):
        if op in wanted["done"]:
            continue
        tell(begin=op)
        {inside}
        row(op, 0.5)
        tell(end=op)
        {after}
    tell(finished=True)
"""


@pytest.fixture
def process(monkeypatch, tmp_path):
    """A function that says what the check's processes do; it returns with what they started."""
    monkeypatch.setattr(_loader, "native", SimpleNamespace(__file__=str(tmp_path / "_C.so")))
    monkeypatch.setattr(_loader, "record", {"backend": "emulated"})
    monkeypatch.setattr(_loader, "off", {})
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "kind_of", lambda device: dict(KIND))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(module, "python", lambda name, *arguments: python("checks_nothing", *arguments))
    log = tmp_path / "log"

    def does(inside="pass", before="pass", after="pass"):
        text = SCRIPT.format(log=str(log), inside=inside, before=before, after=after)
        (tmp_path / "checks_nothing.py").write_text(text)
        return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    return does


def new_process(monkeypatch):
    """As in a process that has not asked yet."""
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(_loader, "off", {})


def quietly(device=CPU):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return settle(device)


def test_a_check_that_passes_is_run_once_for_a_kind_of_gpu(process, monkeypatch, capsys):
    started = process()
    found = quietly()
    assert (found.state, [row.op for row in found.rows], found.off, _loader.off) == (
        "passed",
        ["adam", "null", "step"],
        {},
        {},
    )
    assert "new to Imagined 5000: checking its kernels, once" in capsys.readouterr().err
    assert quietly() is found
    new_process(monkeypatch)
    assert quietly() == found == stored(CPU) and len(started()) == 1
    for name in KIND:  # another library, code, torch, GPU or driver
        monkeypatch.setattr(module, "kind_of", lambda device, name=name: {**KIND, name: "another"})
        new_process(monkeypatch)
        assert stored(CPU) is None
        quietly()
    assert len(started()) == 1 + len(KIND)


def test_a_row_that_fails_switches_its_op_off_with_one_warning_in_each_process(process, monkeypatch):
    started = process("if op == 'null': row(op, 3.0)")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="on Imagined 5000 has switched off: null") as told:
            found = settle(CPU)
            settle(CPU)
        assert len(told) == 1 and "(some: y is off by 3; wanted at most 1)" in str(told[0].message)
        assert "PyTorch's operations" in str(told[0].message) and "eager" not in str(told[0].message)
        assert found.state == "failed" and set(_loader.off) == {"null"}
        assert not _loader.serves("null", torch.zeros(1)) and _loader.serves("adam", torch.zeros(1))
        new_process(monkeypatch)
    assert len(started()) == 1


@pytest.mark.parametrize("error", ["float('nan')", "float('inf')", "1.0000001"])
def test_what_does_not_pass(process, error):
    process(f"if op == 'null': row(op, {error})")
    with pytest.warns(RuntimeWarning, match="switched off: null"):
        assert settle(CPU).state == "failed"


def test_steps_that_are_not_pytorchs_switch_all_ops_off(process):
    process("if op in ('adam', 'step'): row(op, 3.0 if op == 'step' else 2.0)")
    with pytest.warns(RuntimeWarning) as told:
        settle(CPU)
    assert set(_loader.off) == {*OPS, "step"} and choose_kernels("auto", CPU) == "torch"
    assert "is off by 2" in _loader.off["adam"] and "is off by 3" in _loader.off["null"]
    (text,) = [str(warning.message) for warning in told]
    assert text.count("is off by 2") == text.count("is off by 3") == 1 and "adam (" in text and "step (" in text


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        ("if op == 'adam': os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("if op == 'adam': os.abort()", "was killed by SIGABRT"),
        ("if op == 'adam': sys.exit('no such\\nluck')", r"ended with status 1 \(luck\)"),
        ("if op == 'adam': time.sleep(60)", "said nothing for 1 s"),
    ],
)
def test_a_part_in_which_its_process_dies_or_hangs_fails_and_the_others_go_on(process, monkeypatch, inside, says):
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    started = process(inside)
    with pytest.warns(RuntimeWarning, match=f"adam .*the process of the check {says}"):
        found = settle(CPU)
    assert [(row.op, row.passed) for row in found.rows] == [("adam", False), ("null", True), ("step", True)]
    assert [done for done, _ in started()] == [[], ["adam"]]
    assert "adam" in started()[1][1]  # is off in the steps


def test_a_process_that_broke_its_gpu_hands_over_to_a_new_one(process):
    started = process("if op == 'adam': row(op, 2.0)", after=f"if op == 'adam': sys.exit({module.RESTART})")
    with pytest.warns(RuntimeWarning, match="switched off: adam"):
        found = settle(CPU)
    assert [row.passed for row in found.rows] == [False, True, True, True]
    assert [done for done, _ in started()] == [[], ["adam"]]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"before": "tell(obstacle='the GPU is busy'); sys.exit()"}, "the GPU is busy"),
        ({"before": "import no_such_module"}, "status 1 .*no_such_module"),
        ({"inside": "os.kill(os.getpid(), signal.SIGKILL)"}, "was killed by SIGKILL"),  # for lack of memory
    ],
)
def test_what_says_nothing_about_kernels_switches_nothing_off_and_is_tried_again(process, monkeypatch, how, says):
    started = process(**how)
    for count in (1, 2):
        with pytest.warns(RuntimeWarning, match=rf"could not all be checked on Imagined 5000 \(.*{says}.*tries again"):
            assert settle(CPU).state == "unknown"
        assert _loader.off == {} and stored(CPU) is None and len(started()) == count
        new_process(monkeypatch)


def test_runs_that_start_together_check_once(process):
    started = process("time.sleep(0.3)")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: module._stored_or_new(CPU, KIND), range(4)))
    assert len(started()) == 1 and {verdict.state for verdict in found} == {"passed"}


def test_where_nothing_can_be_kept_each_process_checks(process, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    started = process()
    for count in (1, 2):
        with pytest.warns(RuntimeWarning, match=rf"cannot be kept in {tmp_path}/file/.*{SWITCH}=0"):
            assert settle(CPU).state == "passed"
        assert len(started()) == count
        new_process(monkeypatch)


@pytest.mark.parametrize("content", ["", "{}", '{"kind": 1, "verdict": {"rows": []}}', "[3]", "\xff"])
def test_a_damaged_verdict_is_none(process, content):
    process()
    found = quietly()
    (path,) = module._folder().glob("*.json")
    path.write_text(content, encoding="latin1")
    assert stored(CPU) is None
    assert check(CPU).rows == found.rows == stored(CPU).rows


def test_a_check_anew_replaces_the_verdict(process, monkeypatch):
    process()
    quietly()
    process("if op == 'null': row(op, 3.0)")
    assert check(CPU).state == stored(CPU).state == "failed"
    new_process(monkeypatch)
    with pytest.warns(RuntimeWarning, match="switched off: null"):
        settle(CPU)


def test_it_can_be_skipped(process, monkeypatch):
    started = process()
    monkeypatch.setenv(SWITCH, "0")
    assert settle(CPU).state == "skipped" and started() == []


def test_a_device_without_kernels_has_no_verdict(process, monkeypatch):
    started = process()
    monkeypatch.setattr(_loader, "record", {"backend": "cuda"})
    assert settle(CPU) is None
    monkeypatch.setattr(_loader, "native", None)
    assert settle(torch.device("cuda")) is None and started() == []


def test_where_warnings_are_errors_what_failed_is_off_and_the_verdict_kept(process, monkeypatch):
    """In the process of the check, they are not."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    started = process("if op == 'null': row(op, 3.0)", before="import warnings; warnings.warn('of another library')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="switched off: null"):
            settle(CPU)
        assert settle(CPU) == stored(CPU) and stored(CPU).state == "failed"
    assert set(_loader.off) == {"null"} and len(started()) == 1


def test_without_a_process_nothing_is_switched_off(process, monkeypatch):
    started = process()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.warns(RuntimeWarning, match="its process cannot run: .*No such file.*the next run tries again"):
        assert settle(CPU).state == "unknown"
    assert _loader.off == {} and stored(CPU) is None and started() == []


def test_an_interruption_ends_the_process(process, monkeypatch):
    process("time.sleep(60)")
    made = []
    start = module.subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", lambda *a, **k: made.append(start(*a, **k)) or made[-1])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.select, "select", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        settle(CPU)
    assert time.monotonic() - began < 30 and made[0].returncode is not None and stored(CPU) is None
