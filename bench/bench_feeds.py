"""The time that each feed takes to make the views of a step: plain PyTorch, the native op, DALI.

    python -m bench.bench_feeds                         # 384 views of 32x32, on the CPU and a card
    python -m bench.bench_feeds --side 64 --rounds 50

The first table has medians of ``returns``, the time until the call returns, and ``done``, the time
until the views are there; on a card, other work can be launched in between. Feeds are measured
alternately, so that other load on the machine affects all of them.

The second table is about the thread that launches steps, per batch. ``asks`` is its own processor
time: launching, for views that the step makes itself; for DALI, passing the request to the feeder
and taking the views. ``feeder`` is the processor time of the feeder's thread, ``holds`` the part of
it in which no other Python thread could run: a second thread reads the clocks continuously, and
what the feeder has computed during a gap between two readings, it has computed while it kept the
second thread from running.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mose_fast import _dali
from mose_fast.augment import ViewMaker
from mose_fast.device import device_name
from mose_fast.train.feeder import Feeder
from mose_fast.train.ring import DEPTH

#: As in a step on Split CIFAR-100: two fixed copies of every row, and an augmented view of each.
ROWS, VIEWS_PER_ROW = 96, 4
SIZES = (32, ROWS - 32)

# The first calls build pipelines and warm caches.
_WARM = 5

# Two looks of the second thread lie this far apart at most where nothing keeps it from running.
_LOOK = 2e-5


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


def asks(maker: ViewMaker, images: torch.Tensor, rounds: int) -> float:
    """Median milliseconds of processor time that a batch's views cost the thread that launches
    steps.
    """
    feeder, waiting, times = Feeder(images.device), [], []
    for sequence in range(rounds + _WARM + DEPTH):
        views = partial(maker.views, images, SIZES, 0, sequence)
        start = time.thread_time()
        if maker.apart:
            waiting.append(feeder.put(views, (images,) if images.is_cuda else ()))
        else:
            views()
        if len(waiting) > DEPTH:
            feeder.take(waiting.pop(0))
        times.append(1e3 * (time.thread_time() - start))
        _finish(images)
    feeder.close()
    return statistics.median(times[_WARM + DEPTH :])


def held(call: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Median milliseconds of processor time of a call on a thread, and of the part in which no
    other Python thread could run.
    """
    calls: list[tuple[float, float, float]] = []
    done = threading.Event()

    def work() -> None:
        for number in range(rounds + _WARM):
            start, spent = time.perf_counter(), time.thread_time()
            call(number)
            calls.append((start, time.perf_counter(), time.thread_time() - spent))
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=work)
    thread.start()
    clock = time.pthread_getcpuclockid(thread.ident)
    gaps: list[tuple[float, float]] = []  # when it ended, and what the thread computed in it
    last, spent = time.perf_counter(), time.clock_gettime(clock)
    while not done.is_set():
        now, computed = time.perf_counter(), time.clock_gettime(clock)
        if now - last > _LOOK:
            gaps.append((now, computed - spent))
        last, spent = now, computed
    thread.join()
    sys.setswitchinterval(before)
    kept = [sum(computed for when, computed in gaps if start <= when <= end) for start, end, _ in calls]
    return 1e3 * statistics.median(spent for *_, spent in calls[_WARM:]), 1e3 * statistics.median(kept[_WARM:])


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
        print(f"{'feed':<6} {'ms, asks':>12} {'feeder':>10} {'holds':>10}")
        for feed in ["fused"] + ([] if _dali.obstacle() else ["dali"]):
            maker = make(arguments.recipe, feed)
            line = f"{feed:<6} {asks(maker, images, arguments.rounds):>12.3f}"
            if maker.apart:
                spent, kept = held(partial(maker.views, images, SIZES, 0), arguments.rounds)
                line += f" {spent:>10.3f} {kept:>10.3f}"
            print(line)
            maker.close()


if __name__ == "__main__":
    main()
