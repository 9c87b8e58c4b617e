"""All methods on one stream with one memory: the tables of docs/methods.md.

    python -m bench.compare_methods --stream digits --limit-per-task 200
    python -m bench.compare_methods --stream split-cifar100 --data-dir DIR --classes 10 \\
        --limit-per-task 200

Prints a Markdown row for every method as soon as its runs are done: ACC and forgetting (as the
paper defines them) of its own classifier in percent, means over the seeds, and the seconds of a
run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import torch

from mose_fast import streams
from mose_fast.methods import METHODS
from mose_fast.settings.run import RunConfig, StreamConfig
from mose_fast.streams import Stream, from_arrays
from mose_fast.train import run

#: A short schedule for GDumb, whose presets would train longer than all other methods together.
SHORT_OPTIONS: dict[str, dict[str, Any]] = {"gdumb": {"passes": 16, "passes_before": 8}}

#: Options on streams whose labels mirroring, and so rotating, changes.
UPRIGHT_OPTIONS: dict[str, dict[str, Any]] = {"ocm": {"rotations": 1}, "onpro": {"rotations": 1}}

COLUMNS = ("method", "classifier", "ACC", "forgetting", "seconds")


def own_score(results: Mapping[str, Any], measure: str) -> float:
    """A metric of the classifier and expert that ``predict()`` uses."""
    return results[measure][results["resolved"]["classifier"]][results["resolved"]["expert"]]


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean in percent, with the sample standard deviation if there are several values."""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


def first_classes(stream: Stream, classes: int, limit_per_task: int | None) -> Stream:
    """A stream of only the first classes, two in each task."""
    train, test = (labels < classes for labels in (stream.y_train, stream.y_test))
    return from_arrays(
        stream.x_train[train],
        stream.y_train[train],
        stream.x_test[test],
        stream.y_test[test],
        name=stream.name,
        normalisation=stream.normalisation,
        mirror_safe=stream.mirror_safe,
        limit_per_task=limit_per_task,
    )


def row(method: str, seeds: Sequence[int], stream: Stream, settings: Mapping[str, Any]) -> str:
    """Runs a method for every seed; returns its row."""
    options = SHORT_OPTIONS.get(method, {}) | ({} if stream.mirror_safe else UPRIGHT_OPTIONS.get(method, {}))
    configs = [RunConfig.create(method=method, options=options, seed=seed, **settings) for seed in seeds]
    results = [run(config, stream=stream) for config in configs]
    acc, forgetting = ([own_score(r, measure) for r in results] for measure in ("acc", "af_paper"))
    forgot = "-" if None in forgetting else mean_and_spread(forgetting)
    seconds = fmean(r["seconds"]["total"] for r in results)
    cells = (method, results[0]["resolved"]["classifier"], mean_and_spread(acc), forgot, f"{seconds:.0f}")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--limit-per-task", type=int)
    parser.add_argument("--classes", type=int, help="the first of the stream's classes, two a task")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--memory", type=int, default=200)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    limit = given.limit_per_task if given.classes is None else None
    described = StreamConfig(given.stream, data_dir=given.data_dir, limit_per_task=limit)
    stream = streams.create(described)
    if given.classes is not None:
        stream = first_classes(stream, given.classes, given.limit_per_task)
    settings = {"stream": described, "memory": given.memory, "width": given.width, "device": given.device}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for method in given.methods:
        print(row(method, given.seeds, stream, settings), flush=True)


if __name__ == "__main__":
    main()
