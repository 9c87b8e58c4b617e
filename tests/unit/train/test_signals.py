"""Signals end a run between two batches, with a checkpoint; none breaks into a step."""

import json
import os
import signal

import pytest

from mose_fast.settings.run import RunConfig
from mose_fast.signals import Interrupted, raised_at_once, stop_request
from mose_fast.train import Listener, resume, run
from tests.unit.train.small import outcome, small_stream


@pytest.mark.usefixtures("signals_act")
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
    """Sends a signal at one of the steps that end a task, and counts the steps after it."""

    def __init__(self, at):
        self.at, self.steps = at, 0

    def on_step(self):
        self.steps += 1
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mose", "gdumb", "scr"])
def test_what_ends_a_task_stops_after_its_next_step(tmp_path, method):
    """Evaluations, GDumb's training for them and SCR's review: each of their steps is a place to
    stop, and nothing is counted twice.
    """
    options = {
        "gdumb": {"passes": 3, "passes_before": 3, "buffer_batch": 4},
        "scr": {"review": True, "buffer_batch": 4},
    }
    settings = {"width": 1, "memory": 64, "device": "cpu", "evaluation_batch": 256}
    config = RunConfig.create(method=method, **settings, options=options.get(method, {}))
    count, stream = SignalAtStep(None), small_stream(20)
    unbroken = run(config, stream=stream, out=tmp_path / "unbroken", listeners=[count])
    # Two evaluations: memory and test images, and what the method trains.
    assert count.steps >= {"mose": 4, "gdumb": 23, "scr": 9}[method]
    for step in {1, count.steps // 2, count.steps}:
        listener, out = SignalAtStep(step), tmp_path / str(step)
        with pytest.raises(Interrupted) as error:
            run(config, stream=stream, out=out, listeners=[listener])
        assert (error.value.number, listener.steps) == (signal.SIGTERM, step)
        assert outcome(resume(out, stream=stream)) == outcome(unbroken)
        assert json.loads((out / "results.json").read_text())["resumed"] == 1
