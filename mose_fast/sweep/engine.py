"""What the scheduler needs of a place to compute, and worker processes on this machine."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mose_fast.sweep.protocol import ENDS, Command, Event, Reader, died, send

__all__ = ["Engine", "LocalEngine", "Slot"]


class Engine(Protocol):
    """What the scheduler needs of a place to compute; messages: :mod:`mose_fast.sweep.protocol`."""

    def free(self) -> int:
        """How many more commands can start now."""

    def start(self, command: Command) -> None:
        """Starts ``run`` or ``measure``."""

    def events(self, timeout: float) -> list[Event]:
        """The events of cells since the last call; waits for at most ``timeout`` seconds."""

    def stop(self, cell: str | None = None) -> None:
        """Makes the run of a cell, or every run, write a checkpoint and stop."""

    def close(self) -> None:
        """Ends all processes at once."""


@dataclass(frozen=True)
class Slot:
    """Room for one worker process.

    Attributes:
        runs: Number of runs it computes at the same time; several share the process, in threads.
        card: The card it uses, as CUDA_VISIBLE_DEVICES names it; None: the CPU.
    """

    runs: int = 1
    card: str | None = None


@dataclass
class _Worker:
    slot: Slot
    process: subprocess.Popen
    events: Reader
    cells: set[str] = field(default_factory=set)


def _environment(threads: int, card: str | None) -> dict[str, str]:
    """A worker's environment: threads, known before torch's import, and a path to this package."""
    environment = dict(os.environ)
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # NumPy's matrix products, which no run needs. Their threads would make it unsafe to fork.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
    if card is not None:
        environment["CUDA_VISIBLE_DEVICES"] = card
    return environment


class LocalEngine:
    """Worker processes on this machine. Each is started for its first command, and replaced when
    it dies.

    Args:
        slots: One for each worker process.
        threads: Number of CPU threads of each run.
        logs: Folder for what workers print outside of runs; None: they print to stderr.
        lock: File descriptor of the sweep's lock, which the workers inherit, so that they hold the
            lock as long as they live; None: no lock.
    """

    def __init__(self, slots: Sequence[Slot], threads: int, logs: Path | None = None, lock: int | None = None) -> None:
        self.slots, self.threads, self.logs, self.lock = list(slots), threads, logs, lock
        self.workers: list[_Worker | None] = [None] * len(self.slots)
        self.selector = selectors.DefaultSelector()

    def free(self) -> int:
        return sum(map(self._room, range(len(self.slots))))

    def start(self, command: Command) -> None:
        # The emptiest worker, so that cards are filled evenly.
        number = max(range(len(self.slots)), key=self._room)
        worker = self.workers[number] = self.workers[number] or self._launch(self.slots[number])
        worker.cells.add(command["cell"])
        self._send(worker, command)

    def events(self, timeout: float) -> list[Event]:
        found: list[Event] = []
        for key, _ in self.selector.select(timeout) if self.selector.get_map() else []:
            worker: _Worker = key.data
            for event in worker.events.read():
                if event["event"] in ENDS:
                    worker.cells.discard(event["cell"])
                found.append(event)
            if worker.events.closed:
                found += self._on_death(worker)
        return found

    def stop(self, cell: str | None = None) -> None:
        for worker in filter(None, self.workers):
            if cell is None or cell in worker.cells:
                self._send(worker, {"do": "stop", "cell": cell})

    def close(self) -> None:
        for worker in filter(None, self.workers):
            self.selector.unregister(worker.process.stdout)
            worker.process.stdin.close()  # then the worker kills its child and ends
        for worker in filter(None, self.workers):
            try:
                worker.process.wait(10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.process.stdout.close()
        self.workers = [None] * len(self.slots)
        self.selector.close()

    def _room(self, number: int) -> int:
        worker = self.workers[number]
        return self.slots[number].runs - (len(worker.cells) if worker else 0)

    def _launch(self, slot: Slot) -> _Worker:
        command = [sys.executable, "-m", "mose_fast.sweep.worker", "--threads", str(self.threads)]
        command += ["--together"] if slot.runs > 1 else []
        with nullcontext() if self.logs is None else open(self.logs / "workers.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.threads, slot.card),
                pass_fds=() if self.lock is None else (self.lock,),
                start_new_session=True,  # the terminal's Ctrl-C goes to the sweep alone
            )
        worker = _Worker(slot, process, Reader(process.stdout.fileno()))
        self.selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _send(self, worker: _Worker, command: Command) -> None:
        with suppress(BrokenPipeError):  # it has died, which events() will report
            send(worker.process.stdin.fileno(), command)

    def _on_death(self, worker: _Worker) -> list[Event]:
        """A worker has ended by itself, and its runs with it. The next command starts another."""
        self.selector.unregister(worker.process.stdout)
        worker.process.stdout.close()
        status = worker.process.wait()
        self.workers[self.workers.index(worker)] = None
        return [died(cell, -status if status < 0 else None) for cell in sorted(worker.cells)]
