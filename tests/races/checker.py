"""Which access to memory comes before which, and the accesses that no order holds apart.

Each stream and each host thread has a vector clock, as in ``torch.cuda._sanitizer``. What a thread
launches comes after all that it did and knew before; it learns what a stream did by waiting for an
event or for the stream.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import CodeType

# Reports that are kept; one fault may show in every step.
_MOST_RACES = 200

# Frames of the package that a report names.
_FRAMES = 4

# For each stream or thread, the number of its last access that comes before.
_Clock = dict[Hashable, int]


@dataclass(slots=True, eq=False)
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


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of memory: its last write, and the last read of each stream since."""

    write: Access | None = None
    reads: dict[Hashable, Access] = field(default_factory=dict)

    def last(self) -> Iterable[Access]:
        """What a write must come after."""
        return self.reads.values() or (() if self.write is None else (self.write,))


class Memory:
    """One allocation, in pieces that split where accesses begin and end."""

    def __init__(self, size: int, name: object) -> None:
        self.size, self.name = size, name
        self._starts, self._pieces = [0], [_Piece()]

    def __str__(self) -> str:
        return str(self.name)

    def pieces(self, start: int, end: int) -> list[_Piece]:
        """Those of the bytes from ``start`` to ``end``."""
        if start == 0 and end == self.size:
            return self._pieces
        first, last = self._cut(start), self._cut(end)
        return self._pieces[first:last]

    def _cut(self, at: int) -> int:
        i = bisect_left(self._starts, at)
        if at < self.size and (i == len(self._starts) or self._starts[i] != at):
            before = self._pieces[i - 1]
            self._starts.insert(i, at)
            self._pieces.insert(i, _Piece(before.write, dict(before.reads)))
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
        self._clocks: defaultdict[Hashable, _Clock] = defaultdict(dict)
        self._events: dict[Hashable, _Clock] = {}
        self._numbers, self._seen = count(1), set()
        self._local = threading.local()
        # Launches are many, and what threads know changes seldom: how often it has, when each
        # stream last learned it, and the last copy of it.
        self._changes = 0
        self._told: dict[Hashable, tuple[str, int]] = {}
        self._known: tuple[tuple[str, int] | None, _Clock] = (None, {})

    def host(self) -> str:
        """The name of the current host thread among the streams."""
        name = getattr(self._local, "name", None)
        if name is None:
            # Threads may have equal names; a thread that ended must not lend its clock to another.
            name = self._local.name = f"host thread {threading.current_thread().name} #{next(self._numbers)}"
        return name

    def access(
        self, stream: Hashable, reads: list[tuple[Memory, int, int]], writes: list[tuple[Memory, int, int]], what: str
    ) -> None:
        """A launch on a stream, or an action of the host where ``stream`` is :meth:`host`."""
        self._tell(stream)
        clock, seq, where = self._clocks[stream], next(self._numbers), _where()
        clock[stream] = seq
        if isinstance(stream, str):
            self._changes += 1
        if reads:
            access = Access(seq, stream, False, what, where)
            for memory, start, end in reads:
                for piece in memory.pieces(start, end):
                    earlier = piece.write
                    if earlier is not None and clock.get(earlier.stream, 0) < earlier.seq:
                        self._found(memory, access, earlier)
                    piece.reads[stream] = access
        if writes:
            access = Access(seq, stream, True, what, where)
            for memory, start, end in writes:
                for piece in memory.pieces(start, end):
                    for earlier in piece.last():
                        if clock.get(earlier.stream, 0) < earlier.seq:
                            self._found(memory, access, earlier)
                    piece.write, piece.reads = access, {}

    def reuse(self, stream: Hashable, memory: Memory, recorded: set[Hashable], done: _Clock) -> None:
        """Memory that was freed is given away on ``stream``.

        Args:
            recorded: Streams that the allocator waits for before it gives the memory away.
            done: What the host thread that freed it knew to be done (:meth:`known`).
        """
        clock = self._clocks[stream]
        for piece in memory.pieces(0, memory.size):
            for earlier in piece.last():
                if max(clock.get(earlier.stream, 0), done.get(earlier.stream, 0)) < earlier.seq and (
                    earlier.stream not in recorded
                ):
                    what = "reuse of memory whose last reference has gone"
                    self._found(memory, Access(next(self._numbers), stream, True, what, _where()), earlier)

    def record(self, event: Hashable, stream: Hashable) -> None:
        self._tell(stream)
        self._events[event] = self._clocks[stream].copy()

    def wait(self, stream: Hashable, event: Hashable) -> None:
        """What comes next on ``stream``, which may be :meth:`host`, comes after the event."""
        self._learn(stream, self._events.get(event, {}))

    def wait_for_stream(self, stream: Hashable, other: Hashable) -> None:
        """What comes next on ``stream`` comes after all that was launched on ``other``."""
        self._learn(stream, self._clocks[other])

    def wait_for_all(self) -> None:
        """The host waits for the GPU."""
        for stream in [stream for stream in self._clocks if not isinstance(stream, str)]:
            self._learn(self.host(), self._clocks[stream])

    def knows(self, event: Hashable) -> bool:
        """Whether the host can only find the event done."""
        known = self._clocks[self.host()]
        return all(known.get(stream, 0) >= seq for stream, seq in self._events[event].items())

    def known(self) -> _Clock:
        """What the current host thread did and knows."""
        now = self.host(), self._changes
        if self._known[0] != now:
            self._known = now, self._clocks[now[0]].copy()
        return self._known[1]

    def _tell(self, stream: Hashable) -> None:
        """What is launched next comes after all that the host thread knows."""
        now = self.host(), self._changes
        if self._told.get(stream) != now and not isinstance(stream, str):
            self._learn(stream, self._clocks[now[0]])
            self._told[stream] = now

    def _learn(self, stream: Hashable, other: _Clock) -> None:
        clock = self._clocks[stream]
        for one, seq in other.items():
            if clock.get(one, 0) < seq:
                clock[one] = seq
        if isinstance(stream, str):
            self._changes += 1

    def _found(self, memory: Memory, later: Access, earlier: Access) -> None:
        places = (later.what, later.where, earlier.what, earlier.where)
        if (places not in self._seen or not later.where) and len(self.races) < _MOST_RACES:
            self._seen.add(places)
            self.report(Race(str(memory), later, earlier))

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
