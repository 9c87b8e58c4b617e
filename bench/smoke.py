"""The shortest run that shows whether training works on a GPU: captured steps against eager ones,
our kernels beside PyTorch's.

    python -m bench.smoke                   # on a GPU: full width, bf16
    python -m bench.smoke --device cpu      # small, float32, eager: only shows that it runs

Captured and eager runs are deterministic: every loss must be equal, there must be two graphs, and
no capture may have failed. PyTorch's kernels start from the same weights and views, so that their
first loss must be close to ours. Every failure is printed with its whole traceback, also that of a
capture, which a run survives. Exit status: 0 if everything is as wanted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

import mose_fast
from bench.common import SMALL_RUN, gpu_is_missing, random_images
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream, from_arrays
from mose_fast.train import Listener
from mose_fast.train.captured import CapturedSteps

#: Relative difference that is granted between the first losses of our kernels and PyTorch's;
#: gradients do not enter it yet.
NEAR = {"bf16": 0.03, "fp32": 1e-4}
#: Settings of the runs by device, and training images of both tasks.
SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {"device": "cuda", "precision": "bf16", "feed": "fused", "memory": 200},
    "cpu": {**SMALL_RUN, "feed": "fused"},
}
IMAGES = {"cuda": 1200, "cpu": 60}
#: Graphs of a run with two tasks: one for the first task's steps, one for later ones.
GRAPHS = 2


class Trained(NamedTuple):
    """What one run left: losses of its trained batches, its captured steps (None without a GPU),
    seconds, peak bytes on the GPU.
    """

    losses: list[dict[str, float]]
    steps: CapturedSteps | None
    seconds: float
    peak: int


class _Losses(Listener):
    def __init__(self) -> None:
        self.taken: list[dict[str, float]] = []

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        if losses is not None:
            self.taken.append(losses)


@contextmanager
def _remembered() -> Iterator[list[CapturedSteps]]:
    """Collects the steppers of all runs made while the context is open."""
    made: list[CapturedSteps] = []
    initialise = CapturedSteps.__init__

    def remember(stepper: CapturedSteps, *arguments: Any, **options: Any) -> None:
        made.append(stepper)
        initialise(stepper, *arguments, **options)

    with mock.patch.object(CapturedSteps, "__init__", remember):
        yield made


def two_tasks(images: int) -> Stream:
    """A stream of ``images`` random training images in two tasks of ten classes."""
    return from_arrays(*random_images(images), tasks=2)


def train(config: RunConfig, stream: Stream) -> Trained:
    """Runs the training once and records what :class:`Trained` holds."""
    listener = _Losses()
    on_gpu = torch.device(config.device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with _remembered() as made:
        mose_fast.run(config, stream=stream, listeners=[listener])
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return Trained(listener.taken, made[0] if made else None, time.perf_counter() - began, peak)


def complaints(captured: Trained, eager: Trained, plain: Trained | None, near: float) -> list[str]:
    """What is wrong with these runs, one line each. Two have our kernels, in captured and in eager
    steps, ``plain`` has PyTorch's (None if it failed); its first loss may differ from that of
    ``eager`` by the share ``near``.
    """
    found = []
    if captured.steps is not None:
        if captured.steps.obstacle:
            found.append(f"steps were not captured: {captured.steps.obstacle}\n{captured.steps.traceback}")
        if captured.steps.graphs != GRAPHS:
            found.append(f"{captured.steps.graphs} graphs served the run; wanted {GRAPHS}")
    if not eager.losses or len(captured.losses) != len(eager.losses):
        found.append(
            f"{len(captured.losses)} captured and {len(eager.losses)} eager steps were told; wanted equally many, at"
            " least one"
        )
        return found
    for number, (ours, wanted) in enumerate(zip(captured.losses, eager.losses, strict=True)):
        if ours != wanted:
            found.append(
                f"step {number + 1} of {len(eager.losses)}: captured {ours}, eager {wanted}; wanted equal losses"
            )
            break
    if not all(math.isfinite(loss) for losses in eager.losses for loss in losses.values()):
        found.append("an eager loss is not finite")
    if plain is not None:
        ours, wanted = eager.losses[0]["loss"], plain.losses[0]["loss"]
        if not abs(ours - wanted) <= near * abs(wanted):
            found.append(
                f"the first loss is {ours:g} by our kernels, {wanted:g} by PyTorch's; wanted a difference of at most"
                f" {near:.0%}"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.smoke", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args(arguments)
    if gpu_is_missing(given.device):
        return 2
    on_gpu = given.device == "cuda"
    settings = SETTINGS[given.device]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic; read when CUDA starts

    def attempt(name: str, **changes: Any) -> Trained | None:
        try:
            trained = train(RunConfig.create(**settings, **changes), two_tasks(IMAGES[given.device]))
        except Exception:  # the other runs can still say something
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
            return None
        steps = trained.steps
        graphs = "" if steps is None else f", {steps.graphs} graphs made in {steps.seconds:.2f} s"
        first = trained.losses[0]["loss"] if trained.losses else math.nan
        print(
            f"{name}: {len(trained.losses)} steps, {trained.seconds:.1f} s, first loss {first:.4f}, "
            f"peak {trained.peak / 1e6:,.0f} MB{graphs}",
            flush=True,
        )
        return trained

    how = "captured" if on_gpu else "eager"
    eager = attempt("our kernels, eager", kernels="fused", step="eager", deterministic=True)
    captured = attempt(f"our kernels, {how}", kernels="fused", step=how, deterministic=True)
    plain = attempt("PyTorch's kernels, eager", kernels="torch", step="eager")
    found = [
        f"{name} failed"
        for name, trained in (("captured", captured), ("eager", eager), ("plain", plain))
        if trained is None
    ]
    if captured is not None and eager is not None:
        found += complaints(captured, eager, plain, NEAR[settings["precision"]])
    for complaint in found:
        print(f"WRONG: {complaint}")
    if not found:
        print(
            f"{len(eager.losses)} losses equal bit for bit, captured and eager; the first is near that of PyTorch's"
            " kernels"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
