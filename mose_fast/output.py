"""Standard output and error whose failures (closed pipe, full disk, encoding) stop no command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# A pipe whose reader has gone stays closed; a full disk may have room later.
_GONE = (errno.EPIPE, errno.EBADF)


def readable(text: str) -> str:
    r"""A text that every UTF-8 file can hold. The bytes of a file name that Python could not decode
    are decoded as UTF-8, whatever the locale; where they are none, they become ``\xe9``.
    """
    try:
        return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        return text.encode(errors="backslashreplace").decode()


class Guarded:
    """A text stream (None where it is closed) that records its first failure and never raises."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.failure: OSError | None = None
        self._gone = stream is None or stream.closed

    def write(self, text: str) -> int:
        self._attempt(lambda: self._write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(lambda: self.stream.flush())

    def isatty(self) -> bool:
        return not self._gone and self.stream.isatty()

    def settle(self) -> None:
        """Writes what is buffered; drops it if that fails, so that Python does not fail at exit."""
        self.flush()
        if self.failure is None or self.stream is None:
            return
        with suppress(OSError, ValueError, AttributeError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _attempt(self, action: Callable[[], Any]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError as error:
            self.failure = self.failure or error
            self._gone = error.errno in _GONE
        except ValueError:  # the stream was closed
            self._gone = True


@contextmanager
def guarded_output() -> Iterator[Guarded]:
    """Guards ``sys.stdout`` and ``sys.stderr`` and yields the guarded ``sys.stdout``."""
    _open_standard_descriptors()
    before = sys.stdout, sys.stderr
    guarded = Guarded(before[0]), Guarded(before[1])
    sys.stdout, sys.stderr = guarded  # type: ignore[assignment]
    try:
        yield guarded[0]
    finally:
        sys.stdout, sys.stderr = before
        for stream in guarded:
            stream.settle()


def _open_standard_descriptors() -> None:
    """Opens closed standard descriptors on the null device. Otherwise the next opened file would
    get their number, and everything that a library prints would go into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
