"""Estimates the cost of a run from a few of its steps, in a process of its own like the run's."""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from mose_fast import streams
from mose_fast.device import peak_bytes
from mose_fast.methods import Learner, create_learner, resolve_device
from mose_fast.self_check import settle
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream

# Batches of a skipped task that are stored without training, so that the memory is as full and as
# varied as late in a run.
_STORED = 100


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run takes.

    Attributes:
        seconds: Seconds from start to end.
        bytes: Bytes of host memory that its process does not share with others.
        bytes_device: Peak of bytes allocated on the GPU; None on the CPU.
        source: ``measured``, ``stored`` (taken from the table of runs) or ``estimated`` (from
            another run's).
    """

    seconds: float
    bytes: int
    bytes_device: int | None
    source: str = "measured"


def measure(config: RunConfig, budget: float = 2.0) -> Cost:
    """Times steps early and late in the stream, half of the ``budget`` in seconds each, the end of
    a task late in it and a part of an evaluation, and estimates the whole run from them.

    Steps take longer the more classes have been seen; the growth is assumed to be linear. A run
    shorter than the budget is trained to its end.
    """
    settle(resolve_device(config.device))  # once for a GPU, and no part of a run
    start = time.perf_counter()
    stream = streams.create(config.stream, evaluate_on=config.evaluate_on)
    learner = create_learner(config, **stream.spec)
    if learner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(learner.device)
    setting_up = time.perf_counter() - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will warn
        training = _training(config, stream, learner, budget)
        evaluating = _evaluating(config, stream, learner)
    device = torch.cuda.max_memory_allocated(learner.device) if learner.device.type == "cuda" else None
    # Without file pages, which it shares with its siblings; psutil knows them on Linux only.
    shared = getattr(psutil.Process().memory_info(), "shared", 0)
    return Cost(setting_up + training + evaluating, max(peak_bytes() - shared, 1), device)


def _training(config: RunConfig, stream: Stream, learner: Learner, budget: float) -> float:
    presented = stream.as_one_task() if learner.joint_stream else stream
    batches = [presented.batches(part, seed=config.seed) for part in range(presented.parts)]

    def observe(part: int, rows: Tensor, *, train: bool) -> None:
        task = presented.task_of(part)
        losses = learner.observe(stream.x_train[rows], stream.y_train[rows], task, index=rows, train=train)
        for value in (losses or {}).values():
            float(value)

    def begin(part: int) -> None:
        task = presented.task_of(part)
        if learner.task != task:
            learner.begin_task(task, presented.tasks[task])
            learner.data.task_batches = config.epochs * presented.task_batches(task)

    def fill(part: int) -> None:
        begin(part)
        for rows in batches[part][:_STORED]:
            observe(part, rows, train=False)

    last = len(batches) - 1
    if config.train_on == "final_memory":
        for part in range(len(batches)):
            fill(part)
        slots = torch.arange(min(learner.memory.filled, config.options.buffer_batch), device=learner.device)

        def rehearse() -> None:
            for value in learner.rehearse(slots).values():
                float(value)

        times = _timed([rehearse] * 100, budget)
        images = sum(map(presented.count_images, range(presented.parts)))
        return config.epochs * -(-min(config.memory, images) // config.options.buffer_batch) * _steady(times)

    early: list[float] = []
    ends: list[float] = []  # of tasks: a review, or what else the method does there
    done = 0.0
    for part, batches_of_part in enumerate(batches):
        begin(part)
        steps = [lambda rows=rows, part=part: observe(part, rows, train=True) for rows in batches_of_part]
        times = _timed(steps, budget / 2 - done)
        early += times
        done += sum(times)
        if len(times) < len(batches_of_part):
            break
        if presented.has_boundaries or part == last:
            ends += _timed([learner.end_task], 0)
    else:
        return config.epochs * done + sum(ends)
    for skipped in range(part + 1, last + 1):
        if presented.has_boundaries:
            if skipped == last:
                ends = _timed([learner.end_task], 0)
            learner.data.ended = True  # the ends of the others are left out
        fill(skipped)
    late = _timed([lambda rows=rows: observe(last, rows, train=True) for rows in batches[last]], budget / 2) or early
    ends = ends or _timed([learner.end_task], 0)
    first, final = _steady(early), _steady(late)
    seconds = sum(len(rows) * (first + (final - first) * part / max(last, 1)) for part, rows in enumerate(batches))
    return config.epochs * seconds + len(presented.tasks) * ends[-1]


def _evaluating(config: RunConfig, stream: Stream, learner: Learner) -> float:
    """Seconds of all evaluations: before training, and of memory and tests after every task."""
    images = stream.x_test[torch.arange(min(learner.evaluation_batch, len(stream.x_test)))]
    times = _timed([lambda: learner.outputs(images)[0].sum().item()] * 3, 10.0)
    # Without task boundaries, as if the classes came evenly.
    tested = [len(stream.test_rows(task)) for task in range(len(stream.tasks))]
    if not stream.has_boundaries:
        tested = [tested[0] / stream.parts] * stream.parts
    stored = min(config.memory, len(stream.x_train))
    everything = sum(tested) + stored
    if config.train_on == "final_memory" or learner.joint_stream:
        total = 2 * everything
    else:
        total = sum(sum(tested[: task + 1]) + stored for task in range(len(tested))) + everything
    if config.evaluate_every is not None:
        batches = config.epochs * sum(map(stream.count_batches, range(stream.parts)))
        means = stored if config.anytime_stored is None else min(stored, config.anytime_stored * stream.classes)
        total += batches // config.evaluate_every * (min(sum(tested), config.anytime_images) + means)
    return total * min(times) / len(images)


def _timed(steps: list[Callable[[], object]], budget: float) -> list[float]:
    """Seconds of each step, for as many steps as the budget allows and at least one."""
    times: list[float] = []
    for step in steps:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        if sum(times) > budget:
            break
    return times


def _steady(times: list[float]) -> float:
    """The median of the later half, since the first steps warm up."""
    return statistics.median(times[len(times) // 2 :])
