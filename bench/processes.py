"""Runs on one GPU as processes of a sweep: what two at a time gain, and how often a capture had to
be tried again.

    python -m bench.processes               # feeds fused and dali: one run, two in turn, two by MPS
    python -m bench.processes --retries 20  # as many short runs with DALI, one after the other
    python -m bench.processes --device cpu  # small, without a GPU: only shows that it runs

The measure is training steps a second of all runs together, against one alone. Exit status: 0 only
if every run has finished, and on a GPU was captured: without eager steps but the first of each
graph.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import SMALL_RUN, gpu_is_missing, random_images
from bench.smoke import not_captured
from mose_fast import _dali
from mose_fast.experiments.engine import LocalEngine
from mose_fast.experiments.folder import SweepFolder
from mose_fast.experiments.mps import PROGRAM
from mose_fast.experiments.protocol import ENDS
from mose_fast.settings.run import RunConfig
from mose_fast.threads import usable_cores

#: Settings of the runs by device, and training images of both tasks.
SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {"device": "cuda", "precision": "bf16", "memory": 1000},
    "cpu": SMALL_RUN,
}
IMAGES = {"cuda": 4000, "cpu": 60}
SHORT = {"cuda": 1000, "cpu": 40}


def results_of(config: dict[str, Any], runs: int, at_a_time: int, *, mps: bool = False) -> list[dict[str, Any]]:
    """The results of runs that differ in their seed, in processes of one GPU. Raises RuntimeError
    if one has failed.
    """
    with tempfile.TemporaryDirectory() as out:
        folder = SweepFolder(out)
        folder.create()
        gpu = "0" if config["device"] == "cuda" else None
        engine = LocalEngine([gpu] * at_a_time, max(1, usable_cores() // at_a_time), folder.logs, mps=mps)
        waiting, ended = list(range(runs)), 0
        try:
            while ended < runs:
                while waiting and engine.free():
                    seed = waiting.pop(0)
                    paths = {
                        "config": folder.config(str(seed)),
                        "out": folder.run(str(seed)),
                        "log": folder.log(str(seed)),
                    }
                    paths["config"].write_text(RunConfig.create(**config, seed=seed).to_json())
                    command = {"do": "run", "cell": str(seed), "afresh": False, "wandb": None}
                    engine.start(command | {name: str(path) for name, path in paths.items()})
                for event in engine.events(1.0):
                    if event["event"] in ENDS - {"done"}:
                        raise RuntimeError(f"run {event['cell']}: {event}\n{folder.log(event['cell']).read_text()}")
                    ended += event["event"] == "done"
        finally:
            engine.close()
        return [json.loads((folder.run(str(seed)) / "results.json").read_text()) for seed in range(runs)]


def retries(results: Sequence[dict[str, Any]]) -> int:
    return sum(run["capture_retries"] or 0 for run in results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.processes", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--retries", type=int, metavar="RUNS", help="count the captures of so many short runs with DALI"
    )
    given = parser.parse_args(arguments)
    if gpu_is_missing(given.device):
        return 2
    found: list[str] = []
    with tempfile.TemporaryDirectory() as data:
        images = (SHORT if given.retries else IMAGES)[given.device]
        path = Path(data) / "random.npz"
        np.savez(path, **dict(zip(("x_train", "y_train", "x_test", "y_test"), random_images(images), strict=True)))
        stream = {"name": str(path), "tasks": 2}
        config = {**SETTINGS[given.device], "stream": stream}
        feeds = ["dali"] if _dali.obstacle() is None else []
        if not feeds:
            print(f"without the feed dali: {_dali.obstacle()}")
        if given.retries:
            for feed in feeds:
                runs = results_of({**config, "feed": feed}, given.retries, 1)
                print(f"{len(runs)} runs with {feed}: {retries(runs)} captures were tried once more")
                found += [f"WRONG: {what}" for run in runs for what in not_captured(run)]
        else:
            print("feed    at a time  by MPS  steps a second  against one  retries")
            by_mps = [(2, True)] if given.device == "cuda" and shutil.which(PROGRAM) else []
            for feed in ["fused", *feeds]:
                alone = None
                for at_a_time, mps in [(1, False), (2, False), *by_mps]:
                    runs = results_of({**config, "feed": feed}, at_a_time, at_a_time, mps=mps)
                    rate = sum(run["steps"] / run["seconds"]["train"] for run in runs)
                    alone = rate if alone is None else alone
                    print(
                        f"{feed:<7} {at_a_time:>9}  {'yes' if mps else 'no':>6}  {rate:>14.1f}  {rate / alone:>11.2f}"
                        f"  {retries(runs):>7}",
                        flush=True,
                    )
                    found += [f"WRONG: {what}" for run in runs for what in not_captured(run)]
    print("\n".join(found) or "every run has finished")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
