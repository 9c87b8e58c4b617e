"""Ctrl-C, SIGTERM (Slurm, containers) and SIGHUP (a closed terminal): one way to stop, between two
batches.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupted", "StopRequest", "raised_at_once", "stop_request"]

# Those that end a process unless it handles them, beside Ctrl-C. A process that was told to ignore
# them (nohup) goes on ignoring them.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """A signal ended the work. The state of a run up to its last finished batch is in the run
    folder, if there is one.

    Attributes:
        number: Of the signal; Ctrl-C's unless told otherwise.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequest:
    """Whether a signal asks to stop, and which."""

    def __init__(self) -> None:
        self.number: int | None = None

    def is_set(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        """Stops the work here, where it is asked for.

        Raises:
            Interrupted: It is.
        """
        if self.number is not None:
            raise Interrupted(self.number)


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """What a signal sets instead of breaking into a half-done step; a second Ctrl-C interrupts at
    once.

    SIGTERM may come more than once, as it does where a job's processes are all sent it and pass it
    on to each other. Outside the main thread, where Python delivers no signals, nothing sets it.
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
    """Makes SIGTERM and SIGHUP raise :class:`Interrupted` where the program is, once; Ctrl-C does
    so by itself.
    """
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
