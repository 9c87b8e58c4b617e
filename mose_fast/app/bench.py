"""Measures what training costs on this machine, beside plain PyTorch: the step alone, the step in
the loop, evaluations, and a forecast of a whole run.

Images are random, since no time depends on what they show. All variants are measured in one
process, each with a new learner.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import io
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import mose_fast
from mose_fast import _loader
from mose_fast.augment import choose_feed
from mose_fast.device import device_name, own_stream
from mose_fast.evaluate import evaluate_learner
from mose_fast.methods import Mose, create_learner
from mose_fast.runs.clock import laps
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import Stream, from_arrays
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.pipeline import Batch, Pipeline, incoming, resident

_COLUMNS = (
    *("variant", "views", "ms", "p20_ms", "p80_ms", "images_per_s"),
    *("tflops", "share_of_ceiling", "peak_bytes", "note", "where"),
)

#: Steps of a task until its batches have their full size, with a margin.
_RAMP = 12

#: Steps in the loop before the measured ones. On a GPU, these are captured and fill ring and
#: reader; the CPU needs none.
_WARM_UP = {"cuda": 20, "cpu": 3}

#: Largest number of calls of a measurement.
_CALLS = 2000


class Ceilings(NamedTuple):
    """The machine's measured peak rates: ``tflops`` of a large matrix product in the run's
    precision, and ``gbytes`` (1e9 bytes) a second that a copy reads and writes."""

    tflops: float
    gbytes: float


class Variant(NamedTuple):
    """One way to train: the settings it has, whether ``torch.compile`` compiles the network, and
    whether the step is measured in the loop or alone, on prepared inputs.
    """

    name: str
    settings: dict[str, str]
    compiled: bool = False
    looped: bool = False


class Row(NamedTuple):
    """A measurement: milliseconds (median, and the quantiles 0.2 and 0.8) of a step with ``views``
    views, or of an evaluation of so many images; the largest number of bytes allocated on the GPU,
    None on the CPU. Without a time, ``note`` says why, and ``traceback`` where the program failed.
    """

    name: str
    views: int = 0
    milliseconds: float | None = None
    p20: float | None = None
    p80: float | None = None
    peak: int | None = None
    note: str = ""
    traceback: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of :func:`benchmark`.

    Attributes:
        where: GPU or processor, versions.
        config: Settings of the network and the steps.
        macs: Multiply-accumulates of a forward pass of one image.
        ceilings: The machine's peak rates.
        rows: One row for each variant.
        evaluation: An evaluation of all classifiers and experts on the images in memory and 10,000
            of a test set (fewer for a narrower network); None if not measured.
    """

    where: str
    config: RunConfig
    macs: int
    ceilings: Ceilings
    rows: tuple[Row, ...]
    evaluation: Row | None

    @property
    def failures(self) -> dict[str, str]:
        """Tracebacks of the measurements that failed, by name."""
        rows = self.rows if self.evaluation is None else (*self.rows, self.evaluation)
        return {row.name: row.traceback for row in rows if row.traceback}

    def tflops(self, row: Row) -> float:
        """TFLOP/s of a row: forward and backward passes (three forwards) of its views."""
        return 0.0 if row.milliseconds is None else 6e-12 * self.macs * row.views / (row.milliseconds / 1e3)

    def text(self) -> str:
        """A table for people."""
        config, possible = self.config, self.ceilings
        lines = [
            self.where,
            f"MOSE, width {config.width}, memory {config.memory}, precision {config.precision}",
            f"ceilings measured here: matrix product {possible.tflops:,.3g} TFLOP/s, copy {possible.gbytes:,.0f} GB/s",
            "",
            f"{'step of training':<44} {'views':>5} {'ms':>9} {'p20':>9} {'p80':>9} {'images/s':>9} {'TFLOP/s':>8}"
            f" {'share':>6} {'peak MB':>8}",
        ]
        for row in self.rows:
            if row.milliseconds is None:
                lines.append(f"{row.name:<44} {row.note}")
                continue
            rate = self.tflops(row)
            peak = "-" if row.peak is None else f"{row.peak / 1e6:,.0f}"
            lines.append(
                f"{row.name:<44} {row.views:>5} {row.milliseconds:>9.2f} {row.p20:>9.2f} {row.p80:>9.2f}"
                f" {row.views / row.milliseconds * 1e3:>9,.0f} {rate:>8.3g} {rate / possible.tflops:>6.1%} {peak:>8}"
            )
        if self.evaluation is not None:
            lines += ["", *self._evaluated(self.evaluation)]
        return "\n".join(lines)

    def _evaluated(self, row: Row) -> list[str]:
        if row.milliseconds is None:
            return [f"evaluation {row.note}"]
        seconds = row.milliseconds / 1e3
        lines = [f"evaluation of {row.views:,} images by every classifier and expert: {seconds:.3f} s"]
        looped = [row for row in self.rows if row.name.startswith("loop") and row.milliseconds]
        if looped:
            best = min(looped, key=lambda row: row.milliseconds)
            lines.append(
                f"a run of 5,000 such steps and 11 evaluations of that size: {5 * best.milliseconds + 11 * seconds:.0f}"
                f" s ({best.name}; reckoned, not measured: mose-fast run measures one)"
            )
        return lines

    def table(self) -> str:
        """The rows as CSV text."""
        file = io.StringIO()
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            cells = {"variant": row.name, "views": row.views, "note": row.note, "where": self.where}
            if row.milliseconds is not None:
                rate = self.tflops(row)
                cells |= {
                    "ms": f"{row.milliseconds:.4f}",
                    "p20_ms": f"{row.p20:.4f}",
                    "p80_ms": f"{row.p80:.4f}",
                    "images_per_s": f"{row.views / row.milliseconds * 1e3:.1f}",
                    "tflops": f"{rate:.3f}",
                    "share_of_ceiling": f"{rate / self.ceilings.tflops:.4f}",
                    "peak_bytes": row.peak,
                }
            writer.writerow(cells)
        return file.getvalue()


def variants(device: torch.device) -> list[Variant]:
    """All variants of a device: plain PyTorch, our kernels, then both in the loop by feed."""
    on_gpu = device.type == "cuda"
    plain, fused = {"kernels": "torch", "feed": "torch", "step": "eager"}, {"kernels": "fused", "feed": "fused"}
    # The views come from the fused feed, because PyTorch's cannot be part of a graph.
    graph = {"kernels": "torch", "feed": "fused", "step": "captured"}
    best = fused | {"step": "captured" if on_gpu else "eager"}
    by_feed = [
        Variant(f"loop: fused kernels, feed {f}", best | {"feed": f}, looped=True) for f in ("torch", "dali", "fused")
    ]
    found = [
        Variant("plain PyTorch, eager", plain),
        Variant("plain PyTorch, torch.compile, eager", plain, compiled=True),
        Variant("plain PyTorch, graph", graph),
        Variant("plain PyTorch, torch.compile, graph", graph, compiled=True),
        Variant("fused kernels, eager", fused | {"step": "eager"}),
        Variant("fused kernels, graph", fused | {"step": "captured"}),
        Variant("loop: plain PyTorch, feed torch", plain, looped=True),
        *by_feed,
    ]
    return [variant for variant in found if on_gpu or variant.settings["step"] == "eager"]


def random_stream(config: RunConfig, classes: int, images: int, tests: int = 100) -> Stream:
    """A stream of random 32x32 images in two tasks with half of the classes each, the first just
    large enough to replay from; ``images`` are those of the second, ``tests`` of both.
    """
    random = torch.Generator().manual_seed(0)
    half, batch = classes // 2, config.stream.batch
    labels = torch.cat([torch.arange(20 * batch) % half, half + torch.arange(images) % half])

    def draw(count: int) -> Tensor:
        return torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=random)

    return from_arrays(
        draw(len(labels)),
        labels,
        draw(tests),
        torch.arange(tests) % classes,
        tasks=2,
        name="random",
        normalisation="half",
        mirror_safe=True,
        batch=batch,
    )


def ceilings(device: torch.device, precision: str) -> Ceilings:
    """The best of five square products of 8,192 (CPU: 1,024), and of :func:`copy_rate`."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = min(back_to_back(device, lambda: a @ b, calls=5))
    return Ceilings(2e-12 * size**3 / product, 1e-9 * copy_rate(device))


def benchmark(
    config: RunConfig,
    *,
    classes: int = 100,
    seconds: float = 2.0,
    only: str = "",
    watch: Callable[[str], None] = lambda name: None,
) -> Report:
    """Measures all variants on the configuration's device.

    Args:
        config: MOSE's settings; device, precision, width, memory, batch and options are used.
        classes: Number of the network's classes.
        seconds: Time for each variant, after its warm-up.
        only: Measure only variants whose names contain this text.
        watch: Called with the name of the next measurement.

    Raises:
        ConfigError: The method is not MOSE, the device is missing, or no measurement's name
            contains ``only``.
    """
    if config.method != "mose":
        raise ConfigError(f"method is {config.method!r}; wanted mose, whose step is measured")
    stream = random_stream(config, classes, 1000 * config.stream.batch, tests=max(10_000 * config.width // 64, 100))
    probe = _learner(config, stream)
    config = dataclasses.replace(config, precision=probe.precision.name)
    device = probe.device
    measurements = {
        variant.name: lambda variant=variant: _steps(variant, config, device, stream, seconds)
        for variant in variants(device)
    }
    measurements["evaluation"] = lambda: _evaluation(config, stream)
    chosen = [name for name in measurements if only in name]
    if not chosen:
        raise ConfigError(
            f"only is {only!r}, which no measurement's name holds; here there are: {'; '.join(measurements)}"
        )
    # Measured before the variants, since one of them may break the GPU.
    where, macs, possible = _where(device), probe.costs()[0].macs, ceilings(device, config.precision)
    rows = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run would say it; rows have notes
        for name in chosen:
            watch(name)
            rows[name] = _measured(name, device, measurements[name])
    evaluation = rows.pop("evaluation", None)
    return Report(where, config, macs, possible, tuple(rows.values()), evaluation)


def back_to_back(
    device: torch.device, call: Callable[[], object], *, seconds: float = 0.0, calls: int | None = None
) -> list[float]:
    """Seconds of each of ``calls`` calls, or as many as fit in ``seconds``, after a warm-up.

    On a GPU the host only launches them, in the current stream; they should not wait for it.
    """
    warm = laps(device, call, 3 if calls is None else 1)
    if calls is None:
        calls = max(5, min(_CALLS, int(seconds / max(statistics.median(warm), 1e-6))))
    return laps(device, call, calls)


def quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """The quantiles 0.2, 0.5 (the median) and 0.8, linearly interpolated."""
    low, middle, high = np.quantile(seconds, (0.2, 0.5, 0.8)).tolist()
    return low, middle, high


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes; the best of five copies (1 GiB, CPU: 64 MiB)."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / min(back_to_back(device, lambda: target.copy_(source), calls=5))


def _measured(name: str, device: torch.device, measure: Callable[[], tuple[int, list[float]]]) -> Row:
    """The row of a measurement. After a lack of memory, a missing compiler or a failing kernel, the
    others can still be measured.
    """
    on_gpu = device.type == "cuda"
    try:
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        views, times = measure()
        low, middle, high = (1e3 * quantile for quantile in quantiles(times))
        return Row(name, views, middle, low, high, torch.cuda.max_memory_allocated(device) if on_gpu else None)
    except ConfigError as error:
        return Row(name, note=str(error))
    except Exception as error:
        return Row(name, note=_reason(error), traceback=traceback.format_exc())
    finally:
        # All start alike. After an error that the GPU does not recover from every call fails, and
        # the rows of the next measurements say so.
        torch.compiler.reset()
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # torch.compile wraps the one that tells
    line = (str(error).strip() or repr(error)).splitlines()[0]
    return f"failed: {type(error).__name__}: {line}"


def _steps(
    variant: Variant, config: RunConfig, device: torch.device, stream: Stream, seconds: float
) -> tuple[int, list[float]]:
    """Views and seconds of full steps of a variant."""
    config = dataclasses.replace(config, **variant.settings)
    if config.kernels == "fused" and not _loader.has_code(device.type):
        raise ConfigError(f"no native library: {_loader.obstacle or 'built for the CPU only'}")
    choose_feed(config.feed, device, None)
    return in_the_loop(config, stream, seconds) if variant.looped else _by_itself(variant, config, stream, seconds)


def _by_itself(variant: Variant, config: RunConfig, stream: Stream, seconds: float) -> tuple[int, list[float]]:
    """Steps of the later task, on prepared inputs."""
    learner = _learner(config, stream)
    with own_stream(learner.device):
        steps = CapturedSteps(learner, capture=config.step == "captured")
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed)[: _RAMP if task else None]:
                # Only the data plane runs, since filling the memory needs no model.
                prepared = learner.prepare(stream.x_train[rows], stream.y_train[rows], task, index=rows)
        if variant.compiled:
            learner.network.compile(dynamic=False)

        inputs = prepared.steps[0].inputs

        def step() -> None:
            learner.step(inputs, steps)

        if config.step == "captured":
            # The second step of a shape is the one that is captured.
            step()
            step()
            if not steps.graphs:
                raise RuntimeError(f"{steps.obstacle}\n{steps.traceback}")
        return len(inputs.targets.labels), back_to_back(learner.device, step, seconds=seconds)


def in_the_loop(config: RunConfig, stream: Stream, seconds: float) -> tuple[int, list[float]]:
    """Measures full steps in the pipeline of real runs: planning, feed, step, reading of losses.

    Args:
        config: MOSE's settings.
        stream: A stream of :func:`random_stream`.
        seconds: Time to measure for, after the warm-up.

    Returns:
        Views of a step; seconds a step, each a mean over up to ten steps, from the arrival of
        losses to that of later losses. RuntimeError if steps should be captured and could not be.
    """
    learner = _learner(config, stream)
    stream = resident(stream, learner.device)
    first, second = (stream.batches(task, seed=config.seed) for task in range(2))
    times: list[float] = []
    with own_stream(learner.device), closing(Pipeline(learner)) as pipeline:
        # The first task and the ramp of the second only fill the memory.
        for task, batches in ((0, first), (1, second[:_RAMP])):
            for _ in pipeline.run(Batch({}, content) for content in incoming(stream, task, batches, train=False)):
                pass
        warm_up = _WARM_UP[learner.device.type]
        steps = pipeline.run(Batch({}, content) for content in incoming(stream, 1, second[_RAMP:]))
        for number, _ in enumerate(steps):
            if number >= warm_up:
                times.append(time.perf_counter())
                if times[-1] - times[0] > seconds and len(times) > 8:
                    break
        pipeline.stop()
        for _ in pipeline.drain(wait=True):
            pass
    if pipeline.captured is not None and pipeline.captured.traceback:
        raise RuntimeError(f"{pipeline.captured.obstacle}\n{pipeline.captured.traceback}")
    rows = config.stream.batch + config.options.new_extra + config.options.buffer_batch
    # Losses arrive in bursts, so times are measured over several steps.
    stride = max(1, min(10, len(times) // 8))
    return rows * learner.views.views_per_row, [(b - a) / stride for a, b in pairwise(times[::stride])]


def _evaluation(config: RunConfig, stream: Stream) -> tuple[int, list[float]]:
    """The images of one evaluation with a full memory, and its seconds, the best of three."""
    learner = _learner(dataclasses.replace(config, kernels="auto", feed="fused", step="auto"), stream)
    count = min(config.memory, len(stream.x_train)) + len(stream.x_test)
    with own_stream(learner.device):
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed):
                learner.observe(stream.x_train[rows], stream.y_train[rows], task, index=rows, train=False)
        there = resident(stream, learner.device)
        rows = stream.batches(0, seed=config.seed)[0]

        def evaluate() -> None:
            # Class means are cached until the next batch.
            learner.observe(stream.x_train[rows], stream.y_train[rows], 0, index=rows, train=False, store=False)
            evaluate_learner(learner, there, 1)

        return count, [min(back_to_back(learner.device, evaluate, calls=3))]


def _learner(config: RunConfig, stream: Stream) -> Mose:
    return create_learner(config, **stream.spec)


def _where(device: torch.device) -> str:
    build = mose_fast.build_info()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, mose-fast {build['version']}"
    return f"{device_name(device)}, {versions} at {(build['commit'] or 'unknown')[:12]}"
