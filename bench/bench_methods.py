"""The time of a training step of every method relative to ER's, beside the arithmetic estimate in
docs/specification/baselines.md section 0.1.

    python -m bench.bench_methods --width 20 --rounds 10

Methods alternate step by step, so that other load on the machine affects all of them; the medians
are compared. On a GPU, steps are captured where a run captures them, and a time includes planning,
which a run does while earlier steps are taken.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import torch

from mose_fast.device import own_stream
from mose_fast.methods import METHODS, create_learner
from mose_fast.runs.clock import laps
from mose_fast.train.captured import CapturedSteps

#: Shape of the comparison: Split CIFAR-100 with its batches and a memory of 1,000.
CLASSES, SIZE, MEMORY, BATCH = 100, 32, 1000, 10


def batch(task: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten images of noise with labels of one of ten tasks."""
    generator = torch.Generator().manual_seed(1000 * task + step)
    x = torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
    return x, torch.randint(10 * task, 10 * task + 10, (BATCH,), generator=generator)


class Stepper:
    """A learner with a full memory of nine tasks, in the middle of its tenth; it takes steps as in
    a run, captured where they can be.
    """

    def __init__(self, name: str, width: int, device: str) -> None:
        self.learner = create_learner(classes=CLASSES, method=name, width=width, memory=MEMORY, device=device)
        captured = self.learner.stepping.name == "captured"
        self._steps = CapturedSteps(self.learner, capture=captured) if self.learner.reads_losses_late else None
        for task in range(9):
            for step in range(20):
                self.observe(task, step, train=False)
        for step in range(3):
            self.observe(9, step)

    def observe(self, task: int, step: int, **how: bool) -> None:
        self.learner.prepare(*batch(task, step), task, **how).take(self._steps)


def relative_cost(names: Sequence[str], width: int, rounds: int, device: str) -> None:
    """Prints of every method the time of a step, its cost relative to ER, and the estimate."""
    steppers = {name: Stepper(name, width, device) for name in dict.fromkeys(["er", *names])}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for step in range(rounds):
        for name, stepper in steppers.items():
            times[name] += laps(stepper.learner.device, partial(stepper.observe, 9, 100 + step), 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'method':<10} {'ms a step':>10} {'x ER':>6} {'estimate':>9} {'ratio':>6}")
    for name, median in medians.items():
        measured, estimate = median / medians["er"], METHODS[name].about.cost
        ratio = f"{measured / estimate:6.2f}" if estimate else "     -"
        print(f"{name:<10} {1e3 * median:>10.1f} {measured:>6.2f} {estimate:>9.2f} {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--width", type=int, default=20, help="channels of the first stage [20]")
    parser.add_argument("--rounds", type=int, default=10, help="steps timed of every method [10]")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with own_stream(torch.device(arguments.device)):
        relative_cost(arguments.methods, arguments.width, arguments.rounds, arguments.device)


if __name__ == "__main__":
    main()
