"""Shared by all benchmarks: the case, its implementations, the timing on CPU and GPU.

A benchmark file ``bench_<stem>.py`` (see bench_null.py, and docs/benchmarks.md) holds
``make_call(case)``, which builds the inputs of a :class:`Case` and returns a function without
arguments that does the work once, and ``bench_<stem>(measure, impl, device, ...)``, which hands
both to the fixture ``measure``. The fixtures are in bench/conftest.py; sizes are the file's own
``pytest.mark.parametrize``. A file may name fewer ``IMPLEMENTATIONS`` than those here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.app.bench import quantiles
from mose_fast.runs.clock import laps
from mose_fast.train.captured import capture

#: Rows of a step: the least and the most in the first task, the most later, and a large batch
#: (docs/specification/mose.md section 5).
SIZES = (40, 296, 384, 1024)
#: The rows of a full step.
HEADLINE = 384
#: Classes of the two data sets, Split CIFAR-100 and Split Tiny-ImageNet.
CLASSES = (100, 200)
#: The slowest to start comes last: if time runs out, the others have been measured.
IMPLEMENTATIONS = ("reference", "native", "compiled")
DIRECTIONS = ("forward", "forward+backward")
#: Settings of a run that takes seconds on the CPU, to show that a program works.
SMALL_RUN: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "memory": 60,
    "width": 2,
    "options": {"buffer_batch": 8, "new_extra": 2},
}

# More bytes than any GPU's cache holds.
_BEYOND_CACHES = 200 * 10**6
# Bytes a microsecond, three quarters of what a copy reached on an H200; and microseconds a launch.
_BANDWIDTH, _LAUNCH = 0.75 * 4.17e6, 3.0


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        impl: ``reference`` (pure PyTorch, eager), ``compiled`` (the same with torch.compile) or
            ``native``.
        dtype: Of the floating-point inputs, or of the output if there are none.
        direction: ``forward`` or ``forward+backward``.
        shape: Sizes by the letter that the op's docstring uses.
        target_us: The target for the native code on a Hopper GPU, in microseconds.
        captured: Whether calls on a GPU run inside a captured graph; False for code that waits for
            the host and cannot be captured.
        bytes_needed: The least that the op can move through the GPU's memory: each input read once,
            each output written once.
        bytes_moved: What the launches of the native code move. If given, calls alternate between
            several sets of inputs, so that no input is in the GPU's cache when it is read. None:
            caches are warm, as they are for what a step has just written.
    """

    op: str
    impl: str
    device: str
    dtype: torch.dtype
    direction: str = "forward"
    shape: Mapping[str, int] = field(default_factory=dict)
    target_us: float | None = None
    captured: bool = True
    bytes_needed: int | None = None
    bytes_moved: int | None = None

    @property
    def sets(self) -> int:
        """The number of sets of inputs that calls on a GPU alternate between."""
        return 1 if self.bytes_moved is None else max(1, min(20, -(-_BEYOND_CACHES // max(self.bytes_moved, 1))))

    @property
    def backward(self) -> bool:
        return self.direction != "forward"

    @property
    def shape_text(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.shape.items())

    @property
    def dtype_text(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def headline(self) -> bool:
        """Whether this is the most important size: a full step on Split CIFAR-100."""
        return self.shape.get("N") == HEADLINE and self.shape.get("K", CLASSES[0]) == CLASSES[0]

    @property
    def group(self) -> str:
        """The name of what is compared: all implementations of one op at one shape."""
        return f"{self.op} {self.direction} {self.shape_text} {self.dtype_text} {self.device}"


def no_native_code(device: str) -> str:
    """Why there is no native code for a device; empty where there is."""
    if _loader.has_code(device):
        return ""
    return f"no native code for {device}: {_loader.obstacle or 'the library was built for the CPU only'}"


def choose(case: Case, reference: Callable, native: Callable) -> Callable:
    """The function that ``case.impl`` names; ``native`` is the public one of ``mose_fast.ops``.
    Raises RuntimeError if the library has no code for the device: it would run the reference
    without saying so.
    """
    if case.impl == "native":
        if obstacle := no_native_code(case.device):
            raise RuntimeError(obstacle)
        return native
    return torch.compile(reference, dynamic=False) if case.impl == "compiled" else reference


def new_map(case: Case, images: int, channels: int, side: int) -> Tensor:
    """Random maps [images, channels, side, side] of a case's dtype, channels last."""
    x = torch.randn(images, channels, side, side, device=case.device, dtype=case.dtype)
    return x.contiguous(memory_format=torch.channels_last)


def target_us(launches: int, moved: float) -> float:
    """Microseconds for the bytes that an op needs to move, and its launches, on an H200."""
    return round(launches * _LAUNCH + moved / _BANDWIDTH, 1)


def skip_on_cpu(device: str, dtype: torch.dtype, impl: str | None = None) -> None:
    """CPU rows are float32, not native where the op is PyTorch's operations (``impl``)."""
    if device == "cpu" and (dtype != torch.float32 or impl == "native"):
        pytest.skip("CPU rows are float32" + (", of PyTorch's operations" if impl else ""))


def gpu_is_missing(device: str) -> bool:
    """Whether a program that was asked for ``device`` finds no GPU; says so then."""
    if device != "cuda" or torch.cuda.is_available():
        return False
    print("there is no CUDA GPU; wanted one, or --device cpu", file=sys.stderr)
    return True


def random_images(images: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random images of 20 classes with their labels, so many for training and 100 for tests."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (images + 100, 32, 32, 3), dtype=np.uint8), np.arange(images + 100) % 20
    return x[:images], y[:images], x[images:], y[images:]


def with_gradients(function: Callable[[], Tensor], inputs: Iterable[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A call that runs ``function`` and computes its sum's gradients."""
    inputs = tuple(inputs)
    return lambda: torch.autograd.grad(function().sum(), inputs)


def in_microseconds(seconds: Sequence[float]) -> dict[str, float]:
    """The quantiles of several timings in microseconds, by column of the results."""
    p20, median, p80 = (round(1e6 * value, 3) for value in quantiles(seconds))
    return {"median_us": median, "p20_us": p20, "p80_us": p80}


def repetitions(call: Callable[[], object], budget: float = 0.5) -> tuple[int, int]:
    """How often to time ``call``: (rounds, calls in a round). Warms up before.

    A round takes at least 0.2 ms, all rounds together ``budget`` seconds.
    """
    *_, once = laps(torch.device("cpu"), call, 3)  # the first two: compilers, caches, thread pools
    once = max(once, 1e-7)
    iterations = max(1, math.ceil(2e-4 / once))
    return max(5, min(100, int(budget / (once * iterations)))), iterations


def time_on_gpu(calls: Sequence[Callable[[], object]], captured: bool) -> tuple[list[float], int, int]:
    """Times ``calls``, which do the same on different inputs and alternate, by CUDA events: inside
    a captured graph as in a captured training step, or eagerly. A round is about 20 calls, so that
    the gap between two graph launches does not count.

    Returns seconds per call, one value for each round; device launches of one call (kernels,
    copies, fills); peak memory in bytes that one call adds, outputs and gradients included.
    """
    side = torch.cuda.Stream()  # warm-up and capture on one stream: autograd remembers the stream that it first ran on
    side.wait_stream(torch.cuda.current_stream())
    call = calls[0]
    with torch.cuda.stream(side):
        for each in calls:
            for _ in range(3):
                each()
        side.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (once,) = laps(side.device, call, 1)
        peak = torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile() as profile:
            call()
            side.synchronize()
        launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

        turns = max(1, min(20, int(0.02 / once)) // len(calls))
        count = turns * len(calls)
        rounds = max(5, min(30, int(0.2 / (once * count))))

        def run() -> None:
            for _ in range(turns):
                for each in calls:
                    each()

        if captured:
            with capture(side) as graph:
                run()
            run = graph.replay
        for _ in range(3):
            run()
        seconds = laps(side.device, run, rounds)
        side.synchronize()
    return [each / count for each in seconds], launches, peak
