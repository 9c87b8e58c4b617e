"""Where a sweep computes, and how its runs share the cores and GPUs there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mose_fast.augment import choose_feed
from mose_fast.experiments.engine import Engine, LocalEngine
from mose_fast.experiments.grid import Cell
from mose_fast.experiments.ray_engine import RayEngine
from mose_fast.methods import resolve_device
from mose_fast.settings.knob import plain, whole_number
from mose_fast.settings.run import ConfigError
from mose_fast.threads import thread_limit, usable_cores


@dataclass(frozen=True)
class Place:
    """Where a sweep computes: the arguments of :func:`mose_fast.run_sweep`. With Ray, ``workers``
    is the largest number of runs anywhere.
    """

    workers: int | None = None
    per_gpu: int | None = None
    gpus: tuple[str, ...] | None = None
    engine: str = "local"
    address: str = "auto"
    mps: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "per_gpu"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), none="not given"))
        if self.gpus is not None:
            object.__setattr__(self, "gpus", tuple(str(plain(gpu)) for gpu in self.gpus))
        if self.engine not in ("local", "ray"):
            raise ConfigError(f"engine is {self.engine!r}; wanted 'local' or 'ray'")


@dataclass(frozen=True)
class Layout:
    """How the runs of a sweep share its place.

    Attributes:
        cores: Number of cores that this process may use.
        gpus: Names of the GPUs of this machine that are used; empty on the CPU and with Ray.
        most_threads: Upper limit of the threads of a run; None: there is none.
    """

    place: Place
    device: str
    cores: int
    gpus: tuple[str, ...]
    runs: int
    most_threads: int | None = None

    @classmethod
    def of(cls, cells: Sequence[Cell], place: Place) -> Layout:
        """The layout for some cells; ConfigError if they cannot compute there."""
        device, cores = _device(cells[0], place), usable_cores()
        if place.mps and (device == "cpu" or place.engine != "local"):
            raise ConfigError(
                f"mps is on, but the runs compute {'on the CPU' if device == 'cpu' else 'with Ray'}; wanted it off"
            )
        if device == "cuda" and place.engine == "local":
            if place.workers is not None:
                raise ConfigError(
                    f"workers is {place.workers}, which is for the CPU; wanted --per-gpu for runs on a GPU"
                )
            gpus = _gpus(place)
            return cls(place, device, cores, gpus, len(gpus) * (place.per_gpu or 1))
        if place.per_gpu is not None and device == "cpu":
            raise ConfigError(f"per_gpu is {place.per_gpu}, but the runs compute on the CPU; wanted --workers")
        if place.workers is not None and place.workers > cores and place.engine == "local":
            raise ConfigError(f"workers is {place.workers}; wanted at most {cores}, the number of cores here")
        return cls(place, device, cores, (), place.workers or min(cores, len(cells)))

    @property
    def threads(self) -> int:
        """CPU threads of each run: a share of the cores, limited by ``OMP_NUM_THREADS``."""
        share = max(1, self.cores // self.runs)
        return min(share, thread_limit(os.environ) or share, self.most_threads or share)

    def engine(self, folder: Path, logs: Path | None, lock: int | None) -> Engine:
        """An engine for the sweep in ``folder``: :class:`LocalEngine` or :class:`RayEngine`."""
        if self.place.engine == "ray":
            share = 1 / (self.place.per_gpu or 1) if self.device == "cuda" else 0.0
            return RayEngine(self.place.address, self.place.workers, self.threads, share, folder)
        # GPUs are filled evenly.
        gpus = [self.gpus[n % len(self.gpus)] if self.gpus else None for n in range(self.runs)]
        return LocalEngine(gpus, self.threads, logs, lock, mps=self.place.mps)


def _device(cell: Cell, place: Place) -> str:
    """``cpu`` or ``cuda``. Refuses a feed that is not available there."""
    device = cell.config.device
    if device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r}; wanted cuda in a sweep, and --gpus to choose GPUs")
    if place.engine == "ray" and device == "cuda":
        return "cuda"  # the machines of the cluster have GPUs; this one may have none
    found = resolve_device(device)
    choose_feed(cell.config.feed, found, None)
    return found.type


def _gpus(place: Place) -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    for gpu in place.gpus or ():
        if gpu not in names:
            raise ConfigError(f"gpus has {gpu!r}; wanted some of {', '.join(names)}")
    return tuple(place.gpus or names)
