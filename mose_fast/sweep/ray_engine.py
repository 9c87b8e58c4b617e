"""Where the runs of a sweep compute: a Ray cluster (``pip install 'mose-fast[ray]'``).

Each run is a Ray task that starts an ordinary worker process for it, so it computes as on one
machine. The sweep's folder must be on a file system that all machines share.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mose_fast.config import ConfigError
from mose_fast.sweep.engine import worker_command, worker_environment
from mose_fast.threads import usable_cores
from mose_fast.train.files import RunError

__all__ = ["RayEngine"]

# Seconds until an address counts as unreachable.
_PATIENCE = 5.0

# Seconds that a run gets to write its checkpoint when its task is ended.
_GRACE = 20.0

# Events that end a command.
_ENDS = ("done", "stopped", "failed", "died")


class RayEngine:
    """Runs commands as tasks of a Ray cluster.

    Args:
        address: Of the cluster, ``HOST:PORT`` or ``auto``; ``local`` starts one on this machine.
        runs: At the same time, at most; None: as many as the cluster has room for.
        threads: Of the CPU, for each run.
        cards: Part of a card for each run, 0 for the CPU.
        folder: Of the sweep.

    Raises:
        ConfigError: Ray is not installed.
        RunError: There is no cluster at the address, or it has no room for a single run.
    """

    def __init__(self, address: str, runs: int | None, threads: int, cards: float, folder: Path) -> None:
        # Read when Ray is imported: something else may listen at the address, and 20 tries would
        # take half a minute.
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
        settings: dict[str, Any] = (
            {"log_to_driver": False, "include_dashboard": False} if address == "local" else {"log_to_driver": False}
        )
        if address == "local":
            settings["num_cpus"] = usable_cores()
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, logging_level="error", **settings)
            if threading.current_thread() is threading.main_thread():
                signal.signal(
                    signal.SIGTERM, on_terminate
                )  # Ray puts a handler of its own there, which ends this process
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(f"cannot reach a Ray cluster at {address}: {error}") from error
        resources = ray.cluster_resources()
        # The queue's own actor takes no CPU while it waits.
        fitting = int(resources.get("CPU", 0) // threads)
        if cards:
            fitting = min(fitting, int(resources.get("GPU", 0) / cards))
        if fitting < 1:
            ray.shutdown()
            raise RunError(
                f"the Ray cluster at {address} has {resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g}"
                f" GPUs; one run wants {threads} and {cards:g}"
            )
        self.runs = fitting if runs is None else min(runs, fitting)
        self.threads = threads
        self.token = folder / "sweep.json"
        self.queue = Queue(actor_options={"num_cpus": 0})
        self.task = ray.remote(num_cpus=threads, num_gpus=cards, max_retries=0, max_calls=1)(_run_on_this_machine)
        self.running: dict[Any, str] = {}
        self.ended: set[str] = set()

    def free(self) -> int:
        return self.runs - len(self.running)

    def start(self, command: dict[str, Any]) -> None:
        self.ended.discard(command["cell"])
        self.running[self.task.remote(command, self.threads, str(self.token), self.queue)] = command["cell"]

    def events(self, timeout: float) -> list[dict[str, Any]]:
        finished: list[Any] = []
        if self.running:
            finished, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=timeout)
        found = self.queue.get_nowait_batch(self.queue.qsize())
        self.ended |= {event["cell"] for event in found if event["event"] in ("done", "stopped", "failed", "died")}
        for task in finished:
            cell = self.running.pop(task)
            try:
                self.ray.get(task)
            except self.ray.exceptions.RayError as error:
                if cell not in self.ended:
                    cause = getattr(error, "cause", None) or error
                    kind = "failed" if isinstance(cause, RunError) else "died"
                    found.append({"event": kind, "cell": cell, "signal": None, "error": str(cause)})
        return found

    def stop(self) -> None:
        for task in self.running:
            self.ray.cancel(task, force=False)

    def close(self) -> None:
        for task in self.running:
            self.ray.cancel(task, force=True)
        self.ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        if address not in ("auto", "local"):
            raise ConfigError(f"address is {address!r}; wanted HOST:PORT, auto or local")
        return
    if not port.isdigit():
        raise ConfigError(f"address is {address!r}; wanted HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), _PATIENCE).close()
    except OSError as error:
        raise RunError(f"cannot reach a Ray cluster at {address}: {error}") from error


def _run_on_this_machine(command: dict[str, Any], threads: int, token: str, queue: Any) -> None:
    """A Ray task: one worker process for one command; cancelling it makes the run write a
    checkpoint and stop.
    """
    if command["do"] == "run" and not Path(token).is_file():
        raise RunError(
            f"machine {socket.gethostname()} does not see {token}; wanted the sweep's folder on a file system that all"
            " machines share"
        )
    worker = subprocess.Popen(  # its log of the run lies in the sweep's folder
        worker_command(threads, together=False),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=worker_environment(threads, None),
        start_new_session=True,
    )

    def send(what: dict[str, Any]) -> None:
        worker.stdin.write((json.dumps(what) + "\n").encode())
        worker.stdin.flush()

    send(command)
    event: dict[str, Any] | None = None
    try:
        while True:
            try:
                if event is None:
                    line = worker.stdout.readline()
                    event = json.loads(line) if line else {"event": "died", "cell": command["cell"], "signal": None}
                if "cell" in event:
                    queue.put(event)
                if event["event"] in _ENDS:
                    return
                event = None
            except KeyboardInterrupt:  # how Ray cancels
                send({"do": "stop"})
    finally:
        if event is None or event["event"] not in _ENDS:
            # Ray ends this task, or its machine: the run writes its checkpoint first.
            with suppress(OSError, subprocess.TimeoutExpired):
                send({"do": "stop"})
                _wait_for_end(worker)
        worker.stdin.close()
        worker.wait()


def _wait_for_end(worker: subprocess.Popen) -> None:
    """Until the run has ended, or the time that a cluster gives is over."""
    deadline = time.monotonic() + _GRACE
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0.0)):
            part = os.read(worker.stdout.fileno(), 65536)
            if not part or any(f'"event": "{end}"'.encode() in part for end in _ENDS):
                return
