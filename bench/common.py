"""Shared by all benchmarks: the case, its three implementations, the timing on CPU and card.

A benchmark file ``bench_<stem>.py`` holds two functions (see bench_null.py, and
docs/benchmarks.md):

* ``make_call(case)`` builds the inputs of a :class:`Case` and returns a function without arguments
  that does the work once;
* ``bench_<stem>(measure, impl, device, ...)`` hands both to the fixture ``measure``. The fixtures
  ``impl`` and ``device`` come from bench/conftest.py; sizes are the file's own
  ``pytest.mark.parametrize``. A file may name fewer ``IMPLEMENTATIONS`` than those here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.app.bench import quantiles
from mose_fast.runs.clock import laps
from mose_fast.train.captured import capture

__all__ = [
    "BEYOND_CACHES",
    "CLASSES",
    "DIRECTIONS",
    "HEADLINE",
    "IMPLEMENTATIONS",
    "SIZES",
    "Case",
    "choose",
    "in_microseconds",
    "repetitions",
    "time_on_card",
    "with_gradients",
]

#: Rows of a step: the least and the most in the first task, the most later, and a large batch
#: (docs/specification/mose.md section 5).
SIZES = (40, 296, 384, 1024)
#: The rows of a full step.
HEADLINE = 384
#: Classes of the two data sets, Split CIFAR-100 and Split Tiny-ImageNet.
CLASSES = (100, 200)
#: More bytes than any card's cache holds.
BEYOND_CACHES = 200 * 10**6
#: The slowest to start comes last: if time runs out, the others have been measured.
IMPLEMENTATIONS = ("reference", "native", "compiled")
DIRECTIONS = ("forward", "forward+backward")


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        op: The op's stem.
        impl: ``reference`` (pure PyTorch, eager), ``compiled`` (the same with torch.compile) or
            ``native``.
        device: ``cpu`` or ``cuda``.
        dtype: The type of the floating-point inputs, or of the output if there are none.
        direction: ``forward`` or ``forward+backward``.
        shape: Sizes by the letter that the op's docstring uses.
        target_us: The target for the native code on a Hopper card, in microseconds; None: none.
        captured: Whether calls on a card run inside a captured graph; False for code that waits for
            the host and cannot be captured.
        bytes_needed: The least that the op can move through the card's memory: each input read
            once, each output written once.
        bytes_moved: What the launches of the native code move. If given, calls alternate between
            several sets of inputs, so that no input is in the card's cache when it is read. None:
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
        """The number of sets of inputs that calls on a card alternate between."""
        return 1 if self.bytes_moved is None else max(1, min(20, -(-BEYOND_CACHES // max(self.bytes_moved, 1))))

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


def choose(case: Case, reference: Callable, native: Callable) -> Callable:
    """The function that ``case.impl`` names; ``native`` is the public one of ``mose_fast.ops``.

    Raises:
        RuntimeError: Native code is wanted, and the library has none for the case's device: the
            public function would run the reference without saying so.
    """
    if case.impl == "native":
        if not _loader.has_code(case.device):
            raise RuntimeError(
                f"no native code for {case.device}: {_loader.obstacle or 'the library was built for the CPU only'}"
            )
        return native
    return torch.compile(reference, dynamic=False) if case.impl == "compiled" else reference


def with_gradients(function: Callable[[], Tensor], inputs: Iterable[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a call that runs ``function`` and computes the gradient of the sum of its result with
    respect to ``inputs``.
    """
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


def time_on_card(calls: Sequence[Callable[[], object]], captured: bool) -> tuple[list[float], int, int]:
    """Times ``calls`` by CUDA events, inside a captured graph as in a captured training step, or
    eagerly.

    A round is about 20 calls, so that the gap between two graph launches does not count. The calls
    do the same on different inputs, and alternate. With a single call caches are warm, as they are
    for an op whose inputs the step has just written.

    Returns:
        Seconds per call, one value for each round; device launches of one call (kernels, copies,
        fills); peak memory in bytes that one call adds, outputs and gradients included.
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
