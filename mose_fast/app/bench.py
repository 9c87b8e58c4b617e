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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import mose_fast
from mose_fast import _loader
from mose_fast.augment import choose_feed
from mose_fast.device import device_name, own_stream
from mose_fast.evaluate import evaluate_learner
from mose_fast.methods import Mose, create_learner, resolve_device
from mose_fast.runs.clock import laps
from mose_fast.settings.run import ConfigError, RunConfig
from mose_fast.streams import NORMALISATIONS, Stream
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.pipeline import Batch, Pipeline, incoming, resident

__all__ = [
    "Ceilings",
    "Report",
    "Row",
    "Variant",
    "back_to_back",
    "benchmark",
    "ceilings",
    "copy_rate",
    "in_the_loop",
    "quantiles",
    "random_stream",
    "variants",
]

_COLUMNS = (
    "variant",
    "views",
    "ms",
    "p20_ms",
    "p80_ms",
    "images_per_s",
    "tflops",
    "share_of_ceiling",
    "peak_bytes",
    "note",
    "where",
)

#: Steps of a task until its batches have their full size, with a margin.
_RAMP = 12

#: Steps in the loop before the measured ones. On a GPU, these are captured and fill ring and
#: reader; the CPU needs none.
_WARM_UP = {"cuda": 20, "cpu": 3}

#: Name of the measurement that is not a variant of the step.
_EVALUATION = "evaluation"

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
    """A measurement: milliseconds of a step (median, and the quantiles 0.2 and 0.8) with ``views``
    views.

    ``peak`` is the largest number of bytes allocated on the GPU, None on the CPU. If there is no
    time, ``note`` says why, and ``traceback`` where the program failed.
    """

    name: str
    views: int
    milliseconds: float | None
    p20: float | None
    p80: float | None
    peak: int | None
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
        evaluation: Seconds of an evaluation of all classifiers and experts on ``evaluated`` images,
            or why it failed; None if not measured.
        evaluated: Number of images: those in memory and 10,000 of a test set (fewer for a smaller
            run).
        failures: Tracebacks of the measurements that failed, by name.
    """

    where: str
    config: RunConfig
    macs: int
    ceilings: Ceilings
    rows: tuple[Row, ...]
    evaluation: float | str | None
    evaluated: int
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def tflops(self, row: Row) -> float:
        """TFLOP/s of a row: forward and backward passes (three forwards) of its views."""
        return 0.0 if row.milliseconds is None else 6e-12 * self.macs * row.views / (row.milliseconds / 1e3)

    def text(self) -> str:
        """A table for people."""
        unit = "TFLOP/s"
        lines = [
            self.where,
            f"MOSE, width {self.config.width}, memory {self.config.memory}, precision {self.config.precision}",
            (
                f"ceilings measured here: matrix product {self.ceilings.tflops:,.3g} {unit}, copy"
                f" {self.ceilings.gbytes:,.0f} GB/s"
            ),
            "",
            (
                f"{'step of training':<44} {'views':>5} {'ms':>9} {'p20':>9} {'p80':>9} {'images/s':>9} {unit:>8}"
                f" {'share':>6} {'peak MB':>8}"
            ),
        ]
        for row in self.rows:
            if row.milliseconds is None:
                lines.append(f"{row.name:<44} {row.note}")
                continue
            rate = self.tflops(row)
            peak = "-" if row.peak is None else f"{row.peak / 1e6:,.0f}"
            lines.append(
                f"{row.name:<44} {row.views:>5} {row.milliseconds:>9.2f} {row.p20:>9.2f} {row.p80:>9.2f}"
                f" {row.views / row.milliseconds * 1e3:>9,.0f} {rate:>8.3g} {rate / self.ceilings.tflops:>6.1%}"
                f" {peak:>8}"
            )
        if isinstance(self.evaluation, str):
            lines += ["", f"evaluation {self.evaluation}"]
        elif self.evaluation is not None:
            lines += [
                "",
                f"evaluation of {self.evaluated:,} images by every classifier and expert: {self.evaluation:.3f} s",
            ]
            looped = [row for row in self.rows if row.name.startswith("loop") and row.milliseconds]
            if looped:
                best = min(looped, key=lambda row: row.milliseconds)
                seconds = 5 * best.milliseconds + 11 * self.evaluation
                lines.append(
                    f"a run of 5,000 such steps and 11 evaluations of that size: {seconds:.0f} s ({best.name};"
                    " reckoned, not measured: mose-fast run measures one)"
                )
        return "\n".join(lines)

    def table(self) -> str:
        """The rows as CSV text."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in self.rows:
            if row.milliseconds is None:
                writer.writerow([row.name, row.views, *[""] * 7, row.note, self.where])
                continue
            rate = self.tflops(row)
            numbers = [
                f"{row.milliseconds:.4f}",
                f"{row.p20:.4f}",
                f"{row.p80:.4f}",
                f"{row.views / row.milliseconds * 1e3:.1f}",
            ]
            numbers += [f"{rate:.3f}", f"{rate / self.ceilings.tflops:.4f}", "" if row.peak is None else row.peak]
            writer.writerow([row.name, row.views, *numbers, row.note, self.where])
        return file.getvalue()


def variants(device: torch.device) -> list[Variant]:
    """All variants of a device: plain PyTorch, our kernels, then both in the loop by feed."""
    on_card = device.type == "cuda"
    plain, fused = {"kernels": "torch", "feed": "torch"}, {"kernels": "fused", "feed": "fused"}
    found = [
        Variant("plain PyTorch, eager", {**plain, "step": "eager"}),
        Variant("plain PyTorch, torch.compile, eager", {**plain, "step": "eager"}, compiled=True),
    ]
    if on_card:
        # The views come from the fused feed, because PyTorch's cannot be part of a graph.
        graph = {"kernels": "torch", "feed": "fused", "step": "captured"}
        found += [
            Variant("plain PyTorch, graph", graph),
            Variant("plain PyTorch, torch.compile, graph", graph, compiled=True),
        ]
    found.append(Variant("fused kernels, eager", {**fused, "step": "eager"}))
    if on_card:
        found.append(Variant("fused kernels, graph", {**fused, "step": "captured"}))
    how = "captured" if on_card else "eager"
    found.append(Variant("loop: plain PyTorch, feed torch", {**plain, "step": "eager"}, looped=True))
    found += [
        Variant(f"loop: fused kernels, feed {feed}", {"kernels": "fused", "feed": feed, "step": how}, looped=True)
        for feed in ("torch", "dali", "fused")
    ]
    return found


def random_stream(config: RunConfig, classes: int, images: int, tests: int = 0) -> Stream:
    """A stream of random 32x32 images in two tasks with half of the classes each, the first just
    large enough to replay from; ``images`` are those of the second, ``tests`` of both.
    """
    random = torch.Generator().manual_seed(0)
    half = classes // 2
    batch = config.stream.batch
    first = torch.arange(20 * batch) % half
    second = half + torch.arange(images) % (classes - half)

    def draw(count: int) -> Tensor:
        return torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=random)

    labels = torch.cat([first, second])
    order = tuple(range(classes))
    return Stream(
        name="random",
        x_train=draw(len(labels)),
        y_train=labels,
        x_test=draw(tests),
        y_test=torch.arange(tests) % classes,
        tasks=(order[:half], order[half:]),
        class_order=order,
        class_names=tuple(map(str, order)),
        normalisation=NORMALISATIONS["half"],
        mirror_safe=True,
        batch=batch,
    )


def ceilings(device: torch.device, precision: str) -> Ceilings:
    """The best of five square products of 8,192 (CPU: 1,024), and of :func:`copy_rate`."""
    on_card = device.type == "cuda"
    size = 8192 if on_card else 1024
    a, b = (
        torch.randn(size, size, device=device).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        for _ in range(2)
    )
    product = min(back_to_back(device, lambda: a @ b, calls=5))
    return Ceilings(2e-12 * size**3 / product, 1e-9 * copy_rate(device))


def benchmark(
    config: RunConfig,
    *,
    classes: int = 100,
    seconds: float = 2.0,
    only: str = "",
    watch: Callable[[str], None] | None = None,
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
    names = [*(variant.name for variant in variants(device)), _EVALUATION]
    if not any(only in name for name in names):
        raise ConfigError(f"only is {only!r}, which no measurement's name holds; here there are: {'; '.join(names)}")
    # Measured before the variants, since one of them may break the GPU.
    where, macs, possible = _where(device), probe.costs()[0].macs, ceilings(device, config.precision)
    found: list[Row] = []
    failures: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run would say it; rows have notes
        for variant in variants(device):
            if only not in variant.name:
                continue
            if watch is not None:
                watch(variant.name)
            found.append(_row(variant, config, stream, seconds))
            if found[-1].traceback:
                failures[variant.name] = found[-1].traceback
            _tidy(device)
        measured, images = None, 0
        if only in _EVALUATION:
            if watch is not None:
                watch(_EVALUATION)
            try:
                measured, images = _evaluation(config, stream)
            except Exception as error:
                measured, failures[_EVALUATION] = _reason(error), traceback.format_exc()
    return Report(where, config, macs, possible, tuple(found), measured, images, failures)


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


def _tidy(device: torch.device) -> None:
    """Frees what a variant has allocated, so that all variants start alike."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        # After an error that the GPU does not recover from, every call fails, and the rows of the
        # next variants say so.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _row(variant: Variant, config: RunConfig, stream: Stream, seconds: float) -> Row:
    def without(note: str, trace: str = "") -> Row:
        return Row(variant.name, 0, None, None, None, None, note, trace)

    chosen = dataclasses.replace(config, **variant.settings)
    device = resolve_device(chosen.device)
    try:
        if chosen.kernels == "fused" and not _loader.has_code(device.type):
            return without(f"no native library: {_loader.obstacle or 'built for the CPU only'}")
        choose_feed(chosen.feed, device, None)
        with _peak(device) as peak:
            if variant.looped:
                views, times = in_the_loop(chosen, stream, seconds)
            else:
                views, times = _by_itself(variant, chosen, stream, seconds)
    except ConfigError as error:
        return without(f"{type(error).__name__}: {error}")
    except Exception as error:
        # After a lack of memory, a missing compiler or a failing kernel, the other variants can
        # still be measured.
        return without(_reason(error), traceback.format_exc())
    low, middle, high = quantiles(times)
    return Row(variant.name, views, 1e3 * middle, 1e3 * low, 1e3 * high, peak[0])


def _reason(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # torch.compile wraps the one that tells
    line = (str(error).strip() or repr(error)).splitlines()[0]
    return f"failed: {type(error).__name__}: {line}"


def _by_itself(variant: Variant, config: RunConfig, stream: Stream, seconds: float) -> tuple[int, list[float]]:
    """Views and seconds of full steps of a later task, on prepared inputs."""
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
    o = config.options
    rows = config.stream.batch + o.new_extra + o.buffer_batch
    # Losses arrive in bursts, so times are measured over several steps.
    stride = max(1, min(10, len(times) // 8))
    return rows * learner.views.views_per_row, [(b - a) / stride for a, b in pairwise(times[::stride])]


def _evaluation(config: RunConfig, stream: Stream) -> tuple[float, int]:
    """Seconds of one evaluation with a full memory, the best of three, and its images."""
    chosen = dataclasses.replace(config, kernels="auto", feed="fused", step="auto")
    learner = _learner(chosen, stream)
    count = min(config.memory, len(stream.x_train))
    with own_stream(learner.device):
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed):
                learner.observe(stream.x_train[rows], stream.y_train[rows], task, index=rows, train=False)
        on_card = resident(stream, learner.device)
        rows = stream.batches(0, seed=config.seed)[0]

        def evaluate() -> None:
            # Class means are cached until the next batch.
            learner.observe(stream.x_train[rows], stream.y_train[rows], 0, index=rows, train=False, store=False)
            evaluate_learner(learner, on_card, 1)

        return min(back_to_back(learner.device, evaluate, calls=3)), count + len(stream.x_test)


def _learner(config: RunConfig, stream: Stream) -> Mose:
    return create_learner(config, **stream.spec)


def _where(device: torch.device) -> str:
    build = mose_fast.build_info()
    commit = (build["commit"] or "unknown")[:12]
    return (
        f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, mose-fast {build['version']} at"
        f" {commit}"
    )


@contextmanager
def _peak(device: torch.device) -> Iterator[list[Any]]:
    """Yields a list that at the end contains the peak of bytes allocated on the GPU, or None."""
    found: list[Any] = [None]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found[0] = torch.cuda.max_memory_allocated(device)
