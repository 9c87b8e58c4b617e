"""What a sweep shows: a table that is redrawn in a terminal, a line an event elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from mose_fast.sweep.forecast import Forecast, duration

__all__ = ["Display", "Running"]

# Seconds between two drawings.
_EVERY = 0.3


@dataclass
class Running:
    """A run in progress; ``accuracy`` is the mean over the tasks seen, in [0, 1]."""

    batch: int = 0
    batches: int = 0
    task: int | None = None
    tasks: int = 0
    accuracy: float | None = None


class Display:
    """Shows how far a sweep is.

    Args:
        forecast: Of the sweep.
        out: Where to, stderr by default; a terminal gets the table.
    """

    def __init__(self, forecast: Forecast, out: TextIO | None = None) -> None:
        self.forecast, self.out = forecast, out or sys.stderr
        self.terminal = self.out.isatty()
        self.start = time.monotonic()
        self.last = 0.0
        self.drawn = 0
        self.total = len(forecast.cells)
        self.done = self.total - len(forecast.costs)
        self.failed = 0
        self.running: dict[str, Running] = {}
        #: Seconds that finished runs took, and were forecast.
        self.taken, self.forecast_of_taken = 0.0, 0.0
        self.ended: set[str] = set()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._clear()
        print(line, file=self.out, flush=True)

    def finished(self, name: str, seconds: float, acc: float) -> None:
        """A run is done, after ``seconds``."""
        self.done += 1
        self.ended.add(name)
        self.taken += seconds
        self.forecast_of_taken += self.forecast.costs[name].seconds
        self.say(f"[{self.done + self.failed}/{self.total}] done    {name}: ACC {100 * acc:.1f} in {duration(seconds)}")

    def given_up(self, name: str) -> None:
        """A run has failed for good."""
        self.failed += 1
        self.ended.add(name)

    def draw(self) -> None:
        """Draws the table again, where there is a terminal and it is time."""
        now = time.monotonic()
        if not self.terminal or now - self.last < _EVERY:
            return
        self.last = now
        size = shutil.get_terminal_size()
        lines = [self.status()]
        room = max(size.lines - 3, 1)
        width = max((len(name) for name in self.running), default=0)
        for name, run in list(self.running.items())[:room]:
            share = run.batch / run.batches if run.batches else 0.0
            bar = "#" * round(20 * share)
            accuracy = ""
            if run.accuracy is not None:
                accuracy = f"  accuracy {100 * run.accuracy:5.1f} after task {run.task + 1} of {run.tasks}"
            lines.append(f"  {name:<{width}}  {100 * share:3.0f} % [{bar:<20}]{accuracy}")
        if len(self.running) > room:
            lines.append(f"  and {len(self.running) - room} more")
        self._clear()
        self.out.write("".join(line[: size.columns - 1] + "\n" for line in lines))
        self.out.flush()
        self.drawn = len(lines)

    def status(self) -> str:
        """Counts and times in a line."""
        waiting = self.total - self.done - self.failed - len(self.running)
        elapsed = time.monotonic() - self.start
        return (
            f"{self.done} done, {len(self.running)} running, {self.failed} failed, {waiting} waiting; "
            f"{duration(elapsed)} gone, about {duration(self.left())} left"
        )

    def summary(self) -> str:
        """The end, in a line: counts, time, and the rate of this sitting."""
        elapsed = time.monotonic() - self.start
        now = self.done - (self.total - len(self.forecast.costs))
        rate = f", {3600 * now / elapsed:.1f} runs an hour" if now else ""
        return (
            f"{self.done} of {self.total} runs done, {self.failed} failed; {duration(elapsed)} for {now} of them{rate}"
        )

    def left(self) -> float:
        """Seconds until the end: the forecast, scaled by how well it fitted the runs that are
        done.
        """
        scale = self.taken / self.forecast_of_taken if self.forecast_of_taken else 1.0
        seconds = [
            self.forecast.costs[name].seconds * (1 - (run.batch / run.batches if run and run.batches else 0.0))
            for name, run in ((name, self.running.get(name)) for name in self.forecast.costs.keys() - self.ended)
        ]
        return scale * max([sum(seconds) / self.forecast.runs, *seconds], default=0.0)

    def close(self) -> None:
        """Takes the table away."""
        self._clear()

    def _clear(self) -> None:
        if self.drawn:
            self.out.write(f"\x1b[{self.drawn}A\x1b[J")
            self.drawn = 0
