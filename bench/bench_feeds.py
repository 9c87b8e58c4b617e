"""Time that each feed takes to make the views of a step: plain PyTorch, the native op, DALI.

    python -m bench.bench_feeds                     # 384 views of 32x32 on the CPU, and on a card where there is one
    python -m bench.bench_feeds --side 64 --rounds 50

Feeds take turns, so that whatever else the machine does hits all of them alike; medians are printed. ``returns`` is the time after which
the caller goes on, ``done`` the time until the views are there: on a card, other work can be launched in between.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from mose_fast import _dali
from mose_fast.augment import ViewMaker
from mose_fast.device import device_name

#: As a step on Split CIFAR-100 has them: two fixed copies of every row, each once more augmented.
ROWS, VIEWS_PER_ROW = 96, 4


def measure(recipe: str, side: int, rounds: int, device: str) -> dict[str, tuple[float, float]]:
    """Median milliseconds by feed: until the call returns, and until the views are there."""
    images = torch.randint(0, 256, (ROWS, side, side, 3), dtype=torch.uint8).to(device)
    feeds = ["torch", "fused"] + ([] if _dali.obstacle() else ["dali"])
    makers = {feed: ViewMaker(recipe, 2, mirror=True, mean=(0.5,) * 3, std=(0.25,) * 3, feed=feed) for feed in feeds}
    times: dict[str, list[tuple[float, float]]] = {feed: [] for feed in feeds}
    for sequence in range(rounds + 3):
        for feed, maker in makers.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            views, _ = maker.make(images, (32, ROWS - 32), 0, sequence)
            returned = time.perf_counter() - start
            if device == "cuda":
                torch.cuda.synchronize()
            if sequence >= 3:  # the first build pipelines and warm caches
                times[feed].append((1e3 * returned, 1e3 * (time.perf_counter() - start)))
            assert len(views) == ROWS * VIEWS_PER_ROW
    return {feed: tuple(statistics.median(column) for column in zip(*values, strict=True)) for feed, values in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="ocm", choices=("none", "ocm", "simclr"))
    parser.add_argument("--side", type=int, default=32, metavar="PIXELS", help="of the images [32]")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    arguments = parser.parse_args(argv)
    if _dali.obstacle():
        print(f"without dali: {_dali.obstacle()}; {_dali.INSTALL}")
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        where = device_name(torch.device(device))
        what = f"{ROWS * VIEWS_PER_ROW} views of {arguments.side}x{arguments.side}, recipe {arguments.recipe}"
        print(f"{what}, {where}, torch {torch.__version__}")
        print(f"{'feed':<6} {'ms, returns':>12} {'ms, done':>10}")
        for feed, (returned, done) in measure(arguments.recipe, arguments.side, arguments.rounds, device).items():
            print(f"{feed:<6} {returned:>12.2f} {done:>10.2f}")


if __name__ == "__main__":
    main()
