"""Signals end a run between two batches, with a checkpoint; none breaks into a step."""

import json
import os
import signal

import pytest

from mose_fast.config import RunConfig
from mose_fast.signals import Interrupted, raised_at_once, stop_request
from mose_fast.train import Listener, resume, run

GDUMB = RunConfig.create(
    method="gdumb", stream={"name": "digits", "limit_per_task": 10, "tasks": 2}, width=1, memory=64, device="cpu",
    options={"passes": 3, "passes_before": 3, "buffer_batch": 4},
)  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_asked_for_later(number):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with stop_request() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.is_set()
        with pytest.raises(Interrupted) as error:
            stop.check()
    assert error.value.number == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_only_a_second_ctrl_c_interrupts_at_once():
    with stop_request() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.number == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt), stop_request():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_outside_of_a_run_a_signal_is_raised_once_so_that_what_it_leaves_is_tidied():
    with raised_at_once():
        with pytest.raises(Interrupted) as error:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert error.value.number == signal.SIGTERM


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raised_at_once(), stop_request() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


class SignalAtStep(Listener):
    """Sends a signal at one of the steps that GDumb takes for an evaluation, and counts the steps after it."""

    def __init__(self, at):
        self.left, self.after = at, 0

    def on_step(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        self.after += self.left < 0


def outcome(results):
    return {name: value for name, value in results.items() if name not in ("seconds", "resumed", "peak_memory_bytes")}


@pytest.mark.parametrize("step", [1, 5, 12])
def test_training_for_an_evaluation_stops_after_its_next_step(tmp_path, step):
    unbroken = run(GDUMB)
    listener = SignalAtStep(step)
    with pytest.raises(Interrupted) as error:
        run(GDUMB, out=tmp_path, listeners=[listener])
    assert (error.value.number, listener.left, listener.after) == (signal.SIGTERM, 0, 0)
    resumed = resume(tmp_path)
    unbroken["config"]["stream"]["fingerprint"] = resumed["config"]["stream"]["fingerprint"]
    assert outcome(resumed) == outcome(unbroken)
    assert json.loads((tmp_path / "results.json").read_text())["resumed"] == 1
