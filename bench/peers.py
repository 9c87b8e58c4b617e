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
TESTS = 20
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
    for run in sorted(runs, key=lambda run: (list(RIVALS).index(run["method"]), run["by"] == "ours", run["seed"])):
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
    lines = []
    for method in dict.fromkeys(run["method"] for run in runs):
        costs: dict[tuple[int, int], list[str]] = {}
        for run in runs:
            if run["method"] == method and run["by"] not in (by := costs.setdefault((run["parameters"], run["macs"]), [])):
                by.append(run["by"])
        parts = [f"{p:,} parameters, {m:,} multiply-accumulates ({', '.join(by)})" for (p, m), by in costs.items()]
        lines.append(f"- {_NAMES[method]}: {'; '.join(parts)}")
    return "\n".join(lines)


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


def make_data(folder: Path, source: Path, given: argparse.Namespace, limit: int, batch: int) -> list[dict[str, str]]:
    """Writes the images of a stream into an .npz, and the orders in which they arrive; returns for
    each round where they are.
    """
    config = StreamConfig(name="split-cifar100", data_dir=str(source), first_tasks=given.tasks, limit_per_task=limit)
    stream = streams.create(config)
    tests = np.concatenate([np.flatnonzero(stream.y_test == c)[:TESTS] for c in range(stream.classes)])
    data = folder / f"{limit}.npz"
    arrays = {"x_train": stream.x_train, "y_train": stream.y_train}
    arrays |= {"x_test": stream.x_test[tests], "y_test": stream.y_test[tests]}
    np.savez(data, **{name: tensor.numpy() for name, tensor in arrays.items()})
    stream = streams.create(StreamConfig(name=str(data), tasks=given.tasks, batch=batch))
    rounds = []
    for seed in range(given.rounds):
        order = folder / f"{limit}-{batch}-{seed}.npy"
        tasks = [np.concatenate(stream.batches(part, seed=seed, epoch=0)) for part in range(stream.parts)]
        np.save(order, np.stack(tasks))
        rounds.append({"data": str(data), "order": str(order)})
    return rounds


def measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one measurement. Raises RuntimeError with the end of what it said if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(given["threads"]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench.peer_process", json.dumps(given)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{given['method']} by {given['by']}, seed {given['seed']}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def contestants(only: Sequence[str], mose: Path | None) -> list[tuple[str, str]]:
    """The pairs of method and library to measure: those whose method or library is in ``only``
    (empty: all), of the libraries that are installed, and ours where there is one of these.
    """
    found = []
    for method, rivals in RIVALS.items():
        here = [by for by in rivals if (mose is not None if by == "authors" else find_spec(by) is not None)]
        pairs = [(method, by) for by in (*here, "ours")] if here else []
        found += [(method, by) for method, by in pairs if not only or method in only or by in only]
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar100.npz")
    parser.add_argument("--mose", type=Path, metavar="DIR", help="checkout of the authors' code; without it, no MOSE")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contestant [5]")
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores, of each [1]")
    parser.add_argument("--tasks", type=int, default=3, help="tasks of ten classes [3]")
    parser.add_argument("--limit-per-task", type=int, default=320, help="training images of a task [320]")
    parser.add_argument("--width", type=int, default=20, help="channels of the network's first stage [20]")
    parser.add_argument("--mose-limit-per-task", type=int, default=100, help="the same for MOSE [100]")
    parser.add_argument("--mose-width", type=int, default=8, help="the same for MOSE [8]")
    parser.add_argument("--memory", type=int, default=200, help="images that the memory holds [200]")
    parser.add_argument("--only", default="", metavar="NAMES", help="methods or libraries, with commas between [all]")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results", help="folder for the results")
    given = parser.parse_args(arguments)
    chosen = contestants([name for name in given.only.split(",") if name], given.mose)
    if not chosen:
        parser.error("nobody to measure: wanted Avalanche or CapyMOA installed, or --mose; or other names in --only")
    about = {
        **{name: getattr(given, name) for name in ("threads", "tasks", "limit_per_task", "width", "memory")},
        **{"mose_limit_per_task": given.mose_limit_per_task, "mose_width": given.mose_width},
        **{"processor": processor(), "python": platform.python_version(), "versions": versions()},
        "commit": os.environ.get("MOSE_FAST_COMMIT") or git_commit(ROOT) or "unknown",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"plain": (given.width, given.limit_per_task, BATCH)}
        if ("mose", "ours") in chosen or ("mose", "authors") in chosen:
            sizes["mose"] = (given.mose_width, given.mose_limit_per_task, MOSE_BATCH)
        data = {kind: make_data(Path(folder), given.data, given, *size[1:]) for kind, size in sizes.items()}
        for seed in range(given.rounds):
            first = seed % len(chosen)
            for method, by in chosen[first:] + chosen[:first]:
                kind = "mose" if method == "mose" else "plain"
                width, _, batch = sizes[kind]
                told = {"by": by, "method": method, "seed": seed, "threads": given.threads, "width": width}
                told |= {"memory": given.memory, "tasks": given.tasks, "batch": batch, **data[kind][seed]}
                told["checkout"] = str(given.mose.resolve()) if by == "authors" else None
                run = {"method": method, "by": by, "seed": seed, **measure(told)}
                runs.append(run)
                print(
                    f"round {seed + 1}, {method} by {by}: {run['seconds']:.1f} s, {rate(run, 'rows'):.0f} rows a second",
                    flush=True,
                )
    text = report(about, runs)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"peers-{given.threads}-threads.json"
    path.write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    print(f"\n{text}\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
