"""What training costs on this machine: the step by itself, the step in the loop, evaluations, a whole run; beside plain PyTorch.

Images are random: nothing here depends on what they show. Each variant is measured with a fresh learner in one process.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mose_fast
from mose_fast import _loader
from mose_fast.augment import choose_feed
from mose_fast.config import ConfigError, RunConfig
from mose_fast.device import device_name, own_stream
from mose_fast.evaluate import evaluate_learner
from mose_fast.methods import Mose, create_learner, resolve_device
from mose_fast.streams import NORMALISATIONS, Stream
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.listeners import Listener
from mose_fast.train.loop import Interrupted, run

__all__ = ["Ceilings", "Report", "Row", "Variant", "benchmark", "ceilings", "random_stream", "variants"]

_COLUMNS = ("variant", "views", "ms", "p20_ms", "p80_ms", "images_per_s", "tflops", "share_of_ceiling", "peak_bytes", "note", "where")

#: Steps of a task that bring its batches to their full size, and a margin.
_RAMP = 12


class Ceilings(NamedTuple):
    """What the machine can do at most, measured: ``tflops`` of a large matrix product in the run's precision, ``gbytes`` (1e9 bytes) a
    second that a copy moves, read and written."""

    tflops: float
    gbytes: float


class Variant(NamedTuple):
    """One way to train.

    Attributes:
        name: Of its row.
        settings: Of :class:`RunConfig` by name.
        compiled: The network is compiled by ``torch.compile``.
        looped: It is measured in the loop; else the step is by itself, on inputs that lie ready.
    """

    name: str
    settings: dict[str, str]
    compiled: bool = False
    looped: bool = False


class Row(NamedTuple):
    """A measurement: milliseconds (median, and the quantiles 0.2 and 0.8) of a step with so many views.

    ``peak`` are bytes that the card had allocated at most, None on the CPU; ``note`` says why there is no time, where there is none.
    """

    name: str
    views: int
    milliseconds: float | None
    p20: float | None
    p80: float | None
    peak: int | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What :func:`benchmark` found.

    Attributes:
        where: Card or processor, versions.
        config: Of the network and the steps.
        macs: Multiply-accumulates of a forward pass of one image.
        ceilings: Of the machine.
        rows: One a variant.
        evaluation: Seconds of an evaluation of all classifiers and experts, on as many images as ``evaluated``; None where not measured.
        evaluated: Images: those in memory and 10,000 of a test set (fewer where the run is smaller).
    """

    where: str
    config: RunConfig
    macs: int
    ceilings: Ceilings
    rows: tuple[Row, ...]
    evaluation: float | None
    evaluated: int

    def tflops(self, row: Row) -> float:
        """Of a row: forward and backward pass of its views, three times the forward's multiply-accumulates, over its time."""
        return 0.0 if row.milliseconds is None else 6e-12 * self.macs * row.views / (row.milliseconds / 1e3)

    def text(self) -> str:
        """A table for people."""
        unit = "TFLOP/s"
        lines = [
            self.where,
            f"MOSE, width {self.config.width}, memory {self.config.memory}, precision {self.config.precision}",
            f"ceilings measured here: matrix product {self.ceilings.tflops:,.3g} {unit}, copy {self.ceilings.gbytes:,.0f} GB/s",
            "",
            f"{'step of training':<44} {'views':>5} {'ms':>9} {'p20':>9} {'p80':>9} {'images/s':>9} {unit:>8} {'share':>6} {'peak MB':>8}",
        ]
        for row in self.rows:
            if row.milliseconds is None:
                lines.append(f"{row.name:<44} {row.note}")
                continue
            rate = self.tflops(row)
            peak = "-" if row.peak is None else f"{row.peak / 1e6:,.0f}"
            lines.append(
                f"{row.name:<44} {row.views:>5} {row.milliseconds:>9.2f} {row.p20:>9.2f} {row.p80:>9.2f} "
                f"{row.views / row.milliseconds * 1e3:>9,.0f} {rate:>8.3g} {rate / self.ceilings.tflops:>6.1%} {peak:>8}"
            )
        if self.evaluation is not None:
            lines += ["", f"evaluation of {self.evaluated:,} images by every classifier and expert: {self.evaluation:.3f} s"]
            looped = [row for row in self.rows if row.name.startswith("loop") and row.milliseconds]
            if looped:
                best = min(looped, key=lambda row: row.milliseconds)
                seconds = 5 * best.milliseconds + 11 * self.evaluation
                lines.append(
                    f"a run of 5,000 such steps and 11 evaluations of that size: {seconds:.0f} s ({best.name}; reckoned, not measured: "
                    "mose-fast run measures one)"
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
            numbers = [f"{row.milliseconds:.4f}", f"{row.p20:.4f}", f"{row.p80:.4f}", f"{row.views / row.milliseconds * 1e3:.1f}"]
            numbers += [f"{rate:.3f}", f"{rate / self.ceilings.tflops:.4f}", "" if row.peak is None else row.peak]
            writer.writerow([row.name, row.views, *numbers, row.note, self.where])
        return file.getvalue()


def variants(device: torch.device) -> list[Variant]:
    """All that can be measured on a device: plain PyTorch as the baseline, then our kernels, then both in the loop by feed."""
    on_card = device.type == "cuda"
    plain, fused = {"kernels": "torch", "feed": "torch"}, {"kernels": "fused", "feed": "fused"}
    found = [
        Variant("plain PyTorch, eager", {**plain, "step": "eager"}),
        Variant("plain PyTorch, torch.compile, eager", {**plain, "step": "eager"}, compiled=True),
    ]
    if on_card:
        # Views of the fused feed: PyTorch's own cannot be part of a graph.
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
    """A stream of random 32x32 images in two tasks, the first just large enough to replay from.

    Args:
        config: Its ``stream.batch`` is the stream's.
        classes: Of both tasks, half each.
        images: Training images of the second task.
        tests: Test images of both.
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
    """Measures them: a square product of 8,192 (CPU: 1,024), a copy of 1 GiB (CPU: 64 MiB); the best of five."""
    on_card = device.type == "cuda"
    size = 8192 if on_card else 1024
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16 if precision == "bf16" else torch.float32) for _ in range(2))
    source = torch.empty(2**30 if on_card else 2**26, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def best(call: Callable[[], object]) -> float:
        call()
        return min(_seconds(device, call) for _ in range(5))

    return Ceilings(2e-12 * size**3 / best(lambda: a @ b), 2e-9 * source.numel() / best(lambda: target.copy_(source)))


def benchmark(
    config: RunConfig, *, classes: int = 100, seconds: float = 2.0, only: str = "", watch: Callable[[str], None] | None = None
) -> Report:
    """Measures all variants on the configuration's device.

    Args:
        config: Of MOSE; device, precision, width, memory, batch and options count.
        classes: Of the network.
        seconds: Spent on each variant, once it is warm.
        only: Variants whose names hold this text.
        watch: Told the name of what is measured next.

    Raises:
        ConfigError: The method is another one, or the device is not there.
    """
    if config.method != "mose":
        raise ConfigError(f"method is {config.method!r}; wanted mose, whose step is measured")
    stream = random_stream(config, classes, 1000 * config.stream.batch, tests=max(10_000 * config.width // 64, 100))
    probe = _learner(config, stream)
    config = dataclasses.replace(config, precision=probe.precision.name)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run would say it; rows have notes
        for variant in variants(probe.device):
            if only not in variant.name:
                continue
            if watch is not None:
                watch(variant.name)
            found.append(_row(variant, config, stream, seconds))
            torch.compiler.reset()
            if probe.device.type == "cuda":
                torch.cuda.empty_cache()
        measured, images = None, 0
        if not only or only in "evaluation":
            if watch is not None:
                watch("evaluation")
            measured, images = _evaluation(config, stream)
    return Report(
        _where(probe.device), config, probe.costs()[0].macs, ceilings(probe.device, config.precision), tuple(found), measured, images
    )


def _row(variant: Variant, config: RunConfig, stream: Stream, seconds: float) -> Row:
    def without(note: str) -> Row:
        return Row(variant.name, 0, None, None, None, None, note)

    chosen = dataclasses.replace(config, **variant.settings)
    device = resolve_device(chosen.device)
    try:
        if chosen.kernels == "fused" and not _loader.serves(torch.empty(0, device=device)):
            return without(f"no native library: {_loader.obstacle or 'built for the CPU only'}")
        choose_feed(chosen.feed, device, None)
        with _peak(device) as peak:
            views, times = (_in_the_loop if variant.looped else _by_itself)(variant, chosen, stream, seconds)
    except (ConfigError, RuntimeError) as error:
        # Out of memory, no compiler: the other variants can still be measured.
        return without(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    low, middle, high = (statistics.median(times),) * 3 if len(times) < 5 else _quantiles(times)
    return Row(variant.name, views, 1e3 * middle, 1e3 * low, 1e3 * high, peak[0])


def _by_itself(variant: Variant, config: RunConfig, stream: Stream, seconds: float) -> tuple[int, list[float]]:
    """Views and seconds of full steps of a later task, on inputs that lie ready."""
    learner = _learner(config, stream)
    with own_stream(learner.device):
        steps = CapturedSteps(learner, capture=config.step == "captured")
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed)[: _RAMP if task else None]:
                # Only the data plane runs: the model is not needed to fill the memory.
                prepared = learner.prepare(stream.x_train[rows], stream.y_train[rows], task, index=rows)
        prepared = dataclasses.replace(prepared, inputs=steps.inputs(prepared.plan))
        if variant.compiled:
            learner.network.compile(dynamic=False)

        def step() -> None:
            steps(prepared)

        for _ in range(4):
            step()
        if config.step == "captured" and not steps.graphs:
            raise RuntimeError(steps.obstacle)
        return len(prepared.inputs.labels), _timed(learner.device, step, seconds)


def _in_the_loop(variant: Variant, config: RunConfig, stream: Stream, seconds: float) -> tuple[int, list[float]]:
    """Views and seconds of full steps as a run takes them: planning, feed, step, reading of losses."""
    watch = _Watch(20 + _RAMP, seconds)
    with suppress(Interrupted):
        run(config, stream=stream, listeners=[watch])
    o = config.options
    rows = config.stream.batch + o.new_extra + o.buffer_batch
    # Losses arrive in bursts: differences over several steps are even.
    stride = max(1, min(10, len(watch.times) // 8))
    marks = watch.times[::stride]
    return rows * _learner(config, stream).views.views_per_row, [(b - a) / stride for a, b in pairwise(marks)]


class _Watch(Listener):
    """Notes when each step's losses arrive, from a batch on; ends the run when there is enough."""

    def __init__(self, first: int, seconds: float) -> None:
        self.first, self.seconds = first, seconds
        self.times: list[float] = []

    def on_batch(self, done: int, losses: dict[str, float] | None) -> None:
        if done < self.first:
            return
        self.times.append(time.perf_counter())
        if self.times[-1] - self.times[0] > self.seconds and len(self.times) > 8:
            raise Interrupted


def _evaluation(config: RunConfig, stream: Stream) -> tuple[float, int]:
    """Seconds of one evaluation with a full memory, the best of three, and its images."""
    chosen = dataclasses.replace(config, kernels="auto", feed="fused", step="auto")
    learner = _learner(chosen, stream)
    count = min(config.memory, len(stream.x_train))
    with own_stream(learner.device):
        for task in range(2):
            for rows in stream.batches(task, seed=config.seed):
                learner.observe(stream.x_train[rows], stream.y_train[rows], task, index=rows, train=False)
        resident = stream.to(learner.device)
        rows = stream.batches(0, seed=config.seed)[0]

        def evaluate() -> None:
            # The class means are kept until the next batch.
            learner.observe(stream.x_train[rows], stream.y_train[rows], 0, index=rows, train=False, store=False)
            evaluate_learner(learner, resident, 1)

        evaluate()
        return min(_seconds(learner.device, evaluate) for _ in range(3)), count + len(stream.x_test)


def _learner(config: RunConfig, stream: Stream) -> Mose:
    n = stream.normalisation
    return create_learner(config, classes=stream.classes, image_size=stream.image_size, mean=n.mean, std=n.std)


def _where(device: torch.device) -> str:
    build = mose_fast.build_info()
    commit = (build["commit"] or "unknown")[:12]
    return f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, mose-fast {build['version']} at {commit}"


def _timed(device: torch.device, call: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        times.append(_seconds(device, call))
    return times


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Of one call: by events on a card."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _quantiles(times: list[float]) -> tuple[float, float, float]:
    fifths = statistics.quantiles(times, n=10, method="inclusive")
    return fifths[1], statistics.median(times), fifths[7]


@contextmanager
def _peak(device: torch.device) -> Iterator[list[Any]]:
    """A list that holds the most bytes allocated on the card, or None, at the end."""
    found: list[Any] = [None]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found[0] = torch.cuda.max_memory_allocated(device)
