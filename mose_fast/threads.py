"""How many threads compute, how they wait for each other, and whether there are enough cores."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping

SPIN_COUNT = 20_000
"""How many times a thread looks for the others before it sleeps, about half a millisecond."""


def usable_cores() -> int:
    """The number of cores this process may use, by CPU affinity and container limit (cgroup)."""
    from joblib import cpu_count  # 0.1 seconds, which ``import mose_fast`` should not take

    return cpu_count()


def settle_spinning(environment: MutableMapping[str, str]) -> None:
    """Sets in the environment for how long threads of OpenMP spin before they sleep, unless the
    user has set it, or torch is loaded already: libgomp reads it then.

    GNU's libgomp spins 300,000 times, several milliseconds: on a core that other programs use, too,
    a run then takes 3 to 100 times as long. Sleeping at once (``OMP_WAIT_POLICY=PASSIVE``) costs a
    fifth of an idle machine's speed, :data:`SPIN_COUNT` about nothing (docs/command_line.md).
    """
    if "torch" not in sys.modules and not waiting(environment):
        environment["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def waiting(environment: Mapping[str, str]) -> str:
    """The variable that says how threads of OpenMP wait, as ``NAME=VALUE``; empty: none does."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the first one counts where both are set
    return next((f"{name}={environment[name]}" for name in names if environment.get(name)), "")


def settle_threads(environment: MutableMapping[str, str], cores: int | None = None) -> None:
    """Sets the number of OpenMP threads before torch is imported, unless the user has set it: one
    for each core that a container grants (None: :func:`usable_cores`); torch alone would count the
    cores of the whole machine.
    """
    cores = usable_cores() if cores is None else cores
    if cores < (os.cpu_count() or 1):
        environment.setdefault("OMP_NUM_THREADS", str(cores))


def thread_limit(environment: Mapping[str, str]) -> int | None:
    """The number of threads that ``OMP_NUM_THREADS`` allows; None: it is not set, or unusable. Of a
    list such as ``4,2``, for nested regions, the first number counts.
    """
    found = re.match(r"\s*0*([1-9]\d*)\s*(,|$)", environment.get("OMP_NUM_THREADS", ""))
    return int(found[1]) if found else None


def crowding(threads: int, cores: int | None = None, load: float | None = None) -> str:
    """A warning if there are more threads than other programs leave cores free; else an empty text.
    ``load`` is the mean number of programs that ran or waited for a core in the last minute; None
    asks the system, as for ``cores``.
    """
    cores = usable_cores() if cores is None else cores
    load = os.getloadavg()[0] if load is None else load
    free = max(cores - round(load), 0)
    if threads <= max(free, 1):
        return ""
    said = f"{threads} threads, but only {free} of {cores} cores free (load {load:.1f}): other programs slow this one"
    # Where torch was imported before this package, its threads spin for long.
    advice = "" if waiting(os.environ) else f"; GOMP_SPINCOUNT={SPIN_COUNT} in the environment makes it less"
    return f"{said} down{advice}"
