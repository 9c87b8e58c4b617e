"""Which access to memory comes before which: clocks of streams, events and host threads, and the
accesses that no order holds apart.

The clocks are those of PyTorch's own CUDA sanitizer (``torch.cuda._sanitizer``). A host thread is
one more stream there: what it launches comes after all that it did and knew before, and it learns
what a stream did by waiting for an event or for the stream.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import CodeType

from torch.cuda._sanitizer import StreamSynchronizations

__all__ = ["Access", "Checker", "Memory", "Race", "RaceError"]

# Reports that are kept; one fault may show in every step.
_MOST_RACES = 200

# Frames of the package that a report names.
_FRAMES = 4


@dataclass(frozen=True)
class Access:
    """One launch, or one action of the host, that reads or writes memory."""

    seq: int
    stream: Hashable
    writes: bool
    what: str
    where: tuple[tuple[CodeType, int], ...]

    def __str__(self) -> str:
        places = (f"{code.co_filename.rpartition('mose_fast/')[2]}:{line} {code.co_name}" for code, line in self.where)
        place = " < ".join(places) or "outside the package"
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.stream} ({place})"


@dataclass(frozen=True)
class Race:
    """Two accesses to one piece of memory, of which nothing says which comes first."""

    memory: str
    later: Access
    earlier: Access

    def __str__(self) -> str:
        return f"{self.memory}: {self.later}\n    is not ordered after\n    {self.earlier}"


class RaceError(AssertionError):
    """A race, where the checker is to stop at the first one."""


@dataclass
class _Cell:
    """A piece of memory: its last write, and the last read of each stream since."""

    write: Access | None = None
    reads: dict[Hashable, Access] = field(default_factory=dict)


class Memory:
    """One allocation, in pieces that split where accesses begin and end."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self._starts, self._cells = [0, max(size, 1)], [_Cell(), _Cell()]

    def cells(self, start: int, end: int) -> Iterator[_Cell]:
        """The pieces of the bytes from ``start`` to ``end``."""
        first, last = self._cut(start), self._cut(end)
        return iter(self._cells[first:last])

    def all(self) -> Iterator[_Cell]:
        return iter(self._cells)

    def _cut(self, at: int) -> int:
        i = bisect_left(self._starts, at)
        if i == len(self._starts) or self._starts[i] != at:
            before = self._cells[i - 1]
            self._starts.insert(i, at)
            self._cells.insert(i, _Cell(before.write, dict(before.reads)))
        return i


class Checker:
    """Takes launches, waits and hand-overs in the order in which the program makes them, and
    collects races.

    Args:
        stop: Raise :class:`RaceError` at the first one.

    Attributes:
        stop: The argument.
        races: What was found, each pair of places in the package once.
    """

    def __init__(self, *, stop: bool = False) -> None:
        self.races: list[Race | str] = []
        self.stop = stop
        self._order = StreamSynchronizations()
        self._numbers, self._seen = count(1), set()
        self._local = threading.local()

    def host(self) -> str:
        """The name of the current host thread among the streams."""
        name = getattr(self._local, "name", None)
        if name is None:
            # Threads may have equal names; a thread that ended must not lend its clock to another.
            name = self._local.name = f"host thread {threading.current_thread().name} #{next(self._numbers)}"
            self._order.create_stream(name)
        return name

    def access(
        self, stream: Hashable, reads: list[tuple[Memory, int, int]], writes: list[tuple[Memory, int, int]], what: str
    ) -> None:
        """A launch on a stream, or an action of the host where ``stream`` is :meth:`host`."""
        host = self.host()
        if stream != host:
            self._learn(stream, host)
        seq = next(self._numbers)
        self._order.update_seq_num(stream, seq)
        where = _where()
        if reads:
            access = Access(seq, stream, False, what, where)
            for memory, start, end in reads:
                for cell in memory.cells(start, end):
                    self._check(memory, access, cell.write)
                    cell.reads[stream] = access
        if writes:
            access = Access(seq, stream, True, what, where)
            for memory, start, end in writes:
                for cell in memory.cells(start, end):
                    for earlier in tuple(cell.reads.values()) or (cell.write,):
                        self._check(memory, access, earlier)
                    cell.write, cell.reads = access, {}

    def reuse(self, stream: Hashable, memory: Memory, recorded: set[Hashable], freed: Hashable) -> None:
        """Memory that was freed is given away on ``stream``.

        Args:
            recorded: Streams that the allocator waits for before it gives the memory away.
            freed: The event of :meth:`record` of the host thread that freed it: what that thread
                knew to be done is done.
        """
        access = Access(next(self._numbers), stream, True, "reuse of memory whose last reference has gone", _where())
        done = self._order.recorded_sync_states.pop(freed)
        for cell in memory.all():
            for earlier in cell.reads.values() or (cell.write,):
                if (
                    earlier is not None
                    and earlier.stream not in recorded
                    and earlier.seq > done.get(earlier.stream, -1)
                ):
                    self._check(memory, access, earlier)

    def record(self, event: Hashable, stream: Hashable) -> None:
        host = self.host()
        if stream != host:
            self._learn(stream, host)
        self._order.record_state(event, stream)

    def wait(self, stream: Hashable, event: Hashable) -> None:
        """What comes next on ``stream``, which may be :meth:`host`, comes after the event."""
        self._order.stream_wait_for_event(stream, event)

    def wait_for_stream(self, stream: Hashable, other: Hashable) -> None:
        """What comes next on ``stream`` comes after all that was launched on ``other``."""
        self._learn(stream, other)

    def wait_for_all(self) -> None:
        """The host waits for the GPU."""
        host = self.host()
        for stream in list(self._order.current_sync_states):
            if not str(stream).startswith("host thread"):
                self._learn(host, stream)

    def knows(self, event: Hashable) -> bool:
        """Whether the host can only find the event done."""
        known = self._order.current_sync_states[self.host()]
        return all(known.get(stream, -1) >= seq for stream, seq in self._order.recorded_sync_states[event].items())

    def _learn(self, stream: Hashable, other: Hashable) -> None:
        self._order.record_state("last state", other)
        self._order.stream_wait_for_event(stream, "last state")

    def _check(self, memory: Memory, later: Access, earlier: Access | None) -> None:
        if (
            earlier is None
            or earlier.stream == later.stream
            or self._order.is_ordered_after(later.stream, earlier.seq, earlier.stream)
        ):
            return
        places = (later.what, later.where, earlier.what, earlier.where)
        if (places not in self._seen or not later.where) and len(self.races) < _MOST_RACES:
            self._seen.add(places)
            self.report(Race(memory.name, later, earlier))

    def report(self, race: Race | str) -> None:
        self.races.append(race)
        if self.stop:
            raise RaceError(str(race))


@cache
def _of_the_package(file: str) -> bool:
    return "/mose_fast/" in file and "/tests/" not in file


def _where() -> tuple[tuple[CodeType, int], ...]:
    """The innermost lines of the package, the innermost first."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < _FRAMES:
        if _of_the_package(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
