"""The time of a full step by kernel, beside the bytes that our ops need.

    python -m bench.kernel_times --csv build/kernels.csv    # on a card: a step of 384 views in bf16
    python -m bench.kernel_times --device cpu               # small, only shows that it runs

A full step of a later task is replayed 20 times from its graph on prepared inputs, with our kernels
and with PyTorch's, and torch.profiler records each kernel. Rows have the columns :data:`COLUMNS`;
the kernel ``(all)`` is the sum of an op, the op ``(all)`` that of the step. ``floor_us`` is the
time to copy the needed bytes at the copy rate measured in the same call. The table on the screen
leaves out what takes less than a thousandth of the step.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.bench_align_conv import elements_moved
from bench.bench_batch_norm_act import bytes_moved
from bench.bench_batch_norm_pool import bytes_moved as last_bytes
from mose_fast.app.bench import copy_rate, random_stream
from mose_fast.device import device_name, own_stream
from mose_fast.methods import Mose, Prepared, create_learner
from mose_fast.nn import alignment, backbone
from mose_fast.runs.clock import laps
from mose_fast.settings.run import RunConfig
from mose_fast.train.captured import CapturedSteps

__all__ = ["COLUMNS", "Measured", "counted_bytes", "measured_step", "op_of", "rows", "table"]

COLUMNS = ("kernels", "op", "kernel", "launches", "us", "needed_mb", "moved_mb", "floor_us")

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
SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {"device": "cuda", "precision": "bf16", "feed": "fused", "step": "captured", "memory": 5000},
    "cpu": {
        "device": "cpu",
        "precision": "fp32",
        "feed": "fused",
        "step": "eager",
        "memory": 60,
        "width": 2,
        "options": {"buffer_batch": 8, "new_extra": 2},
    },
}
STEPS = {"cuda": 20, "cpu": 1}


class Measured(NamedTuple):
    """Launches and microseconds of one kernel in one step."""

    launches: float
    microseconds: float


def op_of(kernel: str) -> str:
    """The op that a kernel belongs to, by its name."""
    return next((op for pattern, op in _OPS if re.search(pattern, kernel)), "other")


@contextmanager
def counted_bytes() -> Iterator[dict[str, list[int]]]:
    """Counts the bytes of the network's calls while the context is open, forward and backward: a
    dict of op to [needed, moved].
    """
    found: dict[str, list[int]] = {}

    def add(op: str, needed: int, moved: int) -> None:
        sums = found.setdefault(op, [0, 0])
        sums[0] += needed
        sums[1] += moved

    def norm(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(x: Tensor, *arguments: Any, **options: Any) -> Any:
            form = (
                "two_norms"
                if options.get("residual_norm")
                else "residual"
                if options.get("residual") is not None
                else "plain"
            )
            moved = bytes_moved(x.numel(), x.element_size(), form, options.get("consumers", 1), backward=True)
            add("batch_norm_act", moved, moved)
            return original(x, *arguments, **options)

        return counted

    def align(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(x: Tensor, depthwise: Tensor, pointwise: Tensor, *arguments: Any, **options: Any) -> Any:
            gate = options.get("gate") is not None
            sizes = len(x), x.shape[1], len(pointwise), x.shape[2], options.get("stride", 1)
            needed, moved = elements_moved(*sizes, gate=gate, dtype=x.dtype, backward=True)
            add("align_conv", needed * x.element_size(), moved * x.element_size())
            return original(x, depthwise, pointwise, *arguments, **options)

        return counted

    def pool(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(x: Tensor, *arguments: Any, **options: Any) -> Any:
            moved = 3 * x.numel() * x.element_size()  # read; read again and written
            add("norm_pool", moved, moved)
            return original(x, *arguments, **options)

        return counted

    def last(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(x: Tensor, *arguments: Any, **options: Any) -> Any:
            moved = last_bytes(x.numel(), x.element_size(), backward=True)
            add("batch_norm_pool", moved, moved)
            return original(x, *arguments, **options)

        return counted

    with ExitStack() as stack:
        for module, name, wrap in (
            (backbone, "batch_norm_act", norm),
            (backbone, "batch_norm_pool", last),
            (alignment, "batch_norm_act", norm),
            (alignment, "align_conv", align),
            (alignment, "norm_pool", pool),
        ):
            stack.enter_context(mock.patch.object(module, name, wrap(getattr(module, name))))
        yield found


def measured_step(config: RunConfig, steps: int) -> tuple[dict[str, Measured], float, dict[str, list[int]], int]:
    """Measures a full step of a later task.

    Returns:
        The kernels by name; microseconds of a step by events, without the profiler; bytes by op;
        the number of views.

    Raises:
        RuntimeError: The step could not be captured on a card.
    """
    stream = random_stream(config, classes=100, images=60 * config.stream.batch)
    learner: Mose = create_learner(config, **stream.spec)
    on_card = learner.device.type == "cuda"
    with own_stream(learner.device):
        captured = CapturedSteps(learner, capture=config.step == "captured")
        prepared: Prepared | None = None
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed):
                # Only the memory is filled; the network is not needed for that.
                prepared = learner.prepare(stream.x_train[rows], stream.y_train[rows], task, index=rows)
        (planned,) = prepared.steps
        with counted_bytes() as by_op:
            learner.step(planned.inputs, captured)
        weights = sum(weight.numel() for weight in learner.network.parameters())
        if config.kernels == "fused":
            by_op["adam"] = [28 * weights] * 2
        for _ in range(4):
            learner.step(planned.inputs, captured)
        if on_card and captured.obstacle:
            raise RuntimeError(f"the step was not captured: {captured.obstacle}")
        microseconds = 0.0
        if on_card:
            microseconds = 1e6 * fmean(laps(learner.device, lambda: learner.step(planned.inputs, captured), steps))
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]) as profiled:
            for _ in range(steps):
                learner.step(planned.inputs, captured)
            if on_card:
                torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    if on_card:
        pairs = [(e.name, 1, e.time_range.elapsed_us()) for e in profiled.events() if e.device_type == DeviceType.CUDA]
    else:
        pairs = [(e.key, e.count, e.self_cpu_time_total) for e in profiled.key_averages()]
    for name, launches, took in pairs:
        entry = sums.setdefault(name, [0, 0.0])
        entry[0] += launches
        entry[1] += took
    if not sums:
        raise RuntimeError("the profiler noted no kernel; set TEARDOWN_CUPTI=0 where another profile ran before")
    kernels = {name: Measured(launches / steps, took / steps) for name, (launches, took) in sums.items()}
    return kernels, microseconds, by_op if config.kernels == "fused" else {}, len(planned.inputs.targets.labels)


def rows(
    which: str, kernels: dict[str, Measured], by_op: dict[str, list[int]], copied: float | None
) -> list[dict[str, str]]:
    """Rows of :data:`COLUMNS`: the step, then its ops and their kernels, each from the longest to
    the shortest.

    Args:
        which: Whose kernels: ``fused`` or ``torch``.
        kernels: The kernels by name.
        by_op: Bytes needed and moved, by op.
        copied: Bytes a second of a copy; None if it was not measured.
    """

    def total(parts: Iterable[Measured]) -> Measured:
        parts = list(parts)
        return Measured(sum(part.launches for part in parts), sum(part.microseconds for part in parts))

    def row(op: str, kernel: str, measured: Measured) -> dict[str, str]:
        whole = kernel == "(all)"
        needed, moved = by_op.get(op, (None, None)) if whole else (None, None)
        values = {
            "kernels": which,
            "op": op,
            "kernel": kernel,
            "launches": f"{measured.launches:.1f}",
            "us": f"{measured.microseconds:.2f}",
            "needed_mb": "" if needed is None else f"{needed / 1e6:.1f}",
            "moved_mb": "" if moved is None else f"{moved / 1e6:.1f}",
            "floor_us": "" if needed is None or copied is None else f"{1e6 * needed / copied:.1f}",
        }
        return {name: values[name] for name in COLUMNS}

    ops: dict[str, dict[str, Measured]] = {}
    for name, measured in kernels.items():
        ops.setdefault(op_of(name), {})[name] = measured
    found = [row("(all)", "(all)", total(kernels.values()))]
    for op, own in sorted(ops.items(), key=lambda item: -total(item[1].values()).microseconds):
        found.append(row(op, "(all)", total(own.values())))
        found += [
            row(op, name, measured) for name, measured in sorted(own.items(), key=lambda item: -item[1].microseconds)
        ]
    return found


def table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as text, without those below a thousandth of the step; kernels' names are cut off at
    100 characters.
    """
    least = float(rows[0]["us"]) / 1000
    numbers = COLUMNS[3:]
    lines = ["  ".join([*(f"{name:>12}" for name in numbers), "op or kernel"])]
    for row in rows:
        if float(row["us"]) >= least:
            whole = row["kernel"] == "(all)"
            name = row["op"] if whole else f"    {row['kernel'][:100]}"
            lines.append("  ".join([*(f"{row[column] or '-':>12.12}" for column in numbers), name]))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_times", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--csv", type=Path, help="file for all rows")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA card; wanted one, or --device cpu", file=sys.stderr)
        return 2
    on_card = given.device == "cuda"
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # else the second profile of a process may find nothing
    device = torch.device(given.device)
    print(f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    copied = copy_rate(device) if on_card else None
    found: list[dict[str, str]] = []
    status = 0
    for which in ("fused", "torch"):
        torch.manual_seed(0)
        try:
            config = RunConfig.create(**SETTINGS[given.device], kernels=which)
            kernels, microseconds, by_op, views = measured_step(config, STEPS[given.device])
        except RuntimeError:  # the other one can still be measured
            print(f"\nkernels {which} failed:\n{traceback.format_exc()}", flush=True)
            status = 1
            continue
        new = rows(which, kernels, by_op, copied)
        found += new
        by_events = f", {microseconds:.0f} us by events, one step after the other" if on_card else ""
        print(
            f"\nkernels {which}, a step of {views} views: {new[0]['us']} us in {new[0]['launches']} kernels{by_events}"
        )
        print(table(new), flush=True)
        if given.csv is not None:  # after each, should the next one break off
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
            given.csv.write_text(text.getvalue())
    return status


if __name__ == "__main__":
    sys.exit(main())
