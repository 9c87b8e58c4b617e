"""How many threads compute, and whether there are cores for them."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from joblib import cpu_count

__all__ = ["crowding", "settle_threads", "usable_cores"]


def usable_cores() -> int:
    """Cores that this process may use: its CPU affinity and its container's limit (cgroup)
    count.
    """
    return cpu_count()


def settle_threads(environment: MutableMapping[str, str], cores: int | None = None) -> None:
    """Settles what OpenMP reads when torch is imported; what the user has set stays.

    There is one thread for each core that a container grants, where torch counts those of the whole
    machine. How threads wait is left
    alone: sleeping in place of spinning (OMP_WAIT_POLICY=PASSIVE) helps beside other programs, but
    took 23 % of the steps on an idle machine (two threads on two cores, width 16: 5.3 against 4.1
    steps a second).

    Args:
        environment: The process's.
        cores: That may be used; None: :func:`usable_cores`.
    """
    cores = usable_cores() if cores is None else cores
    if cores < (os.cpu_count() or 1):
        environment.setdefault("OMP_NUM_THREADS", str(cores))


def crowding(threads: int, cores: int | None = None, load: float | None = None) -> str:
    """A sentence to warn with where threads outnumber the cores that other programs leave free;
    else an empty text.

    Args:
        threads: That shall compute.
        cores: That may be used; None: :func:`usable_cores`.
        load: Programs that ran or waited for a core in the last minute; None: as the system tells
            it.
    """
    cores = usable_cores() if cores is None else cores
    load = os.getloadavg()[0] if load is None else load
    free = max(cores - round(load), 0)
    if threads <= max(free, 1):
        return ""
    return (
        f"{threads} threads for {free} free of {cores} cores (load {load:.1f}): other programs slow this one down; "
        f"OMP_NUM_THREADS={max(free, 1)} or OMP_WAIT_POLICY=PASSIVE may be faster"
    )
