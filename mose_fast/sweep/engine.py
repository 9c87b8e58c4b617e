"""Where the runs of a sweep compute: worker processes on this machine."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Engine", "LocalEngine", "Slot", "worker_command", "worker_environment"]


class Engine(Protocol):
    """What the scheduler needs of a place to compute."""

    def free(self) -> int:
        """How many more commands can start now."""

    def start(self, command: dict[str, Any]) -> None:
        """Starts a command of :mod:`mose_fast.sweep.worker`."""

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """What has happened, after at most ``timeout`` seconds; for each command, exactly one event
        ends it.
        """

    def stop(self) -> None:
        """Has every run write a checkpoint and stop."""

    def close(self) -> None:
        """Ends everything at once."""


@dataclass(frozen=True)
class Slot:
    """A worker process to be.

    Attributes:
        runs: It computes at the same time; more than one share the process, in threads.
        card: It sees, as CUDA_VISIBLE_DEVICES names it; None: the CPU.
    """

    runs: int = 1
    card: str | None = None


@dataclass
class _Worker:
    slot: Slot
    process: subprocess.Popen
    cells: set[str] = field(default_factory=set)
    buffer: bytes = b""


def worker_command(threads: int, *, together: bool) -> list[str]:
    """The command line of a worker process."""
    command = [sys.executable, "-m", "mose_fast.sweep.worker", "--threads", str(threads)]
    return [*command, "--together"] if together else command


def worker_environment(threads: int, card: str | None) -> dict[str, str]:
    """The environment of a worker process: its threads are counted before torch starts, and it
    finds this very package.
    """
    environment = dict(os.environ)
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # Of NumPy alone, whose products no run needs; its threads would stand in the way of forking.
    environment["OPENBLAS_NUM_THREADS"] = "1"
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
    if card is not None:
        environment["CUDA_VISIBLE_DEVICES"] = card
    return environment


class LocalEngine:
    """Worker processes on this machine, each started with its first command; one that dies is
    replaced.

    Args:
        slots: A worker process each.
        threads: Of the CPU, for each run.
        logs: Folder for what workers print outside of runs.
        lock: File descriptor that they inherit, to hold the sweep's lock as long as they live;
            None: none.
    """

    def __init__(self, slots: Sequence[Slot], threads: int, logs: Path, lock: int | None = None) -> None:
        self.slots, self.threads, self.logs, self.lock = list(slots), threads, logs, lock
        self.workers: list[_Worker | None] = [None] * len(self.slots)
        self.selector = selectors.DefaultSelector()
        self.stopping = False

    def free(self) -> int:
        return sum(
            slot.runs - (len(worker.cells) if worker else 0)
            for slot, worker in zip(self.slots, self.workers, strict=True)
        )

    def start(self, command: dict[str, Any]) -> None:
        # The emptiest worker, so that cards are filled evenly.
        number = max(
            range(len(self.slots)),
            key=lambda i: self.slots[i].runs - (len(self.workers[i].cells) if self.workers[i] else 0),
        )
        worker = self.workers[number] = self.workers[number] or self._launch(self.slots[number])
        worker.cells.add(command["cell"])
        self._send(worker, command)

    def events(self, timeout: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for key, _ in self.selector.select(timeout) if self.selector.get_map() else []:
            worker: _Worker = key.data
            part = os.read(worker.process.stdout.fileno(), 65536)
            *lines, worker.buffer = (worker.buffer + part).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] in ("done", "stopped", "failed", "died"):
                    worker.cells.discard(event["cell"])
                if "cell" in event:
                    found.append(event)
            if not part:
                found += self._buried(worker)
        return found

    def stop(self) -> None:
        self.stopping = True
        for worker in filter(None, self.workers):
            self._send(worker, {"do": "stop"})

    def close(self) -> None:
        for worker in filter(None, self.workers):
            self.selector.unregister(worker.process.stdout)
            worker.process.stdin.close()  # upon this it kills its child and ends
        for worker in filter(None, self.workers):
            try:
                worker.process.wait(10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.process.stdout.close()
        self.workers = [None] * len(self.slots)
        self.selector.close()

    def _launch(self, slot: Slot) -> _Worker:
        with open(self.logs / "workers.log", "ab") as log:
            process = subprocess.Popen(
                worker_command(self.threads, together=slot.runs > 1),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(self.threads, slot.card),
                pass_fds=() if self.lock is None else (self.lock,),
                start_new_session=True,  # the terminal's Ctrl-C goes to the sweep alone
            )
        worker = _Worker(slot, process)
        self.selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _send(self, worker: _Worker, command: dict[str, Any]) -> None:
        try:
            worker.process.stdin.write((json.dumps(command) + "\n").encode())
            worker.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; events() will tell

    def _buried(self, worker: _Worker) -> list[dict[str, Any]]:
        """A worker has ended by itself: its runs have died with it, and the next command starts
        another.
        """
        self.selector.unregister(worker.process.stdout)
        worker.process.stdout.close()
        status = worker.process.wait()
        self.workers[self.workers.index(worker)] = None
        return [
            {"event": "died", "cell": cell, "signal": -status if status < 0 else None} for cell in sorted(worker.cells)
        ]
