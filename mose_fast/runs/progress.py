"""What a run shows at the terminal: a progress bar on stderr, tables on stdout."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from mose_fast import _loader
from mose_fast._build_info import build_info
from mose_fast.evaluate import TaskAccuracy
from mose_fast.methods import Learner
from mose_fast.runs.listeners import Listener
from mose_fast.runs.results import shown_experts
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream
from mose_fast.threads import crowding

# tqdm's own format has a wide bar and shows seconds a batch for slow steps. This one leaves room
# for the losses and always shows batches a second.
_BAR = "{desc}: {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

# Columns of the table of accuracies. Where not all tasks fit, it shows the mean, the newest task
# and the worst old task.
_COLUMNS = 100

# A terminal of at least this width has room for every loss beside their sum.
_WIDE = 150


class Progress(Listener):
    """Shows a run: first its settings, then a progress bar with losses and a table after each task;
    without a terminal one line a task replaces the bar. ``started``: whether training has begun,
    so that the run can be resumed.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.started = False
        self.bar: tqdm | None = None

    def on_decode(self, done: int, images: int) -> None:
        if self.bar is None and done < images and sys.stderr.isatty():
            self.bar = tqdm(total=images, desc="decoding", unit=" images", dynamic_ncols=True, file=sys.stderr)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
            if done == images:
                self.bar.close()
                self.bar = None

    def on_start(self, config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int) -> None:
        self.started = True
        self.tasks = stream.parts
        self.what = "task" if stream.has_boundaries else "part"
        # The joint upper bound trains on the whole stream as one task.
        self.met = 1 if learner.joint_stream else self.tasks
        self.main = learner.resolve_expert()
        self.first_batch, self.batches = batch, batches
        self.start = time.perf_counter()
        self.losses: dict[str, float] = {}
        print(_heading(config, stream, learner, batch, batches, self.out), flush=True)
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=batches,
                initial=batch,
                unit=" batches",
                bar_format=_BAR,
                dynamic_ncols=True,
                smoothing=0.05,
                miniters=1,
                file=sys.stderr,
            )

    def on_task_start(self, task: int) -> None:
        self.task_start = time.perf_counter()
        self.task_batches = 0
        if self.bar is not None:
            self.bar.set_description(self._name(task))

    def on_batch(self, batch: int, losses: dict[str, float] | None) -> None:
        self.task_batches += 1
        if losses is not None:
            self.losses = losses
        if self.bar is not None:
            self.bar.set_postfix_str(self._losses(), refresh=False)
            self.bar.update()

    def on_task_end(self, task: int, batch: int, accuracy: TaskAccuracy | None) -> None:
        if self.bar is None:
            now = time.perf_counter()
            seconds = now - self.task_start
            line = (
                f"{self._name(task)}: {self.task_batches} batches in {seconds:.1f} s ({self.task_batches / seconds:.1f}"
                " batches/s)"
            )
            line += f", {self._losses()}" if self.losses else ""
            if batch < self.batches and batch > self.first_batch:
                left = (now - self.start) / (batch - self.first_batch) * (self.batches - batch)
                line += f"; about {tqdm.format_interval(left)} left"
            print(line, file=sys.stderr, flush=True)
        if accuracy is not None:
            newest = min(task, self.tasks - 1) if self.met == self.tasks else self.tasks - 1
            tqdm.write(accuracy_table(accuracy.test, newest, self.tasks, self.main, self.what), file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _name(self, task: int) -> str:
        return f"{self.what} {task + 1} of {self.met}" if task < self.met else "final memory"

    def _losses(self) -> str:
        shown = list(self.losses.items())
        if self.bar is not None and os.get_terminal_size(sys.stderr.fileno()).columns < _WIDE:
            shown = shown[:1]
        return ", ".join(f"{name} {value:.2f}" for name, value in shown)


def accuracy_table(
    test: dict[str, dict[str, list[float]]], task: int, tasks: int, main: tuple[str, str], what: str = "task"
) -> str:
    """A table of the accuracies in percent after a task (from 0), at most 100 columns wide, with a
    row for each classifier and expert; that of ``main``, which ``predict()`` uses, is marked.

    Args:
        test: Accuracy in [0, 1] by classifier, expert and task seen.
        what: ``part`` for a stream without task boundaries: its accuracies are of the classes seen.
    """
    width = max(map(len, test))
    many = width + 22 + sum(map(_width, range(tasks))) > _COLUMNS
    columns = f"{f'task {task + 1}':>10}{'worst old task':>19}"
    if not many:
        columns = "".join(f"{f'task {t + 1}':>{_width(t)}}" for t in range(task + 1))
    of, mean = ("", "mean") if what == "task" else (" on the classes seen", "all")
    lines = [
        f"\naccuracy in percent{of} after {what} {task + 1} of {tasks}; * is what predict() uses",
        f"  {'':<{width}} {'expert':<13}{mean:>6}{columns if what == 'task' else ''}",
    ]
    for classifier, experts in test.items():
        for expert, row in shown_experts(experts, classifier, main):
            mark = "*" if (classifier, expert) == main else " "
            line = f"{mark} {classifier:<{width}} {expert:<13}{100 * sum(row) / len(row):>6.1f}"
            lines.append(line + (_by_task(row, many) if what == "task" else ""))
    return "\n".join(lines)


def _by_task(row: list[float], many: bool) -> str:
    if not many:
        return "".join(f"{100 * value:>{_width(t)}.1f}" for t, value in enumerate(row))
    columns = f"{100 * row[-1]:>10.1f}"
    if len(row) > 1:
        worst = min(range(len(row) - 1), key=row.__getitem__)
        columns += f"{100 * row[worst]:>8.1f} (task {worst + 1})"
    return columns


def _width(task: int) -> int:
    """Width of a task's column in the table: its name and a space. Tasks count from 0 here."""
    return len(f" task {task + 1}")


def _heading(config: RunConfig, stream: Stream, learner: Learner, batch: int, batches: int, out: Path) -> str:
    trained, deployed = learner.costs()
    native = build_info()["backend"]
    off = "off: it changes these labels" if config.options.mirror == "auto" else "off: options.mirror is off"
    device = learner.device
    weights = "" if config.init_seed is None else f" (initial weights: {config.init_seed})"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} thread(s)"
    rows = {
        "stream": stream.summary,
        "method": (
            f"{config.method} ({config.preset}), memory {config.memory}, seed {config.seed}{weights}, "
            f"mirroring {'on' if learner.mirrored else off}"
        ),
        "network": (
            f"width {config.width}: {trained.parameters:,} parameters and {trained.macs / 1e6:,.1f} M"
            f" multiply-accumulates an image (for predict(): {deployed.parameters:,} and {deployed.macs / 1e6:,.1f} M)"
        ),
        "device": (
            f"{where}, {learner.precision}; native library: {f'yes ({native} build)' if native else 'no, pure PyTorch'}"
        ),
    }
    if learner.feed is not None:
        rows["views"] = f"{config.options.augment}, made by {learner.feed}"
    if device.type == "cuda":
        rows["steps"] = str(learner.stepping)
    verdict = learner.self_check
    if verdict is not None and (verdict.state != "passed" or _loader.off):
        off = f"; switched off: {', '.join(_loader.off)} (mose-fast doctor --check)" if _loader.off else ""
        rows["kernels"] = f"self-check {verdict.state}{off}"
    if device.type == "cpu" and (crowded := crowding(torch.get_num_threads())):
        rows["caution"] = crowded
    rows["run"] = f"{batches} batches" + (f", continued after batch {batch}" if batch else "") + f", into {out}"
    return "\n".join(f"{name:<8} {text}" for name, text in rows.items())
