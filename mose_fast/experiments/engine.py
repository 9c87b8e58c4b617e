"""What the scheduler needs of a place to compute, and worker processes on this machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from mose_fast.experiments.mps import MpsServer
from mose_fast.experiments.protocol import ENDS, Command, Event, died, how_it_died
from mose_fast.processes import python


class Engine(Protocol):
    """What the scheduler needs of a place to compute; messages: :mod:`.protocol`."""

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


@dataclass
class _Worker:
    process: subprocess.Popen
    pipe: Connection
    began_at: int  # where its part of the log begins
    cell: str | None = None
    ready: bool = False


class LocalEngine:
    """Worker processes on this machine, each of which computes one run at a time. Each is started
    for its first command, and replaced when it dies.

    Args:
        gpus: The GPU of each worker process, as CUDA_VISIBLE_DEVICES names it; None: the CPU.
        logs: Folder for what workers print outside of runs; None: it is not kept.
        lock: Descriptor of the sweep's lock, which workers hold as long as they live; None: none.
        mps: Whether they compute by a server of CUDA's Multi-Process Service (:class:`MpsServer`).
    """

    def __init__(
        self,
        gpus: Sequence[str | None],
        threads: int,
        logs: Path | None = None,
        lock: int | None = None,
        *,
        mps: bool = False,
    ) -> None:
        self.gpus, self.threads, self.lock = list(gpus), threads, lock
        self.mps = MpsServer() if mps else None
        # Closed with the engine.
        self.log = tempfile.TemporaryFile() if logs is None else (logs / "workers.log").open("ab+")  # noqa: SIM115
        self.workers: list[_Worker | None] = [None] * len(self.gpus)

    def free(self) -> int:
        return sum(worker is None or worker.cell is None for worker in self.workers)

    def start(self, command: Command) -> None:
        number = next(n for n, worker in enumerate(self.workers) if worker is None or worker.cell is None)
        worker = self.workers[number] = self.workers[number] or self._launch(self.gpus[number])
        worker.cell = command["cell"]
        self._send(worker, command)

    def events(self, timeout: float) -> list[Event]:
        found: list[Event] = []
        workers = {worker.pipe: worker for worker in filter(None, self.workers)}
        for pipe in wait(workers, timeout):
            worker = workers[pipe]
            try:
                event = pipe.recv()
            except (EOFError, OSError):
                found += self._on_death(worker)
                continue
            if event["event"] == "ready":
                worker.ready = True
                continue
            if event["event"] in ENDS:
                worker.cell = None
            found.append(event)
        return found

    def stop(self, cell: str | None = None) -> None:
        for worker in filter(None, self.workers):
            if cell in (None, worker.cell):
                self._send(worker, {"do": "stop", "cell": cell})

    def close(self) -> None:
        for worker in filter(None, self.workers):
            worker.pipe.close()  # then the worker kills its child and ends
        for worker in filter(None, self.workers):
            try:
                worker.process.wait(10)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.workers = [None] * len(self.gpus)
        if self.mps is not None:
            self.mps.close()
        self.log.close()

    def _launch(self, gpu: str | None) -> _Worker:
        began_at = os.fstat(self.log.fileno()).st_size
        pipe, its_end = Pipe()
        with its_end:
            process = subprocess.Popen(
                python("mose_fast.experiments.worker", "--threads", str(self.threads)),
                stdin=its_end,
                stdout=self.log,
                stderr=self.log,
                env=self._environment(gpu),
                pass_fds=() if self.lock is None else (self.lock,),
                start_new_session=True,  # the terminal's Ctrl-C goes to the sweep alone
            )
        return _Worker(process, pipe, began_at)

    def _environment(self, gpu: str | None) -> dict[str, str]:
        """A worker's environment: its threads are known before torch is imported."""
        threads = str(self.threads)
        # The threads of NumPy's matrix products, which no run needs, would make it unsafe to fork.
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "1"}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        return {**os.environ, **environment, **({} if self.mps is None else self.mps.environment)}

    def _send(self, worker: _Worker, command: Command) -> None:
        with suppress(OSError):  # it has died, which events() will report
            worker.pipe.send(command)

    def _on_death(self, worker: _Worker) -> list[Event]:
        """A worker has ended by itself, and its run with it. The next command starts another."""
        worker.pipe.close()
        status = worker.process.wait()
        self.workers[self.workers.index(worker)] = None
        signal = -status if status < 0 else None
        if worker.cell is None:
            return []
        if worker.ready:
            return [died(worker.cell, signal)]
        # By its place, since the workers write at the file's position.
        text = os.pread(self.log.fileno(), 2**20, worker.began_at)
        said = text.decode(errors="replace").splitlines()
        reason = f"said: {said[-1]}" if said and signal is None else how_it_died(signal)
        return [{"event": "failed", "cell": worker.cell, "error": f"a worker process {reason}, when it started"}]
