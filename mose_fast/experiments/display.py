"""What a sweep shows: a table that is redrawn in a terminal, one line per event elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from mose_fast.experiments.cells import CellRecord, CellState
from mose_fast.experiments.forecast import Forecast, duration

# Seconds between two drawings.
_EVERY = 0.3


class Display:
    """Shows the progress of a sweep."""

    def __init__(self, records: Mapping[str, CellRecord], forecast: Forecast, out: TextIO | None = None) -> None:
        self.records, self.forecast, self.out = records, forecast, out or sys.stderr
        self.terminal = self.out.isatty()
        self.start = time.monotonic()
        self.last = 0.0
        self.drawn = 0

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        self.close()
        print(line, file=self.out, flush=True)

    def finished(self, record: CellRecord) -> None:
        """Says that a run is done, with its ACC in percent."""
        ended = self._count(CellState.DONE) + self._count(CellState.FAILED)
        self.say(
            f"[{ended}/{len(self.records)}] done    {record.cell.name}:"
            f" ACC {100 * record.row['acc']:.1f} in {duration(record.seconds)}"
        )

    def draw(self) -> None:
        """Draws the table again if there is a terminal and the last drawing is old enough."""
        now = time.monotonic()
        if not self.terminal or now - self.last < _EVERY:
            return
        self.last = now
        size = shutil.get_terminal_size()
        lines = [self._status()]
        room = max(size.lines - 3, 1)
        running = [record for record in self.records.values() if record.state is CellState.RUNNING]
        width = max((len(record.cell.name) for record in running), default=0)
        for record in running[:room]:
            bar = "#" * round(20 * record.share)
            line = f"  {record.cell.name:<{width}}  {100 * record.share:3.0f} % [{bar:<20}]"
            if task := record.task:
                after = f"{task['what']} {task['task'] + 1} of {task['tasks']}"
                line += f"  accuracy {100 * task['accuracy']:5.1f} after {after}"
            lines.append(line)
        if len(running) > room:
            lines.append(f"  and {len(running) - room} more")
        self.close()
        self.out.write("".join(line[: size.columns - 1] + "\n" for line in lines))
        self.out.flush()
        self.drawn = len(lines)

    def summary(self) -> str:
        """One line for the end: the runs that are done, and time and rate of this sweep's own."""
        elapsed = time.monotonic() - self.start
        now = sum(record.seconds is not None for record in self.records.values())
        rate = f", {3600 * now / elapsed:.1f} runs an hour" if now else ""
        done, failed = self._count(CellState.DONE), self._count(CellState.FAILED)
        return f"{done} of {len(self.records)} runs done, {failed} failed; {duration(elapsed)} for {now} of them{rate}"

    def close(self) -> None:
        """Clears the table."""
        if self.drawn:
            self.out.write(f"\x1b[{self.drawn}A\x1b[J")
            self.drawn = 0

    def _status(self) -> str:
        states = (CellState.DONE, CellState.RUNNING, CellState.FAILED, CellState.WAITING)
        counts = ", ".join(f"{self._count(state)} {state.name.lower()}" for state in states)
        elapsed = time.monotonic() - self.start
        return f"{counts}; {duration(elapsed)} gone, about {duration(self._left())} left"

    def _left(self) -> float:
        """Seconds left by the forecast, scaled by how well it fitted the runs that are done."""
        taken = expected = 0.0
        remaining = []
        for name, cost in self.forecast.costs.items():
            record = self.records[name]
            if record.seconds is not None:
                taken, expected = taken + record.seconds, expected + cost.seconds
            elif record.state is CellState.RUNNING:
                remaining.append(cost.seconds * (1 - record.share))
            elif record.state is CellState.WAITING:
                remaining.append(cost.seconds)
        scale = taken / expected if expected else 1.0
        return scale * max([sum(remaining) / self.forecast.runs, *remaining], default=0.0)

    def _count(self, state: CellState) -> int:
        return sum(record.state is state for record in self.records.values())
