"""The time that a run takes: by phase, and of the whole."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

__all__ = ["PHASES", "Clock", "Stopwatch", "laps", "process_start"]

#: What is timed apart. ``capture`` is not in ``train``.
PHASES = ("train", "evaluate", "checkpoint", "capture")


class Clock:
    """Wall-clock seconds of a run, by phase and in all.

    Time that is in no phase (imports, loading and uploading of data, listeners, files) is
    ``other``. A run that is continued adds to the times of its checkpoint; what it lost is in none
    of them.

    Args:
        whole_process: The whole began with this process, not now; where the system does not say
            when that was, it begins now, too.

    Attributes:
        seconds: Seconds of each phase.
        since: What the total is counted from: ``process`` or ``call``.
    """

    def __init__(self, *, whole_process: bool = False) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        started = process_start() if whole_process else None
        self.since = "call" if started is None else "process"
        self._started = time.perf_counter() if started is None else started
        # Of what went before the checkpoint that a run continues from.
        self._earlier = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Counts what is done inside to a phase; phases must not be nested."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Counts time to another phase than the one it was counted to."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def wall(self) -> float:
        """Seconds of the whole until now."""
        return self._earlier + time.perf_counter() - self._started

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold: seconds by phase, and ``other``."""
        return {**self.seconds, "other": max(self.wall - sum(self.seconds.values()), 0.0)}

    def results(self) -> dict[str, float | str]:
        """What the results say: seconds by phase, their sum ``total``, ``other``, the ``wall`` time
        of all, and since when it counts.
        """
        phases = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
        wall, total = round(self.wall, 3), round(sum(self.seconds.values()), 3)
        return {
            **phases,
            "total": total,
            "other": round(max(wall - total, 0.0), 3),
            "wall": max(wall, total),
            "wall_since": self.since,
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Takes over what :meth:`state` gave to a checkpoint, to which the time since this clock's
        own start is added.

        Older checkpoints have no ``other``, and the oldest no ``capture``.
        """
        self.seconds = {phase: state.get(phase, 0.0) for phase in PHASES}
        self._earlier = sum(self.seconds.values()) + state.get("other", 0.0)


class Stopwatch:
    """Seconds between marks: on a card by events in the current stream, which neither wait nor make
    it wait; else by the host's clock.

    What is marked on a card runs there without a gap, as long as the host launches faster than it
    runs.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_card = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """Marks the moment when all that was launched until now is done."""
        if self._on_card:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds from each mark to the next; waits for the last one."""
        if not self._on_card:
            return [after - before for before, after in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]


def laps(device: torch.device, call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of several calls that follow each other without a gap; see
    :class:`Stopwatch`.
    """
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(calls):
        call()
        watch.mark()
    return watch.laps()


def process_start() -> float | None:
    """When this process started, as :func:`time.perf_counter` would have told it, to 10 ms; None
    where the system does not say.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        # By hand, since psutil's create_time is off by up to a second. Fields after the command,
        # which stands in parentheses and may hold anything; the 22nd of all is the start since
        # boot, in ticks.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.perf_counter() - age
