"""The worker process of a sweep: takes commands and reports events, as
:mod:`mose_fast.experiments.protocol` has them.

A worker imports everything once and forks a child for each run. So every run starts as clean as
``mose-fast run`` does, without its seconds of imports. The worker itself never uses CUDA, which a
child could not use after that.

No process outlives the sweep: when it ends or is killed, the worker kills its child and ends, and
the runs can be continued from their checkpoints. When a worker is killed, the kernel kills its
child.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from mose_fast.errors import MoseFastError
from mose_fast.evaluate import TaskAccuracy
from mose_fast.experiments.protocol import ENDS, Command, Event, died
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

    def __init__(self, sweep: Connection, threads: int) -> None:
        self.sweep, self.threads = sweep, threads

    def serve(self, signals: int) -> None:
        """Takes commands until the sweep ends or a signal (pipe ``signals``) has ended the run."""
        ending = False
        while self.busy() or not ending:
            pipes = [self.sweep, signals, *([self.events] if self.busy() else [])]
            ready = wait(pipes, 0.1 if ending else None)
            if self.busy() and self.events in ready:
                self.pump()
            if signals in ready:
                # This process is asked to end. Its run writes a checkpoint first.
                os.read(signals, 4096)
                ending = True
                self.stop()
            if self.sweep in ready:
                try:
                    command = self.sweep.recv()
                except (EOFError, OSError):
                    break
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
        self.events, end = Pipe(duplex=False)
        sys.stdout.flush()
        parent = os.getpid()
        self.child = os.fork()
        if self.child:
            end.close()
            return
        # In the child: nothing here may return into the loop below.
        try:
            self.events.close()
            _die_with(parent)
            self._be_child(command, end)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)

    def _be_child(self, command: Command, end: Connection) -> None:
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
        torch.set_num_threads(self.threads)
        if torch.cuda._is_in_bad_fork():
            end.send({"event": "failed", "error": "its worker had used CUDA before it forked, after which no run can"})
        else:
            run_cell(command, end.send)

    def pump(self) -> None:
        """Passes the child's next event on, or reports a child that ended without a last one."""
        try:
            event = self.events.recv()
        except (EOFError, OSError):
            self.events.close()
            _, status = os.waitpid(self.child, 0)
            self.child = None
            if not self.ended:
                self.report(died(self.cell, os.WTERMSIG(status) if os.WIFSIGNALED(status) else None))
            return
        self.ended |= event["event"] in ENDS
        self.report({**event, "cell": self.cell})

    def report(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # the sweep has ended
            self.sweep.send(event)

    def stop(self, cell: str | None = None) -> None:
        if self.busy() and cell in (None, self.cell):
            os.kill(self.child, signal.SIGTERM)


def _interrupt(number: int, frame: Any) -> None:
    """Ends a run before its first batch; from then on the training loop handles the signals."""
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(number)


def _die_with(parent: int) -> None:
    """Dies with the parent process (on Linux; elsewhere the closed pipes end this process)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def main() -> None:
    """Serves commands until the sweep ends."""
    parser = argparse.ArgumentParser(prog="worker of mose-fast sweep")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # Ctrl-C is handled by the sweep, which tells its workers. The signals that end a job or a
    # container may be sent to every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent)
    for number in _ENDING:
        signal.signal(number, lambda number, frame: None)
    _import_what_runs_need()
    # A copy, which children keep: the sweep takes a worker for dead when its run is, too.
    worker = _Worker(Connection(os.dup(0)), arguments.threads)
    worker.report({"event": "ready"})
    with guarded_output():
        worker.serve(signals)
    os._exit(0)  # at once: the sweep waits, and to tear down what was imported takes seconds


def _import_what_runs_need() -> None:
    """Imports what runs import late: once here, instead of once in every child."""
    import matplotlib.figure  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import tensorboard.summary.writer.record_writer  # noqa: F401
    import torch._dynamo  # noqa: F401
