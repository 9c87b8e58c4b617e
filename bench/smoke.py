"""The shortest run that shows whether training works on a GPU: captured steps against eager ones,
our kernels beside PyTorch's.

    python -m bench.smoke                   # on a GPU: full width, bf16
    python -m bench.smoke --device cpu      # small, float32, eager: only shows that it runs

Captured and eager runs are deterministic: every loss must be equal, there must be two graphs, and
no capture may have failed. PyTorch's kernels start from the same weights and views, so that their
first loss must be close to ours. Every failure is printed with its whole traceback; that of a
capture, which a run survives, is in the run's warning. Exit status: 0 if everything is as wanted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import mose_fast
from bench.common import SMALL_RUN, gpu_is_missing, random_images
from mose_fast.settings.run import RunConfig
from mose_fast.streams import from_arrays
from mose_fast.train import Listener

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
    """Losses of a run, and its results.json."""

    losses: list[dict[str, float]]
    results: dict[str, Any]


class _Losses(Listener):
    def __init__(self) -> None:
        self.taken: list[dict[str, float]] = []

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        if losses is not None:
            self.taken.append(losses)


def not_captured(results: dict[str, Any]) -> list[str]:
    """What is wrong with the steps of a run of two tasks on a GPU that should be captured."""
    resolved = results["resolved"]
    if results["gpu"] is None or (resolved["step"] == "captured" and results["eager_steps"] <= GRAPHS):
        return []
    return [
        f"seed {results['seed']}, feed {resolved['feed']}: step {resolved['step']}"
        f" ({resolved['reasons'].get('step', 'no reason')}), {results['eager_steps']} of {results['steps']} steps"
        f" eager; wanted captured and {GRAPHS}"
    ]


def complaints(captured: Trained, eager: Trained, plain: Trained | None, near: float) -> list[str]:
    """What is wrong with these runs, one line each. Two have our kernels, in captured and in eager
    steps, ``plain`` has PyTorch's (None if it failed); its first loss may differ from that of
    ``eager`` by the share ``near``.
    """
    found = not_captured(captured.results)
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
    settings = SETTINGS[given.device]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic; read when CUDA starts

    def attempt(name: str, **changes: Any) -> Trained | None:
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses = _Losses()
        stream = from_arrays(*random_images(IMAGES[given.device]), tasks=2)
        try:
            results = mose_fast.run(RunConfig.create(**settings, **changes), stream=stream, listeners=[losses])
        except Exception:  # the other runs can still say something
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
            return None
        first = losses.taken[0]["loss"] if losses.taken else math.nan
        seconds, peak = results["seconds"], results["peak_memory_bytes"]["device"] or 0
        print(
            f"{name}: {len(losses.taken)} steps, {seconds['wall']:.1f} s, first loss {first:.4f}, "
            f"peak {peak / 1e6:,.0f} MB, capture {seconds['capture']:.2f} s",
            flush=True,
        )
        return Trained(losses.taken, results)

    how = "captured" if given.device == "cuda" else "eager"
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
