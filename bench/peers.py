"""A race against other libraries: ER, DER++ and SCR by Avalanche, by CapyMOA and by us, and MOSE by
the authors' code and by us, on Split CIFAR-100 and a CPU.

    python -m bench.peers --data DIR                # DIR holds cifar100.npz
    python -m bench.peers --data DIR --mose MOSE    # with a checkout of the authors' code

A measurement is a process of its own (:mod:`bench.peer_process`). Each round has another seed and
measures every contestant once, each round another one first. docs/benchmarks.md says what is equal
and what the libraries do not allow to be. Writes ``peers-N-threads.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mose_fast import streams
from mose_fast._version import git_commit
from mose_fast.device import processor
from mose_fast.settings.run import StreamConfig

ROOT = Path(__file__).resolve().parent.parent
#: Test images of each class.
TESTS = 10
#: Incoming images of a step, of which as many are replayed: CapyMOA's ER allows nothing else. MOSE
#: has its own (10 and 64).
BATCH, MOSE_BATCH = 32, 10
#: Methods, and by whom they are measured beside us.
RIVALS = {"er": ("avalanche", "capymoa"), "derpp": ("avalanche",), "scr": ("avalanche",), "mose": ("authors",)}
_NAMES = {"er": "ER", "derpp": "DER++", "scr": "SCR", "mose": "MOSE"}
_PACKAGES = ("torch", "numpy", "avalanche-lib", "capymoa", "kornia")


class Interval(NamedTuple):
    """The ``median``, and the two of the values between which the median of all such values lies
    with probability ``coverage``, whatever their distribution.
    """

    median: float
    low: float
    high: float
    coverage: float

    def text(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def interval(values: Sequence[float]) -> Interval:
    """The narrowest :class:`Interval` of equally many values on both sides that covers 95 %; the
    smallest and the largest value where none does (five: 94 %).
    """
    ordered, n = sorted(values), len(values)

    def coverage(cut: int) -> float:
        return 1 - 2 * sum(math.comb(n, k) for k in range(cut + 1)) / 2**n

    cut = max((cut for cut in range(n // 2) if coverage(cut) >= 0.95), default=0)
    return Interval(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut], coverage(cut))


def rate(run: Mapping[str, Any], what: str) -> float:
    """Rows or steps a second of training."""
    return run[what] / run["seconds"]


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], what: str) -> Interval:
    """Our rate as a multiple of theirs in the same round."""
    by_seed = {run["seed"]: rate(run, what) for run in theirs}
    return interval([rate(run, what) / by_seed[run["seed"]] for run in ours])


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of all measurements, with a line for each contestant, ours below the others
    of its method.
    """
    head = (
        *("method", "by", "rows a second", "ours to theirs", "steps a second", "ours to theirs"),
        *("rows", "steps", "peak memory, MB", "accuracy by seed, %"),
    )
    lines = [head, ("---",) * len(head)]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: (list(RIVALS).index(run["method"]), run["by"], run["seed"])):
        groups.setdefault((run["method"], run["by"]), []).append(run)
    for (method, by), group in groups.items():
        ours = groups.get((method, "ours"))
        cells = [_NAMES[method], by]
        for what, digits in (("rows", 0), ("steps", 2)):
            cells.append(interval([rate(run, what) for run in group]).text(digits))
            cells.append("-" if by == "ours" or ours is None else _judged(ratios(ours, group, what)))
        cells += [f"{group[0]['rows']:,}", f"{group[0]['steps']:,}"]
        cells.append(f"{statistics.median(run['peak_bytes'] for run in group) / 1e6:,.0f}")
        cells.append(", ".join(f"{100 * run['accuracy']:.1f}" for run in group))
        lines.append(tuple(cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _judged(ratio: Interval) -> str:
    return ratio.text(2) + (" **slower**" if ratio.median < 1 else "")


def networks(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line for each method: parameters and multiply-accumulates of its networks, for which
    libraries agree and which do not.
    """
    costs: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        if run["seed"] == runs[0]["seed"]:
            cost = f"{run['parameters']:,} parameters, {run['macs']:,} multiply-accumulates"
            costs.setdefault(run["method"], {}).setdefault(cost, []).append(run["by"])
    return "\n".join(
        f"- {_NAMES[method]}: " + "; ".join(f"{cost} ({', '.join(by)})" for cost, by in found.items())
        for method, found in costs.items()
    )


def report(about: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The table with all that is needed to read it."""
    rounds = len({run["seed"] for run in runs})
    covered = f"{100 * interval(range(rounds)).coverage:.0f}"
    said = (
        f"{about['processor']}, {about['threads']} thread{'' if about['threads'] == 1 else 's'}; commit"
        f" {about['commit']}, {about['date']}; Python {about['python']}, "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + f". Split CIFAR-100, {about['tasks']} tasks of {about['limit_per_task']} images, width {about['width']}"
        f" (MOSE: of {about['mose_limit_per_task']} images, width {about['mose_width']}), memory {about['memory']}."
        f" Medians of {rounds} rounds, in brackets the interval that holds the median with {covered} %; ratios are"
        " those of a round."
    )
    return f"{table(runs)}\n\n{said}\n\nNetworks, for an image:\n\n{networks(runs)}\n"


class Size(NamedTuple):
    """What a measurement's length depends on, by kind of method."""

    width: int
    limit: int
    batch: int


def make_data(folder: Path, source: Path, tasks: int, rounds: int, size: Size) -> list[dict[str, str]]:
    """Writes the images of a stream into an .npz, and the orders in which they arrive; returns for
    each round where they are.
    """
    config = StreamConfig(name="split-cifar100", data_dir=str(source), first_tasks=tasks, limit_per_task=size.limit)
    stream = streams.create(config)
    tests = np.concatenate([np.flatnonzero(stream.y_test == c)[:TESTS] for c in range(stream.classes)])
    data = folder / f"{size.batch}.npz"
    arrays = {"x_train": stream.x_train, "y_train": stream.y_train}
    arrays |= {"x_test": stream.x_test[tests], "y_test": stream.y_test[tests]}
    np.savez(data, **{name: tensor.numpy() for name, tensor in arrays.items()})
    stream = streams.create(StreamConfig(name=str(data), tasks=tasks, batch=size.batch))
    found = []
    for seed in range(rounds):
        order = folder / f"{size.batch}-{seed}.npy"
        np.save(order, np.stack([np.concatenate(stream.batches(task, seed=seed, epoch=0)) for task in range(tasks)]))
        found.append({"data": str(data), "order": str(order)})
    return found


def measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one measurement. Raises RuntimeError with the end of what it said if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(given["threads"]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.peer_process", json.dumps(given)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{given['method']} by {given['by']}, seed {given['seed']}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def contestants(only: Sequence[str], mose: bool) -> list[tuple[str, str]]:
    """The pairs of method and library to measure: those whose method or library is in ``only``
    (empty: all), of the libraries that are there, and ours for the methods that one of them has.
    ``mose``: whether the authors' code is there.
    """
    found = []
    for method, rivals in RIVALS.items():
        here = [by for by in rivals if (mose if by == "authors" else find_spec(by) is not None)]
        found += [(method, by) for by in (*here, *["ours"] * bool(here)) if not only or {method, by} & set(only)]
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def race(given: argparse.Namespace, chosen: Sequence[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """Measures all of ``chosen`` once a round; each round begins with another one."""
    small = Size(given.mose_width, given.mose_limit_per_task, MOSE_BATCH)
    plain = Size(given.width, given.limit_per_task, BATCH)
    sizes = {method: small if method == "mose" else plain for method, _ in chosen}
    data = {size: make_data(folder, given.data, given.tasks, given.rounds, size) for size in set(sizes.values())}
    runs = []
    for seed in range(given.rounds):
        first = seed % len(chosen)
        for method, by in [*chosen[first:], *chosen[:first]]:
            size = sizes[method]
            told = {"by": by, "method": method, "seed": seed, "threads": given.threads, "memory": given.memory}
            told |= {"tasks": given.tasks, "width": size.width, "batch": size.batch, **data[size][seed]}
            told["checkout"] = str(given.mose.resolve()) if by == "authors" else None
            run = {"method": method, "by": by, "seed": seed, **measure(told)}
            runs.append(run)
            speed = f"{run['seconds']:.1f} s, {rate(run, 'rows'):.0f} rows a second"
            print(f"round {seed + 1}, {method} by {by}: {speed}", flush=True)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar100.npz")
    parser.add_argument("--mose", type=Path, metavar="DIR", help="checkout of the authors' code; without it, no MOSE")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contestant [5]")
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores, of each [1]")
    parser.add_argument("--tasks", type=int, default=3, help="tasks of ten classes [3]")
    parser.add_argument("--limit-per-task", type=int, default=160, help="training images of a task [160]")
    parser.add_argument("--width", type=int, default=20, help="channels of the network's first stage [20]")
    parser.add_argument("--mose-limit-per-task", type=int, default=60, help="the same for MOSE [60]")
    parser.add_argument("--mose-width", type=int, default=8, help="the same for MOSE [8]")
    parser.add_argument("--memory", type=int, default=150, help="images that the memory holds [150]")
    parser.add_argument("--only", default="", metavar="NAMES", help="methods or libraries, with commas between [all]")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder for the results")
    given = parser.parse_args(arguments)
    only = [name for name in given.only.split(",") if name]
    if unknown := set(only) - {*RIVALS, "ours", *(by for rivals in RIVALS.values() for by in rivals)}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is no method and no library")
    chosen = contestants(only, given.mose is not None)
    if not chosen:
        parser.error("nothing to measure; wanted avalanche-lib or capymoa installed, or --mose, and fitting --only")
    sizes = ("threads", "tasks", "limit_per_task", "width", "mose_limit_per_task", "mose_width", "memory")
    about = {
        **{name: getattr(given, name) for name in sizes},
        **{"processor": processor(), "python": platform.python_version(), "versions": versions()},
        "commit": os.environ.get("MOSE_FAST_COMMIT") or git_commit(ROOT) or "unknown",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = race(given, chosen, Path(folder))
    text = report(about, runs)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"peers-{given.threads}-threads.json"
    path.write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
