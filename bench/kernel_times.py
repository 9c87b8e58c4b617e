"""The time of a full step by kernel, with our kernels and with PyTorch's.

    python -m bench.kernel_times --csv build/kernels.csv    # on a GPU: a step of 384 views in bf16
    python -m bench.kernel_times --device cpu               # small, only shows that it runs

A full step of a later task is replayed 20 times from its graph on prepared inputs, and
torch.profiler records each kernel. Rows have the columns :data:`COLUMNS`; the kernel ``(all)`` is
the sum of an op, the op ``(all)`` that of the step. The table on the screen leaves out what takes
less than a thousandth of the step. How many bytes an op moves, and at what rate, its own benchmark
says.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.common import SMALL_RUN, gpu_is_missing
from mose_fast.app.bench import random_stream
from mose_fast.device import device_name, own_stream
from mose_fast.methods import Mose, Prepared, create_learner
from mose_fast.runs.clock import laps
from mose_fast.settings.run import RunConfig
from mose_fast.train.captured import CapturedSteps

COLUMNS = ("kernels", "op", "kernel", "launches", "us")

#: Which op a kernel belongs to, by the first pattern that its name has. Ours first; then the
#: libraries', whose names are their own.
_OPS = (
    (r"batch_norm_act_|norm_statistics_kernel|norm_state_backward_kernel", "batch_norm_act"),
    (r"align_conv_", "align_conv"),
    (r"batch_norm_pool_", "batch_norm_pool"),
    (r"norm_pool_", "norm_pool"),
    (r"expert_(statistics|terms|gradient)_kernel", "expert_losses"),
    (r"adam_(begin|pieces)_kernel", "adam"),
    (r"augment_|advance_counter_kernel", "augment"),
    (r"reservoir_", "reservoir"),
    (r"[Mm]emcpy|[Mm]emset", "copies and fills"),
    (r"at::native|multi_tensor_apply", "PyTorch, elementwise and sums"),
    (r"cudnn|conv|wgrad|dgrad|fprop|xmma|cutlass|gemm|nvjet|cublas", "convolutions and products"),
)

#: Settings of the step by device, and how many are profiled.
SETTINGS = {
    "cuda": {"device": "cuda", "precision": "bf16", "feed": "fused", "step": "captured", "memory": 5000},
    "cpu": {**SMALL_RUN, "feed": "fused", "step": "eager"},
}
STEPS = {"cuda": 20, "cpu": 1}


class Measured(NamedTuple):
    """Launches and microseconds of one kernel in one step."""

    launches: float
    microseconds: float


def op_of(kernel: str) -> str:
    """The op that a kernel belongs to, by its name."""
    return next((op for pattern, op in _OPS if re.search(pattern, kernel)), "other")


def measured_step(config: RunConfig, steps: int) -> tuple[dict[str, Measured], float, int]:
    """Measures a full step of a later task: the kernels by name, microseconds of a step by events,
    without the profiler, and the number of views. Raises RuntimeError if it could not be captured
    on a GPU.
    """
    stream = random_stream(config, classes=100, images=60 * config.stream.batch)
    learner: Mose = create_learner(config, **stream.spec)
    on_gpu = learner.device.type == "cuda"
    with own_stream(learner.device):
        captured = CapturedSteps(learner, capture=config.step == "captured")
        prepared: Prepared | None = None
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed):
                # Only the memory is filled; the network is not needed for that.
                prepared = learner.prepare(stream.x_train[rows], stream.y_train[rows], task, index=rows)
        (planned,) = prepared.steps
        for _ in range(5):
            learner.step(planned.inputs, captured)
        if on_gpu and captured.obstacle:
            raise RuntimeError(f"the step was not captured: {captured.obstacle}")
        microseconds = 0.0
        if on_gpu:
            microseconds = 1e6 * fmean(laps(learner.device, lambda: learner.step(planned.inputs, captured), steps))
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
            for _ in range(steps):
                learner.step(planned.inputs, captured)
            if on_gpu:
                torch.cuda.synchronize()
    if on_gpu:
        found = [(e.name, 1, e.time_range.elapsed_us()) for e in profiled.events() if e.device_type == DeviceType.CUDA]
    else:
        found = [(e.key, e.count, e.self_cpu_time_total) for e in profiled.key_averages()]
    if not found:
        raise RuntimeError("the profiler noted no kernel; set TEARDOWN_CUPTI=0 where another profile ran before")
    by_name: defaultdict[str, list[Measured]] = defaultdict(list)
    for name, launches, took in found:
        by_name[name].append(Measured(launches / steps, took / steps))
    return {name: _sum(parts) for name, parts in by_name.items()}, microseconds, len(planned.inputs.targets.labels)


def _sum(parts: Sequence[Measured]) -> Measured:
    return Measured(*(sum(column) for column in zip(*parts, strict=True)))


def rows(which: str, kernels: dict[str, Measured]) -> list[dict[str, str]]:
    """Rows of :data:`COLUMNS`: the step, then its ops and their kernels, each from the longest to
    the shortest; ``which`` says whose kernels they are, ``fused`` or ``torch``.
    """

    def row(op: str, kernel: str, measured: Measured) -> dict[str, str]:
        values = (which, op, kernel, f"{measured.launches:.1f}", f"{measured.microseconds:.2f}")
        return dict(zip(COLUMNS, values, strict=True))

    ops: defaultdict[str, dict[str, Measured]] = defaultdict(dict)
    for name, measured in sorted(kernels.items(), key=lambda item: -item[1].microseconds):
        ops[op_of(name)][name] = measured
    found = [row("(all)", "(all)", _sum([*kernels.values()]))]
    totals = {op: _sum([*own.values()]) for op, own in ops.items()}
    for op, total in sorted(totals.items(), key=lambda item: -item[1].microseconds):
        found += [row(op, "(all)", total), *(row(op, name, measured) for name, measured in ops[op].items())]
    return found


def table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as text, without those below a thousandth of the step."""
    lines = [f"{'launches':>12}  {'us':>12}  op or kernel"]
    for row in rows:
        if float(row["us"]) >= float(rows[0]["us"]) / 1000:
            name = row["op"] if row["kernel"] == "(all)" else f"    {row['kernel'][:100]}"
            lines.append(f"{row['launches']:>12}  {row['us']:>12}  {name}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_times", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--csv", type=Path, help="file for all rows")
    given = parser.parse_args(arguments)
    if gpu_is_missing(given.device):
        return 2
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # else the second profile of a process may find nothing
    print(f"{device_name(torch.device(given.device))}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    found: list[dict[str, str]] = []
    status = 0
    for which in ("fused", "torch"):
        torch.manual_seed(0)
        try:
            config = RunConfig.create(**SETTINGS[given.device], kernels=which)
            kernels, microseconds, views = measured_step(config, STEPS[given.device])
        except RuntimeError:  # the other one can still be measured
            print(f"\nkernels {which} failed:\n{traceback.format_exc()}", flush=True)
            status = 1
            continue
        new = rows(which, kernels)
        found += new
        by_events = f", {microseconds:.0f} us by events, one step after the other" if microseconds else ""
        print(
            f"\nkernels {which}, a step of {views} views: {new[0]['us']} us in {new[0]['launches']} kernels{by_events}"
        )
        print(table(new), flush=True)
        if given.csv is not None:  # after each, should the next one break off
            with open(given.csv, "w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
