"""How fast an image folder is read, and how fast and in how much memory a run on it trains.

    python -m build_tools.image_folder FOLDER    # 100 classes of 500 JPEGs of 300 pixels
    python -m bench.large_folder FOLDER --resize 64 --width 8 --limit-per-task 500

It decodes training images in batches, as a run does, without a network; then it runs ER and prints
the memory of the process after each task, and its peak. With --load memory, the
images are decoded before, so that training alone is timed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import psutil

from mose_fast import streams
from mose_fast.device import device_name, peak_bytes
from mose_fast.methods import resolve_device
from mose_fast.settings.run import RunConfig
from mose_fast.streams.image_files import ImageFiles
from mose_fast.train import Listener, run


class Memory(Listener):
    """Prints the memory of the process after each task, and its peak so far."""

    def on_task_end(self, task: int, batch: int, accuracy: object) -> None:
        held = psutil.Process().memory_info().rss
        print(f"task {task + 1}: {held / 1e6:,.0f} MB, peak {peak_bytes() / 1e6:,.0f} MB", flush=True)


def images_a_second(stream: streams.Stream, images: int) -> float:
    """Images a second of decoding the first batches of the first part, without a network."""
    batches = stream.batches(0, seed=0)[: -(-images // stream.batch)]
    start = time.perf_counter()
    count = sum(len(rows) for _, rows in stream.x_train.ahead(batches))
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.large_folder", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resize", type=int, default=64)
    parser.add_argument("--load", default="disk", choices=("memory", "disk"))
    parser.add_argument("--decoder", default="auto", choices=("auto", "pil", "dali"))
    parser.add_argument("--read", type=int, default=2000, help="images that are read alone (default: %(default)s)")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--memory", type=int, default=1000)
    parser.add_argument("--buffer-batch", type=int, default=64)
    parser.add_argument("--evaluation-batch", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--first-tasks", type=int)
    parser.add_argument("--limit-per-task", type=int)
    given = vars(parser.parse_args())
    how = {name: given[name] for name in ("resize", "load", "decoder", "tasks", "first_tasks", "limit_per_task")}
    sizes = {name: given[name] for name in ("width", "memory", "buffer_batch", "evaluation_batch")}
    config = RunConfig.create(method="er", stream={"name": str(given["folder"]), **how}, **sizes)

    start = time.perf_counter()
    stream = streams.create(config.stream)
    print(f"{stream.summary}; {device_name(resolve_device('auto'))}; made in {time.perf_counter() - start:.1f} s")
    if isinstance(stream.x_train, ImageFiles):
        print(f"reading alone: {images_a_second(stream, given['read']):,.0f} images/s")
    results = run(config, stream=stream, listeners=[Memory()])
    images, seconds = sum(map(stream.count_images, range(stream.parts))), results["seconds"]
    print(f"training from {given['load']}: {images / seconds['train']:,.0f} images/s; seconds by phase: {seconds}")
    print(f"peak memory: {results['peak_memory_bytes']['host'] / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
