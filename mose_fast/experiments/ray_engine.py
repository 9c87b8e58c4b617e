"""Runs a sweep on a Ray cluster (``pip install 'mose-fast[ray]'``).

Each run is a Ray task that starts an ordinary worker process, so it computes as on a single
machine. The sweep's folder must be on a file system that all machines share.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mose_fast.experiments.engine import LocalEngine
from mose_fast.experiments.protocol import ENDS, Command, Event, died
from mose_fast.runs.files import RunError
from mose_fast.settings.run import ConfigError
from mose_fast.threads import usable_cores

# Seconds until an address counts as unreachable, and for a run to write its checkpoint when its
# task is ended.
_PATIENCE, _GRACE = 5.0, 20.0


class RayEngine:
    """Runs commands as tasks of a Ray cluster.

    Args:
        runs: Largest number of runs at the same time; None: as many as the cluster has room for.
        gpus: Share of a GPU that each run gets, 0 for the CPU.
    """

    def __init__(self, address: str, runs: int | None, threads: int, gpus: float, folder: Path) -> None:
        # Ray reads these when it is imported. Something other than Ray may listen at the address,
        # and the usual 20 attempts would take half a minute.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
        try:
            import ray
            from ray.util.queue import Queue
        except ImportError as error:
            raise ConfigError(
                "engine is 'ray', but Ray is not installed; first: pip install 'mose-fast[ray]'"
            ) from error
        self.ray = ray
        _check_reachable(address)
        self.token = str((folder / "sweep.json").absolute())
        started = {"include_dashboard": False, "num_cpus": usable_cores()} if address == "local" else {}
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            with _in_folder_of_this_package():
                ray.init(address=address, logging_level="error", log_to_driver=False, **started)
            if threading.current_thread() is threading.main_thread():
                # Ray has installed a handler that ends this process.
                signal.signal(signal.SIGTERM, on_terminate)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(f"cannot reach a Ray cluster at {address}: {error}") from error
        resources = ray.cluster_resources()
        there = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
        fitting = min(int(there["CPU"] // threads), int(there["GPU"] / gpus) if gpus else sys.maxsize)
        if fitting < 1:
            ray.shutdown()
            raise RunError(
                f"the Ray cluster at {address} has {there['CPU']:g} CPUs and {there['GPU']:g} GPUs; one run wants"
                f" {threads} and {gpus:g}"
            )
        self.runs = fitting if runs is None else min(runs, fitting)
        self.threads = threads
        self.queue = Queue(actor_options={"num_cpus": 0})  # its actor only waits
        self.task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0, max_calls=1)(_run_on_this_machine)
        self.running: dict[Any, str] = {}
        self.ended: set[Any] = set()

    def free(self) -> int:
        return self.runs - len(self.running)

    def start(self, command: Command) -> None:
        self.running[self.task.remote(command, self.threads, self.token, self.queue)] = command["cell"]

    def events(self, timeout: float) -> list[Event]:
        finished: list[Any] = []
        if self.running:
            finished, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=timeout)
        found = self.queue.get_nowait_batch(self.queue.qsize())
        for event in found:
            if event["event"] in ENDS:  # of the oldest task: the cell may have started again
                tasks = (task for task, cell in self.running.items() if cell == event["cell"])
                self.ended.add(next((task for task in tasks if task not in self.ended), None))
        for task in finished:
            cell = self.running.pop(task)
            last = died(cell)
            try:
                self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                # Of an exception in the task, such as an import that failed on its machine; a task
                # whose process was killed has none.
                cause = getattr(error, "cause", None)
                if isinstance(cause, Exception):
                    name = "" if isinstance(cause, RunError) else f"{type(cause).__name__}: "
                    lines = str(cause).strip().splitlines() or [repr(cause)]
                    last = {"event": "failed", "cell": cell, "error": f"{name}{lines[-1]}"}
            if task not in self.ended:
                found.append(last)
        return found

    def stop(self, cell: str | None = None) -> None:
        for task, running in self.running.items():
            if cell in (None, running):
                self.ray.cancel(task, force=False)

    def close(self) -> None:
        for task in self.running:
            self.ray.cancel(task, force=True)
        self.ray.shutdown()


@contextmanager
def _in_folder_of_this_package() -> Iterator[None]:
    """Ray's processes look into the folder that is current at ``ray.init`` first. What they import
    should be what this process imports, not what happens to lie in the user's folder.
    """
    before = os.getcwd()
    os.chdir(Path(__file__).resolve().parents[2])
    try:
        yield
    finally:
        os.chdir(before)


def _check_reachable(address: str) -> None:
    """Refuses an address where nobody listens, which Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"address is {address!r}; wanted HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), _PATIENCE).close()
    except OSError as error:
        raise RunError(f"cannot reach a Ray cluster at {address}: {error}") from error


def _run_on_this_machine(command: Command, threads: int, token: str, queue: Any) -> None:
    """A Ray task: starts one worker process for one command and passes its events on. Cancelling
    the task makes the run write a checkpoint and stop.
    """
    if command["do"] == "run" and not Path(token).is_file():
        raise RunError(
            f"machine {socket.gethostname()} does not see {token}; wanted the sweep's folder on a file system that all"
            " machines share"
        )
    engine = LocalEngine([None], threads)
    unsent: deque[Event] = deque()
    try:
        engine.start(command)
        while unsent or not engine.free():
            try:
                unsent += engine.events(1.0)
                while unsent:
                    queue.put(unsent[0])
                    unsent.popleft()
            except KeyboardInterrupt:  # Ray cancels the task
                engine.stop()
    finally:
        # If Ray ends this task or its machine, the run writes its checkpoint first.
        engine.stop()
        deadline = time.monotonic() + _GRACE
        while not engine.free() and time.monotonic() < deadline:
            engine.events(1.0)
        engine.close()
