"""The number of threads to compute with, and whether there are enough cores for them."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from joblib import cpu_count

__all__ = ["crowding", "settle_threads", "usable_cores"]


def usable_cores() -> int:
    """The number of cores this process may use, by CPU affinity and container limit (cgroup)."""
    return cpu_count()


def settle_threads(environment: MutableMapping[str, str], cores: int | None = None) -> None:
    """Sets the number of OpenMP threads before torch is imported, unless the user has set it.

    There is one thread for each core that a container grants; torch alone would count the cores of
    the whole machine. How threads wait is not changed: sleeping instead of spinning
    (OMP_WAIT_POLICY=PASSIVE) helps beside other programs, but cost 23 % of the speed on an idle
    machine (4.1 instead of 5.3 steps a second; two threads on two cores, width 16).

    Args:
        environment: Environment variables of the process; changed in place.
        cores: Number of cores that may be used; None means :func:`usable_cores`.
    """
    cores = usable_cores() if cores is None else cores
    if cores < (os.cpu_count() or 1):
        environment.setdefault("OMP_NUM_THREADS", str(cores))


def crowding(threads: int, cores: int | None = None, load: float | None = None) -> str:
    """A warning if there are more threads than other programs leave cores free; else an empty text.

    Args:
        threads: Number of threads that compute.
        cores: Number of cores that may be used; None means :func:`usable_cores`.
        load: Mean number of programs that ran or waited for a core in the last minute; None asks
            the system.
    """
    cores = usable_cores() if cores is None else cores
    load = os.getloadavg()[0] if load is None else load
    free = max(cores - round(load), 0)
    if threads <= max(free, 1):
        return ""
    return (
        f"{threads} threads, but only {free} of {cores} cores free (load {load:.1f}): other programs slow this one"
        f" down; OMP_NUM_THREADS={max(free, 1)} or OMP_WAIT_POLICY=PASSIVE may be faster"
    )
