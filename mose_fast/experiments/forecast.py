"""Forecasts the time and memory of a sweep, and how many runs fit at the same time."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mose_fast.experiments.engine import Engine
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.protocol import how_it_died
from mose_fast.experiments.step_cost import Cost
from mose_fast.learner.named_settings import all_settings, dotted
from mose_fast.methods import find_method
from mose_fast.runs.files import RunError
from mose_fast.runs.store import STORE, read_store
from mose_fast.settings.run import ConfigError, RunConfig


def cost_key(config: RunConfig) -> str:
    """Equal for configurations whose runs take the same time and memory."""
    settings = all_settings(config.method)
    values = {name: value for name, value in dotted(config.to_dict()).items() if settings[name].changes_cost}
    return json.dumps(values, sort_keys=True)


def stored_costs(folder: Path, threads: int) -> dict[str, Cost]:
    """Costs, by :func:`cost_key`, of the runs in the folder's table that had this many threads."""
    if not (folder / STORE).is_file():
        return {}
    rows: dict[str, list[Any]] = {}
    for row in read_store(folder).itertuples():
        if row.threads == threads:
            rows.setdefault(cost_key(RunConfig.from_dict(json.loads(row.config))), []).append(row)
    return {
        key: Cost(
            statistics.median(row.seconds_total for row in same),
            max(int(row.peak_bytes) for row in same),
            None if same[0].gpu is None else max(int(row.peak_bytes_device) for row in same),
            "stored",
        )
        for key, same in rows.items()
    }


def measured_costs(configs: Mapping[str, RunConfig], engine: Engine, budget: float | None = None) -> dict[str, Cost]:
    """Measures one run of each configuration in the workers, as many at the same time as the sweep
    will run, since they slow each other down. RunError if one cannot start.

    Args:
        budget: Seconds after which the others are left out, and those in progress abandoned in the
            engine; one is measured in any case. None: all are measured.
    """
    costs: dict[str, Cost] = {}
    waiting = _order(configs) if budget is not None else list(configs)
    running: set[str] = set()
    start = time.monotonic()
    while waiting or running:
        if budget is not None and costs and time.monotonic() - start > budget:
            break
        while waiting and engine.free() > 0:
            key = waiting.pop(0)
            engine.start({"do": "measure", "cell": key, "config": configs[key].to_dict()})
            running.add(key)
        for event in engine.events(0.2):
            if event["event"] == "measured":
                costs[event["cell"]] = Cost(**event["cost"])
            elif event["event"] == "done":
                running.discard(event["cell"])
            else:
                died = f"its process {how_it_died(event.get('signal'))}; does it have enough memory?"
                raise RunError(f"the first steps of a run cannot be measured: {event.get('error') or died}")
    return costs


def estimated_cost(key: str, known: Mapping[str, Cost]) -> Cost:
    """The cost of the most similar run that is known, scaled by the number of epochs and by the
    declared cost of a step of the method (:class:`mose_fast.methods.About`).
    """
    wanted = json.loads(key)

    def distance(other: str) -> tuple[int, ...]:
        there = json.loads(other)
        kind = [there[name] != wanted[name] for name in ("stream.name", "method", "train_on")]
        return *kind, there["method"] != _UNIT, sum(there.get(name) != value for name, value in wanted.items())

    nearest = min(known, key=distance)
    factor = declared_cost(key) / declared_cost(nearest)
    return dataclasses.replace(known[nearest], seconds=factor * known[nearest].seconds, source="estimated")


# Declared costs are multiples of this method's. GDumb's are smaller, but it trains outside steps.
_UNIT = "er"


def declared_cost(key: str) -> float:
    """The declared cost of the runs with a :func:`cost_key`, in arbitrary units."""
    values = json.loads(key)
    return find_method(values["method"]).about.cost * values["epochs"]


def _order(configs: Mapping[str, RunConfig]) -> list[str]:
    """First one of each kind of run, ER's before all, and cheap ones before expensive ones."""
    costs = {key: declared_cost(key) for key in configs}
    kinds: set[tuple[Any, ...]] = set()
    order: dict[str, tuple[bool, bool, float]] = {}
    for key in sorted(configs, key=costs.__getitem__):
        kind = tuple(json.loads(key)[name] for name in ("stream.name", "train_on", "method"))
        order[key] = kind in kinds, kind in kinds or kind[-1] != _UNIT, costs[key]
        kinds.add(kind)
    return sorted(configs, key=order.__getitem__)


@dataclass(frozen=True)
class Forecast:
    """The time and memory that a sweep will take.

    Attributes:
        costs: Costs of the runs that remain, by name of the cell.
        available: Bytes of free memory of this machine.
    """

    cells: Sequence[Cell]
    costs: Mapping[str, Cost]
    runs: int
    threads: int
    available: int

    @property
    def compute_seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs.values())

    @property
    def seconds(self) -> float:
        """Seconds until the end: all runs spread evenly, but at least the longest one."""
        return max([self.compute_seconds / self.runs, *(cost.seconds for cost in self.costs.values())])

    @property
    def bytes(self) -> int:
        """Bytes of memory of the largest runs that compute at the same time."""
        return sum(sorted((cost.bytes for cost in self.costs.values()), reverse=True)[: self.runs])

    @property
    def fitting(self) -> int:
        """Number of the largest runs that fit into the free memory at the same time."""
        return self.available // max((cost.bytes for cost in self.costs.values()), default=1)

    def check_memory(self) -> None:
        """ConfigError if the runs need more memory than is free."""
        if self.bytes > self.available:
            raise ConfigError(
                f"{self.runs} runs at a time need {_gigabytes(self.bytes)} of memory, and {_gigabytes(self.available)}"
                f" are free; wanted at most {self.fitting} (--workers, --per-gpu)"
            )

    def __str__(self) -> str:
        """The plan as a table."""
        settings: dict[str, list[Cell]] = {}
        for cell in self.cells:
            settings.setdefault(cell.label, []).append(cell)
        width = max(len("setting"), *(len(label) for label in settings))
        lines = [f"  {'setting':<{width}}  {'runs':>5}  {'to do':>5}  {'a run':>9}  {'memory':>8}"]
        for label, cells in settings.items():
            costs = [self.costs[cell.name] for cell in cells if cell.name in self.costs]
            line = f"  {label:<{width}}  {len(cells):>5}  {len(costs):>5}"
            if costs:
                line += f"  {duration(costs[0].seconds):>9}  {_gigabytes(costs[0].bytes):>8}"
                line += "" if costs[0].bytes_device is None else f", GPU {_gigabytes(costs[0].bytes_device)}"
                line += f"  ({costs[0].source})"
            lines.append(line)
        lines.append(
            f"  {len(self.costs)} of {len(self.cells)} runs to do: {duration(self.compute_seconds)} of computing, about"
            f" {duration(self.seconds)} with {self.runs} at a time on {self.threads}"
            f" thread{'' if self.threads == 1 else 's'} each; memory {_gigabytes(self.bytes)},"
            f" {_gigabytes(self.available)} free"
        )
        return "\n".join(lines)


def duration(seconds: float) -> str:
    """``0:07``, ``12:30`` or ``3:05:00``."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"
