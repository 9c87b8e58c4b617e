"""The worker process of a sweep: takes commands on stdin and reports events on stdout, in the
messages of :mod:`mose_fast.experiments.protocol`.

A worker imports everything once and forks a child for each run. So every run starts as clean as
``mose-fast run`` does, without its seconds of imports. The worker itself never uses CUDA, which a
child could not use after that.

No process outlives the sweep: when stdin closes, because the sweep ended or was killed, the worker
kills its child and ends, and the runs can be continued from their checkpoints. When a worker is
killed, the kernel kills its child.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from mose_fast.errors import MoseFastError
from mose_fast.evaluate import TaskAccuracy
from mose_fast.experiments.protocol import ENDS, Command, Event, Reader, died, send
from mose_fast.experiments.step_cost import measure
from mose_fast.methods import Learner, resolve_device
from mose_fast.output import guarded_output
from mose_fast.runs.files import RunFolder
from mose_fast.runs.progress import Progress
from mose_fast.runs.weights_and_biases import WeightsAndBiases
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream
from mose_fast.train import Interrupted, Listener, resume, run

# Takes events without their cell.
Emit = Callable[[Event], None]

# Seconds between two reports of progress.
_EVERY = 0.5

# Signals that end a job or a container.
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class _Report(Listener):
    """Reports the progress of a run to the sweep."""

    def __init__(self, emit: Emit) -> None:
        self.emit, self.last = emit, 0.0

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        self.tasks, self.batches, self.main = stream.parts, batches, learner.resolve_expert()
        self.what = "task" if stream.has_boundaries else "part"
        self.emit({"event": "progress", "batch": batch, "batches": batches, "view": self.main})

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        now = time.monotonic()
        if now - self.last > _EVERY:
            self.last = now
            self.emit({"event": "progress", "batch": batch, "batches": self.batches})

    def on_task_end(self, task: int, batch: int, accuracy: TaskAccuracy | None) -> None:
        if accuracy is not None:
            classifier, expert = self.main
            mean = statistics.mean(accuracy.test[classifier][expert])
            seen = min(task, self.tasks - 1)
            self.emit({"event": "task", "task": seen, "tasks": self.tasks, "what": self.what, "accuracy": mean})


def run_cell(command: Command, emit: Emit) -> None:
    """Begins or continues a run, or measures one, and reports how it ended. Raises nothing."""
    try:
        if command["do"] == "measure":
            config = RunConfig.from_dict(command["config"])
            resolve_device(config.device)
            emit({"event": "measured", "cost": dataclasses.asdict(measure(config))})
        else:
            _run(command, emit)
        emit({"event": "done"})
    except KeyboardInterrupt:
        emit({"event": "stopped"})
    except MoseFastError as error:
        print(f"mose-fast: {error}", file=sys.stderr)
        emit({"event": "failed", "error": str(error)})
    except BaseException as error:
        traceback.print_exc()
        emit({"event": "failed", "error": f"{type(error).__name__}: {error}"})


def _run(command: Command, emit: Emit) -> None:
    folder = RunFolder(command["out"])
    config = RunConfig.load(command["config"])
    listeners: list[Listener] = [Progress(folder.path), _Report(emit)]
    if command["wandb"] is not None:
        listeners.append(WeightsAndBiases(command["wandb"], folder.path))
    if folder.config.is_file() and not command["afresh"]:
        resume(folder.path, listeners=listeners)
    else:
        run(config, out=folder.path, overwrite=True, listeners=listeners)


class _Worker:
    """Carries out commands one at a time, each in a child of this process."""

    child: int | None = None

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def serve(self, signals: int) -> None:
        """Takes commands until stdin closes or a signal (pipe ``signals``) has ended the run."""
        commands = Reader(0)
        ending = False
        while not commands.closed and (self.busy() or not ending):
            pipes = [0, signals, *([self.events.pipe] if self.busy() else [])]
            ready, _, _ = select.select(pipes, [], [], 0.1 if ending else None)
            if self.busy() and self.events.pipe in ready:
                self.pump()
            if signals in ready:
                # This process is asked to end. Its run writes a checkpoint first.
                os.read(signals, 4096)
                ending = True
                self.stop()
            for command in commands.read() if 0 in ready else []:
                if command["do"] == "stop":
                    self.stop(command["cell"])
                else:
                    self.start(command)
        if self.busy():
            os.kill(self.child, signal.SIGKILL)

    def busy(self) -> bool:
        return self.child is not None

    def start(self, command: Command) -> None:
        while self.busy():  # the last child has reported its end, but may still live
            self.pump()
        self.cell, self.ended = command["cell"], False
        pipe, end = os.pipe()
        self.events = Reader(pipe)
        sys.stdout.flush()
        parent = os.getpid()
        self.child = os.fork()
        if self.child:
            os.close(end)
            return
        # In the child: nothing here may return into the loop below.
        try:
            os.close(pipe)
            _die_with(parent)
            self._be_child(command, end)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)

    def _be_child(self, command: Command, end: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in _ENDING:
            signal.signal(number, _interrupt)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        if "log" in command:
            log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
        else:
            os.dup2(2, 1)
        torch.set_num_threads(self.threads)

        def emit(event: Event) -> None:
            send(end, event)

        if torch.cuda._is_in_bad_fork():
            emit({"event": "failed", "error": "its worker had used CUDA before it forked, after which no run can"})
        else:
            run_cell(command, emit)

    def pump(self) -> None:
        """Passes the child's events on, and reports a child that ended without a last event."""
        for event in self.events.read():
            self.ended |= event["event"] in ENDS
            _report({**event, "cell": self.cell})
        if not self.events.closed:
            return
        os.close(self.events.pipe)
        _, status = os.waitpid(self.child, 0)
        self.child = None
        if not self.ended:
            _report(died(self.cell, os.WTERMSIG(status) if os.WIFSIGNALED(status) else None))

    def stop(self, cell: str | None = None) -> None:
        if self.busy() and cell in (None, self.cell):
            os.kill(self.child, signal.SIGTERM)


def _interrupt(number: int, frame: Any) -> None:
    """Ends a run before its first batch; from then on the training loop handles the signals."""
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(number)


def _report(event: Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        send(_events, event)


def _die_with(parent: int) -> None:
    """Dies with the parent process (on Linux; elsewhere the closed pipes end this process)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Serves commands until stdin closes."""
    global _events
    parser = argparse.ArgumentParser(prog="worker of mose-fast sweep")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # The pipe is for events alone; what libraries print goes to stderr.
    _events = os.dup(1)
    os.dup2(2, 1)
    # Ctrl-C is handled by the sweep, which tells its workers. The signals that end a job or a
    # container may be sent to every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent)
    for number in _ENDING:
        signal.signal(number, lambda number, frame: None)
    _import_what_runs_need()
    _report({"event": "ready"})
    with guarded_output():
        _Worker(arguments.threads).serve(signals)


def _import_what_runs_need() -> None:
    """Imports what runs import late: once here, instead of once in every child."""
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import tensorboard.summary.writer.record_writer  # noqa: F401
    import torch._dynamo  # noqa: F401


_events = 1
