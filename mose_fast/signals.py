"""Ctrl-C, SIGTERM (Slurm, containers) and SIGHUP (a closed terminal) stop a run between batches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Signals beside Ctrl-C that end a process which does not handle them. A process that ignores them
# (nohup) continues to ignore them.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """A signal stopped the work; a run folder has the state after the last finished batch."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """Whether a signal has asked to stop, and which one."""

    def __init__(self) -> None:
        self.number: int | None = None

    def is_set(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        """Raises :class:`Interrupted` if a signal has asked to stop."""
        if self.number is not None:
            raise Interrupted(self.number)


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Yields a request that a signal sets, so that no step is interrupted half-way; outside the
    main thread, none does. A second Ctrl-C interrupts at once, a second SIGTERM does not: a
    scheduler may send it to all processes of a job, which pass it on to each other.
    """
    request = StopRequest()

    def handle(number: int, frame: Any) -> None:
        if number == request.number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number if request.number is None else request.number

    with _handled(handle, (signal.SIGINT, *_ENDING)):
        yield request


@contextmanager
def raised_at_once() -> Iterator[None]:
    """Makes the first SIGTERM or SIGHUP, and no later one, raise :class:`Interrupted` at once."""
    raised = []

    def handle(number: int, frame: Any) -> None:
        if not raised:
            raised.append(number)
            raise Interrupted(number)

    with _handled(handle, _ENDING):
        yield


@contextmanager
def _handled(handle: Any, numbers: tuple[int, ...]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number, handler in before.items() if number == signal.SIGINT or handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
