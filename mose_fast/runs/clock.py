"""Measures the time of a run, by phase and in total."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch

#: The phases that are timed separately. ``capture`` is not part of ``train``.
PHASES = ("train", "evaluate", "checkpoint", "capture")


class Clock:
    """Wall-clock ``seconds`` of a run, by phase, and in all ``since`` the start of the ``process``
    (``whole_process``, where the system tells it) or of the ``call``.

    Time in no phase (imports, loading and uploading data, listeners, files) is ``other``. A resumed
    run adds to the times of its checkpoint; the time of lost work is not counted.
    """

    def __init__(self, *, whole_process: bool = False) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        started = process_start() if whole_process else None
        self.since = "call" if started is None else "process"
        self._started = time.perf_counter() if started is None else started
        self._earlier = 0.0  # before the checkpoint that a run continues from

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A context whose time counts to a phase; phases must not be nested."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves time from the phase that it was counted to, to another phase."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def wall(self) -> float:
        """Total seconds until now."""
        return self._earlier + time.perf_counter() - self._started

    def state(self) -> dict[str, float]:
        """The state for a checkpoint: seconds by phase, and ``other``."""
        return {**self.seconds, "other": max(self.wall - sum(self.seconds.values()), 0.0)}

    def results(self) -> dict[str, float | str]:
        """Seconds by phase, their sum, in no phase, and in all, and what these are counted from."""
        phases = {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
        total = round(sum(self.seconds.values()), 3)
        wall = max(round(self.wall, 3), total)
        return {**phases, "total": total, "other": round(wall - total, 3), "wall": wall, "wall_since": self.since}

    def load(self, state: Mapping[str, float]) -> None:
        """Restores the state from a checkpoint and adds the time since this clock's own start."""
        self.seconds = {phase: state[phase] for phase in PHASES}
        self._earlier = sum(state.values())


def laps(device: torch.device, call: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each of several calls that follow each other: on a GPU by events in the current
    stream, which do not interrupt it, without gaps if the host launches fast enough; else by the
    host's clock.
    """
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(calls):
            call()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def process_start() -> float | None:
    """Start of this process on :func:`time.perf_counter`'s scale, to 10 ms; None: unknown."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        # By hand, since psutil's create_time is off by up to a second. The command stands in
        # parentheses and may hold anything; field 22 of all is the start since boot, in ticks.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.perf_counter() - age
