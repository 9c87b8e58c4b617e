"""Predicts how long the kernels of a step take on a Hopper card, from their machine code and from a
record of what the step launches (:mod:`build_tools.record_step`).

A launch takes the longest of four times, and the launch itself:

* its bytes, at 80 % of the rate of a device copy;
* its instructions, at 75 % of what the card's schedulers can issue;
* its products on the tensor cores, at half of the rate of a large product;
* the chain of what one thread has to wait for: its passes through loops that load from global
  memory, and the partial sums that it merges, whose loads come one after the other unless they
  stand in a row.

Instructions are those of the loops that matter, times their passes. Loops are of three kinds:
those that load 16 bytes at a time (*streams*, whose passes follow from the bytes), those that
compute from shared memory (*computes*), and those with tensor instructions (*products*). Where the
record says how often each loop is passed, all loops are counted, and what stands outside of them
once a warp. What a step's convolutions take was measured, in all; each gets its share by its
multiplications. Everything else is arithmetic, to be compared with a card.

A kernel that may begin early (cuda/launch.cuh) has its blocks on the card when the one before it
ends, if that one lets it, and starts after a quarter of a launch's pause. After a kernel that is
not launched so, such as cuDNN's, which does not let it begin, half of the pause is left. Both are
assumptions, too.

A step's time follows from its launches, their streams and the waits between these
(:func:`elapsed`). The assumption is that a kernel fills the card while it runs: what runs on
different streams takes as long as one after the other, but while one stream pauses between two
kernels, another one that has work runs. A kernel that leaves a part of the card idle would in truth
run beside another one (the step is then faster), and kernels of two streams may drive each other's
data out of the cache (then it is slower).
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from build_tools.machine_code import Kernel, Loop, instance_names

__all__ = [
    "CONVOLUTIONS",
    "Launch",
    "Prediction",
    "Row",
    "elapsed",
    "markdown",
    "parse_record",
    "predict",
    "summary",
    "total",
]

COPY = 4.17e12  # bytes a second that a device copy reads and writes, measured on an H200
BYTES_RATE = 0.8 * COPY
CLOCK = 1.8e9
PROCESSORS = 132
ISSUE_RATE = 0.75 * PROCESSORS * 4 * CLOCK  # warp instructions a second
TENSOR_RATE = 0.5 * 764e12  # operations a second: half of a large product's measured rate
TENSOR_OPERATIONS = 2 * 16 * 8 * 16  # of a tensor instruction
LAUNCH = 2e-6  # seconds between two kernels of a graph, with the first blocks' start
EARLY = 0.5e-6  # of it, where the blocks of the second one wait on the card for the end of the first
PROMPT = 1e-6  # of it, where the second one begins when the blocks of the first have ended
MEMORY = 800 / CLOCK  # seconds that a load waits for DRAM
CACHE = 260 / CLOCK  # for the L2 cache
DIVISION = 40 / CLOCK  # a merge's division or root
_CONVOLUTIONS = ("torch convolution", "torch convolution_backward")
CONVOLUTIONS = 3.2e-3  # seconds of cuDNN's kernels in a step, measured on an H200


class Launch(NamedTuple):
    """A launch of the record; ``kernel`` is an instance, or ``torch NAME``; ``early``: it may begin
    before the one before it ends. ``after`` are the positions of launches on other streams that it
    waits for.
    """

    kernel: str
    blocks: int = 1
    threads: int = 1
    shared_bytes: int = 0
    bytes: float = 0.0
    streamed: float = 0.0
    streams: int = 0
    computes: float = 0.0
    products: float = 0.0
    parts: float = 0.0
    early: bool = False
    operations: float = 0.0
    stream: int = 0
    after: tuple[int, ...] = ()
    passes: tuple[float, ...] = ()


def parse_record(text: str) -> list[Launch]:
    """Reads a record; the fields are explained in csrc/emulated/record.h, the lines of streams in
    build_tools/record_step.py.
    """
    lines = [line.split() for line in text.splitlines()]
    names = iter(instance_names([words[0] for words in lines if words[0] not in ("torch", "on", "wait")]))
    launches: list[Launch] = []
    stream, last, waits = 0, {}, defaultdict(set)  # of each stream: its last launch, what its next one waits for
    for words in lines:
        if words[0] == "on":
            stream = int(words[1])
            continue
        if words[0] == "wait":
            waiting, awaited = map(int, words[1:])
            waits[waiting] |= waits[awaited] | ({last[awaited]} if awaited in last else set())
            continue
        if words[0] == "torch":
            launch = Launch(f"torch {words[1]}", bytes=float(words[2]), operations=float(words[3]))
        else:
            passes = tuple(map(float, words.pop()[1:].split(","))) if words[-1].startswith("@") else ()
            x, y, z, threads, shared = map(int, words[1:6])
            numbers = map(float, words[6:])
            launch = Launch(next(names), x * y * z, threads, shared, *numbers)
            launch = launch._replace(streams=int(launch.streams), early=launch.early == 1, passes=passes)
        last[stream] = len(launches)
        launches.append(launch._replace(stream=stream, after=tuple(sorted(waits.pop(stream, ())))))
    return launches


@dataclass
class Row:
    """The launches of one kernel."""

    kernel: str
    launches: int = 0
    bytes: float = 0.0
    instructions: float = 0.0
    seconds: float = 0.0
    bound: dict[str, float] = field(default_factory=dict)

    @property
    def binds(self) -> str:
        """What takes the largest part of the time."""
        return max(self.bound, key=lambda name: self.bound[name])

    @property
    def copy_share(self) -> float:
        return self.bytes / COPY / self.seconds if self.seconds else 0.0


def _kinds(kernel: Kernel) -> tuple[list[Loop], list[Loop], list[Loop]]:
    streams = [loop for loop in kernel.loops if loop.loads_words() and not loop.has("HMMA")]
    products = [loop for loop in kernel.loops if loop.has("HMMA")]
    computes = [
        loop
        for loop in kernel.loops
        if loop not in streams
        and loop not in products
        and loop.operations.count("LDS") >= 8
        and loop.classes["float"] >= 40
        and loop.classes["global"] > 0
    ]
    return streams, computes, products


def _times(launch: Launch, kernel: Kernel, registers: int) -> tuple[float, dict[str, float]]:
    """Warp instructions, and seconds by what could bind."""
    warps = launch.threads / 32
    per_processor = min(2048 // launch.threads, 65536 // (registers * launch.threads), 32)
    per_processor = max(1, min(per_processor, 227 * 1024 // (launch.shared_bytes + 1024)))
    at_once = min(launch.blocks, per_processor * PROCESSORS) * warps
    count = _of_each_loop if launch.passes else _of_kinds
    instructions, chain = count(launch, kernel, at_once)
    # A kernel first waits for its arguments' states.
    chain += MEMORY + launch.parts * _of_a_part(kernel)
    on_tensors = launch.products * sum(loop.operations_of("HMMA") for loop in kernel.loops) * TENSOR_OPERATIONS
    return instructions, {
        "bytes": launch.bytes / BYTES_RATE,
        "issue": instructions / ISSUE_RATE,
        "products": on_tensors / TENSOR_RATE,
        "latency": chain,
    }


def _of_each_loop(launch: Launch, kernel: Kernel, at_once: float) -> tuple[float, float]:
    """Warp instructions and the chain of waits, loop by loop."""
    if len(launch.passes) != len(kernel.loops):
        raise ValueError(
            f"{launch.kernel} has {len(kernel.loops)} loops, but its record has the passes of {len(launch.passes)};"
            " wanted those of each loop, in the order of the code (csrc/emulated/record.h)"
        )
    outside = len(kernel.instructions) - sum(len(loop.instructions) for loop in kernel.loops)
    instructions = launch.blocks * launch.threads / 32 * outside
    chain = 0.0
    for loop, passes in zip(kernel.loops, launch.passes, strict=True):
        instructions += passes * len(loop.instructions)
        chain += passes / at_once * loop.rounds() * (MEMORY if loop.loads_words() else CACHE)
    return instructions, chain


def _of_kinds(launch: Launch, kernel: Kernel, at_once: float) -> tuple[float, float]:
    """The same by kinds of loops."""
    streams, computes, products = _kinds(kernel)
    streams = streams[: launch.streams or None]
    instructions = chain = 0.0
    if moved := sum(loop.bytes_moved() for loop in streams):
        passes = (launch.streamed or launch.bytes) / moved / 32
        instructions += passes * sum(len(loop.instructions) for loop in streams)
        chain += max(1.0, passes / at_once) * max(loop.rounds() for loop in streams) * MEMORY
    for loops, passes in ((computes, launch.computes), (products, launch.products)):
        instructions += passes * sum(len(loop.instructions) for loop in loops)
        chain += passes / at_once * sum(loop.rounds() for loop in loops) * CACHE
    instructions += launch.blocks * launch.threads / 32 * 100  # before and after the loops
    return instructions, chain


def _of_a_part(kernel: Kernel) -> float:
    """Seconds that merging one partial sum takes, in the loop that merges most at a time."""
    merging = [
        loop
        for loop in kernel.loops
        if loop.rounds() and not loop.loads_words() and loop.classes["shared"] == 0 and loop.classes["float"]
    ]
    if not merging:
        return 0.0
    loop = max(merging, key=lambda loop: len(loop.instructions))
    fields = 3 if loop.has("MUFU") else 1
    parts = max(1, sum(op.startswith("LDG") for op in loop.operations) // fields)
    divisions = sum(op.startswith("MUFU") for op in loop.operations)
    return (loop.rounds() * CACHE + divisions * DIVISION) / parts


class Prediction(NamedTuple):
    """``rows``: the launches by kernel, the longest first; ``seconds`` of the whole step."""

    rows: list[Row]
    seconds: float


def predict(launches: Sequence[Launch], kernels: Mapping[str, Kernel], registers: Mapping[str, int]) -> Prediction:
    """Predicts a step.

    Args:
        launches: Of the step.
        kernels: Machine code by instance.
        registers: Of a thread, by instance.

    Raises:
        KeyError: A launched instance has no machine code.
    """
    rows: dict[str, Row] = {}
    work, pauses = [], []
    before: dict[int, Launch] = {}  # the last one of each stream
    convolved = sum(launch.operations for launch in launches if launch.kernel in _CONVOLUTIONS)
    for launch in launches:
        previous = before.get(launch.stream)
        before[launch.stream] = launch
        if launch.kernel in _CONVOLUTIONS:
            work.append(CONVOLUTIONS * launch.operations / convolved)
            pauses.append(0.0)  # measured with them
            continue
        row = rows.setdefault(launch.kernel, Row(launch.kernel))
        instructions = 0.0
        if launch.kernel.startswith("torch "):
            times = {"bytes": launch.bytes / BYTES_RATE, "products": launch.operations / TENSOR_RATE, "latency": MEMORY}
        else:
            instructions, times = _times(launch, kernels[launch.kernel], registers[launch.kernel])
        binds = max(times, key=lambda name: times[name])
        work.append(times[binds])
        pauses.append(_pause(launch, previous))
        row.launches += 1
        row.bytes += launch.bytes
        row.instructions += instructions
        row.seconds += work[-1] + pauses[-1]
        row.bound[binds] = row.bound.get(binds, 0.0) + work[-1]
        row.bound["launch"] = row.bound.get("launch", 0.0) + pauses[-1]
    return Prediction(sorted(rows.values(), key=lambda row: -row.seconds), elapsed(launches, work, pauses))


def _pause(launch: Launch, previous: Launch | None) -> float:
    if not launch.early:
        return LAUNCH
    return EARLY if previous is not None and previous.early else PROMPT


def elapsed(launches: Sequence[Launch], work: Sequence[float], pauses: Sequence[float]) -> float:
    """Seconds from the begin of a step to its end, in which the card runs one kernel at a time.

    A launch is ready a pause after the end of those before it: of the one before it on its stream,
    and of those that it waits for. The card takes what was ready first, and is idle while nothing
    is ready.

    Args:
        launches: With their streams and what they wait for.
        work: Seconds in which each fills the card.
        pauses: Seconds before each.
    """
    queues: dict[int, deque[int]] = {}
    for position, launch in enumerate(launches):
        queues.setdefault(launch.stream, deque()).append(position)
    ends: dict[int, float] = {}
    stream_ends = dict.fromkeys(queues, 0.0)
    now = 0.0
    while any(queues.values()):
        heads = [queue[0] for queue in queues.values() if queue and all(i in ends for i in launches[queue[0]].after)]
        ready = {
            i: max([stream_ends[launches[i].stream], *(ends[j] for j in launches[i].after)]) + pauses[i] for i in heads
        }
        first = min(heads, key=lambda i: (ready[i], i))
        now = max(now, ready[first]) + work[first]
        ends[first] = stream_ends[launches[first].stream] = now
        queues[launches[first].stream].popleft()
    return now


def total(rows: Iterable[Row], names: str = "") -> float:
    """Seconds of the kernels whose names match a pattern."""
    return sum(row.seconds for row in rows if re.search(names, row.kernel))


def summary(whole: Prediction, backbone: Prediction) -> list[tuple[str, float, float | None]]:
    """Name, predicted microseconds and target of a step's parts; ``backbone`` is the same step
    without experts, gates and alignment.
    """
    norms = "batch_norm_|norm_(?!pool)"  # norm_pool takes the alignment modules' last norms
    return [
        ("all that MOSE adds to the backbone", 1e6 * (whole.seconds - backbone.seconds), 1100),
        ("the backbone's norms", 1e6 * total(backbone.rows, norms), 1350),
        ("`expert_losses`", 1e6 * total(whole.rows, "expert_"), 25),
        ("Adam", 1e6 * total(whole.rows, "adam_"), 105),
        ("PyTorch's own kernels, without convolutions", 1e6 * total(whole.rows, "^torch "), None),
        ("the backbone's convolutions by cuDNN (measured on an H200)", 1e6 * CONVOLUTIONS, None),
        ("pauses of one stream filled by another", 1e6 * (total(whole.rows) + CONVOLUTIONS - whole.seconds), None),
        ("whole step", 1e6 * whole.seconds, 6000),
    ]


def markdown(whole: Prediction, backbone: Prediction) -> str:
    """Both tables of docs/performance.md."""
    lines = ["| part | predicted, us | target | measured, us |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {us:,.0f} | {'' if target is None else f'{target:,}'} | |"
        for name, us, target in summary(whole, backbone)
    ]
    lines += [
        "",
        "| kernel | launches | MB | million warp instructions | predicted, us | of the copy rate | bound by "
        "| measured, us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.kernel}` | {row.launches} | {row.bytes / 1e6:,.1f} | {row.instructions / 1e6:,.2f} "
        f"| {1e6 * row.seconds:,.1f} | {100 * row.copy_share:.0f} % | {row.binds} | |"
        for row in whole.rows
    ]
    return "\n".join(lines)
