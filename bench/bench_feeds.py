"""The time that each feed takes to make the views of a step: plain PyTorch, the native op, DALI.

    python -m bench.bench_feeds                         # 384 views of 32x32, on the CPU and a GPU
    python -m bench.bench_feeds --side 64 --rounds 50

The table has medians of ``returns``, the time until the call returns, and ``done``, the time
until the views are there; on a GPU, other work can be launched in between. Feeds are measured
alternately, so that other load on the machine affects all of them.
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

#: As in a step on Split CIFAR-100: two fixed copies of every row, and an augmented view of each.
ROWS, VIEWS_PER_ROW = 96, 4
SIZES = (32, ROWS - 32)

# The first calls build pipelines and warm caches.
_WARM = 5


def make(recipe: str, feed: str) -> ViewMaker:
    return ViewMaker(recipe, 2, mirror=True, mean=(0.5,) * 3, std=(0.25,) * 3, feed=feed)


def measure(recipe: str, images: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds by feed: until the call returns, and until the views are there."""
    feeds = ["torch", "fused"] + ([] if _dali.obstacle() else ["dali"])
    makers = {feed: make(recipe, feed) for feed in feeds}
    times: dict[str, list[tuple[float, float]]] = {feed: [] for feed in feeds}
    for sequence in range(rounds + _WARM):
        for feed, maker in makers.items():
            _finish(images)
            start = time.perf_counter()
            views, _ = maker.make(images, SIZES, 0, sequence)
            returned = time.perf_counter() - start
            _finish(images)
            times[feed].append((1e3 * returned, 1e3 * (time.perf_counter() - start)))
            assert len(views) == ROWS * VIEWS_PER_ROW
    return {
        feed: tuple(statistics.median(column) for column in zip(*values[_WARM:], strict=True))
        for feed, values in times.items()
    }


def _finish(images: torch.Tensor) -> None:
    if images.is_cuda:
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="ocm", choices=("none", "ocm", "simclr"))
    parser.add_argument("--side", type=int, default=32, metavar="PIXELS", help="of the images [32]")
    parser.add_argument("--rounds", type=int, default=200, metavar="N")
    arguments = parser.parse_args(argv)
    if _dali.obstacle():
        print(f"without dali: {_dali.obstacle()}; {_dali.INSTALL}")
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        images = torch.randint(0, 256, (ROWS, arguments.side, arguments.side, 3), dtype=torch.uint8).to(device)
        where = device_name(torch.device(device))
        what = f"{ROWS * VIEWS_PER_ROW} views of {arguments.side}x{arguments.side}, recipe {arguments.recipe}"
        print(f"{what}, {where}, torch {torch.__version__}" + ("" if _dali.obstacle() else f", DALI {_dali.version()}"))
        print(f"{'feed':<6} {'ms, returns':>12} {'ms, done':>10}")
        for feed, (returned, done) in measure(arguments.recipe, images, arguments.rounds).items():
            print(f"{feed:<6} {returned:>12.2f} {done:>10.2f}")


if __name__ == "__main__":
    main()
