"""The loop: stream in, evaluations, checkpoints and results out; exact resume."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mose_fast import streams
from mose_fast.augment import choose_feed
from mose_fast.config import RunConfig, StreamConfig
from mose_fast.device import own_stream, upload
from mose_fast.evaluate import evaluate_learner
from mose_fast.methods import Learner, Prepared, create_learner, resolve_device, warn_of_other_protocol
from mose_fast.streams import Stream, StreamError
from mose_fast.streams.stream import draw_order
from mose_fast.train.captured import CapturedSteps
from mose_fast.train.checkpoint import CheckpointWriter, latest, load_checkpoint
from mose_fast.train.figure import accuracy_figure
from mose_fast.train.files import RunError, RunFolder, write_atomically
from mose_fast.train.listeners import Listener, TensorBoard
from mose_fast.train.losses import LossReader, Taken
from mose_fast.train.results import accuracy_csv, build_results
from mose_fast.train.ring import Ring

__all__ = ["Interrupted", "TrainingDiverged", "interrupt_flag", "resume", "run"]

# Purpose word of the order in which the final memory is rehearsed: above those of the tasks' orders, below the class order's.
_REHEARSAL_ORDER = 2**62

# Losses that a message on divergence shows.
_REMEMBERED_LOSSES = 5

_AGAINST_DIVERGENCE = "lower options.lr, or use precision fp32. The checkpoints before it are kept."


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run. Its state up to the last finished batch is in the run folder, if there is one."""


class TrainingDiverged(RunError):
    """A loss became NaN or infinite."""


def run(
    config: RunConfig | None = None,
    *,
    out: str | Path | None = None,
    stream: Stream | StreamConfig | Mapping[str, Any] | str | None = None,
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Trains a learner on a stream in one pass, evaluates it after every task and returns the results.

    Args:
        config: The settings; None builds them from ``settings`` with :meth:`RunConfig.create`.
        out: Folder for configuration, checkpoints, results, table, figure and TensorBoard events; None writes nothing.
        stream: With ``config``: a :class:`Stream` made by hand, used instead of the one that ``config.stream`` names. Without:
            such a stream, or the name or the settings of one.
        overwrite: Replace an earlier run in ``out``.
        listeners: Are told what happens.

    Returns:
        The contents of ``results.json``; ``results["acc"]["ncm"]["4"]`` is the paper's ACC of MOSE, in [0, 1].

    Raises:
        ConfigError: A setting is unusable.
        StreamError: The data are missing or unusable.
        RunError: The folder is in use or cannot be written, or training diverged.
        Interrupted: Ctrl-C; continue with :func:`resume`.
    """
    if config is None:
        made = isinstance(stream, Stream)
        config = RunConfig.create(stream={"name": stream.name} if made else stream, **settings)
        stream = stream if made else None
    elif settings:
        raise TypeError(f"{', '.join(settings)}: given beside config; wanted them inside it")
    # Before the stream, whose loading may take long.
    choose_feed(config.feed, resolve_device(config.device), None)
    listeners = list(listeners)
    if stream is None:
        stream = _load(config, listeners)
    elif isinstance(stream, Stream):
        config = dataclasses.replace(config, stream=dataclasses.replace(config.stream, name=stream.name, batch=stream.batch))
    else:
        raise TypeError(f"stream is {stream!r}, given beside config; wanted a Stream object, or its name inside config")
    learner = _learner(config, stream)
    warn_of_other_protocol(config)
    if (learner.joint_stream or len(stream.tasks) == 1) and config.train_on == "stream":
        learner.warn_of_boundaries("the stream is presented as one" if learner.joint_stream else "the stream has one")
    folder = None
    if out is not None:
        folder = RunFolder(out)
        folder.create(overwrite=overwrite)
        write_atomically(folder.config, config.to_json())
    return _Loop(config, stream, learner, folder, listeners).run()


def resume(out: str | Path, *, stream: Stream | None = None, listeners: Iterable[Listener] = ()) -> dict[str, Any]:
    """Continues a run from its newest checkpoint, with the same result as if it had never stopped.

    Args:
        out: The run's folder.
        stream: The stream, where it was given to :func:`run`.
        listeners: Are told what happens.

    Raises:
        RunError: There is no run in the folder, it is finished already, or its checkpoint cannot be read.
    """
    folder = RunFolder(out)
    if not folder.config.is_file():
        raise RunError(f"there is no run in {folder.path} (no {folder.config.name}); start one with: mose-fast run --out {folder.path}")
    if folder.results.is_file():
        raise RunError(f"the run in {folder.path} is finished; its results are in {folder.results}")
    config = RunConfig.load(folder.config)
    listeners = list(listeners)
    if stream is None:
        try:
            stream = _load(config, listeners)
        except StreamError as error:
            raise StreamError(f"{error} (a run that was given a Stream object needs it again: resume(out, stream=...))") from error
    learner = _learner(config, stream)
    loop = _Loop(config, stream, learner, folder, listeners)
    folder.reopen()
    checkpoint = latest(folder.checkpoints)
    if checkpoint is not None:
        loop.restore(checkpoint)
    return loop.run()


def _load(config: RunConfig, listeners: list[Listener]) -> Stream:
    def tell(done: int, images: int) -> None:
        for listener in listeners:
            listener.on_decode(done, images)

    return streams.create(config.stream, watch=tell)


def _resident(stream: Stream, device: torch.device) -> Stream:
    """The stream with its images on the card, uploaded once, where they leave half of the free memory to the run."""
    if device.type != "cuda":
        return stream
    size = stream.x_train.nbytes + stream.x_test.nbytes
    return stream.to(device) if 2 * size <= torch.cuda.mem_get_info(device)[0] else stream


def _learner(config: RunConfig, stream: Stream) -> Learner:
    if config.deterministic:
        # Read when CUDA starts, so it must be set before the first tensor goes to the card.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    n = stream.normalisation
    return create_learner(
        config, classes=stream.classes, image_size=stream.image_size, mean=n.mean, std=n.std, mirror_safe=stream.mirror_safe
    )


class _Loop:
    """One run in progress. ``position`` and ``records`` are all it must remember beside the learner."""

    def __init__(
        self, config: RunConfig, stream: Stream, learner: Learner, folder: RunFolder | None, listeners: Iterable[Listener]
    ) -> None:
        self.config, self.stream, self.learner, self.folder = config, _resident(stream, learner.device), learner, folder
        self.listeners = [*listeners] if folder is None else [*listeners, TensorBoard(folder.events)]
        self.joint = config.train_on == "final_memory"
        #: The stream as the learner meets it: the upper bound gets the images of all tasks shuffled into one.
        self.presented = self.stream
        if learner.joint_stream:
            self.presented = dataclasses.replace(self.stream, tasks=(tuple(range(stream.classes)),), arrival=None)
        #: The next batch: task, epoch and number within the epoch; ``done`` counts batches over the whole run.
        self.position = {"task": 0, "epoch": 0, "batch": 0, "done": 0}
        self.records: dict[str, Any] = {"test": {}, "buffer": {}, "confusion": [], "evaluated_after": [], "resumed": 0}
        self.seconds = {"train": 0.0, "evaluate": 0.0, "checkpoint": 0.0, "capture": 0.0}
        # On a card, eager steps go the same way, so that both give the same bits.
        self.captured = CapturedSteps(learner, capture=learner.stepping.name == "captured") if learner.late else None
        self.writer = None if folder is None else CheckpointWriter(folder.checkpoints, learner.device)
        self.ring = Ring(learner, None if self.captured is None else self.captured.inputs)
        self.reader = LossReader(learner)
        self.last_losses: deque[float] = deque(maxlen=_REMEMBERED_LOSSES)

    def run(self) -> dict[str, Any]:
        try:
            with interrupt_flag() as interrupted, _deterministic(self.config.deterministic), own_stream(self.learner.device):
                for listener in self.listeners:
                    listener.on_start(self.config, self.stream, self.learner, self.position["done"], self._batches())
                return self._run(interrupted)
        finally:
            if self.writer is not None:
                self.writer.close()
            for listener in self.listeners:
                listener.close()

    def _run(self, interrupted: threading.Event) -> dict[str, Any]:
        tasks = len(self.presented.tasks)
        # After the tasks of the stream, training on the final memory is one more.
        for task in range(self.position["task"], tasks + (1 if self.joint else 0)):
            for listener in self.listeners:
                listener.on_task_start(task)
            if task < tasks and self.position["epoch"] == self.position["batch"] == 0:
                self.learner.begin_task(task, self.presented.tasks[task])
            self._train_task(task, interrupted)
            self._finish_task(task)
        return self._finish()

    def _train_task(self, task: int, interrupted: threading.Event) -> None:
        rehearsing = task == len(self.presented.tasks)
        epochs = self.config.epochs if rehearsing or not self.joint else 1
        for epoch in range(self.position["epoch"], epochs):
            if rehearsing:
                order = torch.from_numpy(draw_order(self.learner.memory.filled, self.config.seed, _REHEARSAL_ORDER + epoch))
                batches = list(upload(order, self.learner.device).split(self.config.options.buffer_batch))
            else:
                batches = self.presented.batches(task, seed=self.config.seed, epoch=epoch)
            batches = batches[self.position["batch"] :]
            if rehearsing:
                self._rehearse(batches, interrupted)
            else:
                self._learn(task, epoch, batches, interrupted)
            self.position |= {"epoch": epoch + 1, "batch": 0}

    def _learn(self, task: int, epoch: int, batches: list[Tensor], interrupted: threading.Event) -> None:
        """Learns from batches of the stream in order, planning ahead as far as the ring reaches and no checkpoint comes between."""
        self.ring.settle()
        # The images' numbers where the images are, in one transfer.
        numbers = upload(torch.cat(batches), self.stream.x_train.device).split([len(rows) for rows in batches]) if batches else ()
        planned = 0
        while planned < len(batches) or len(self.ring):
            with self._timed("train"):
                while planned < len(batches) and not self.ring.full and self._until_checkpoint() > len(self.ring):
                    self.ring.put(partial(self._incoming, task, epoch, batches[planned], numbers[planned]))
                    planned += 1
                self._consume(self.ring.take())
            self._after_batch(interrupted)
        self._tell(interrupted, wait=True)

    def _incoming(self, task: int, epoch: int, rows: Tensor, numbers: Tensor) -> dict[str, Any]:
        """The arguments of the learner's ``prepare`` for a batch; ``numbers`` are its rows once more, beside the images."""
        x, y = self.stream.x_train[numbers], self.stream.y_train[rows]
        return {"x": x, "y": y, "task": task, "index": numbers, "train": not self.joint, "store": epoch == 0}

    def _rehearse(self, batches: list[Tensor], interrupted: threading.Event) -> None:
        """Trains on the final memory, slots by slots."""
        self.ring.settle()
        for slots in batches:
            with self._timed("train"):
                self._consume(self.learner.prepare_rehearsal(slots))
            self._after_batch(interrupted)
        self._tell(interrupted, wait=True)

    def _consume(self, prepared: Prepared) -> None:
        before = dict(self.position)
        losses = self.learner.consume(prepared, self.captured)
        if self.captured is not None:
            self.seconds["train"] -= self.captured.seconds
            self.seconds["capture"] += self.captured.seconds
            self.captured.seconds = 0.0
        self.position["batch"] += 1
        self.position["done"] += 1
        self.reader.add(Taken(prepared, before), losses)

    def _after_batch(self, interrupted: threading.Event) -> None:
        due = self._until_checkpoint() == self.config.checkpoint_every
        self._tell(interrupted, wait=due)
        if due:
            self._save()

    def _until_checkpoint(self) -> float:
        """Batches until the next checkpoint within a task, at least 1."""
        every = self.config.checkpoint_every
        return math.inf if every is None else every - self.position["done"] % every

    def _tell(self, interrupted: threading.Event, *, wait: bool) -> None:
        """Tells the listeners of all steps whose losses have arrived, or of all steps; stops the run where someone asks for it."""
        try:
            self._tell_listeners(wait=wait)
            if interrupted.is_set():
                raise Interrupted
        except Interrupted:
            self.ring.roll_back()
            # On a card, more steps may have been taken since the one that a listener was told of.
            while self.reader:
                with suppress(Interrupted):
                    self._tell_listeners(wait=True)
            self._save(wait=True)
            raise

    def _tell_listeners(self, *, wait: bool) -> None:
        for taken, losses in self._arrived(wait):
            if losses is not None and not all(map(math.isfinite, losses.values())):
                self._diverge(taken, losses)
            self.last_losses.extend([] if losses is None else [next(iter(losses.values()))])
            for listener in self.listeners:
                listener.on_batch(taken.position["done"] + 1, losses)

    def _arrived(self, wait: bool) -> Iterator[tuple[Taken, dict[str, float] | None]]:
        """What the reader tells; the time that it waits for the device belongs to training."""
        told = self.reader.told(wait=wait)
        while True:
            with self._timed("train"):
                arrived = next(told, None)
            if arrived is None:
                return
            yield arrived

    def _diverge(self, taken: Taken, losses: dict[str, float]) -> None:
        """Goes back to before a step whose loss is not finite, leaves a checkpoint of that and raises."""
        self.ring.roll_back()
        for later in reversed(self.reader.drop()):
            self.ring.undo(later.prepared)
        exact = self.ring.undo(taken.prepared)
        self.position = taken.position
        shown = ", ".join(f"{name} {value:g}" for name, value in losses.items())
        earlier = ", ".join(f"{value:g}" for value in self.last_losses) or "none"
        message = (
            f"the loss is not finite at batch {taken.position['done'] + 1} (task {taken.position['task']}): {shown}; the step had "
            f"{self.learner.describe(taken.prepared)}; losses before it: {earlier}; {_AGAINST_DIVERGENCE}"
        )
        if exact and self.folder is not None:
            # Weights may be broken although the loss before was finite; then the message is still this one.
            with suppress(TrainingDiverged):
                self._save(wait=True)
                message += " The newest is the state before this batch."
        raise TrainingDiverged(message)

    def _finish_task(self, task: int) -> None:
        last = len(self.presented.tasks) - 1
        accuracy = None
        self.ring.settle()
        if task <= last:
            self.learner.end_task()
        if not self.joint or task > last:
            seen = len(self.stream.tasks) - 1 if self.learner.joint_stream else min(task, last)
            with self._timed("train"):
                self.learner.prepare_evaluation()
            with self._timed("evaluate"):
                accuracy = evaluate_learner(self.learner, self.stream, seen)
            for kind, values in (("test", accuracy.test), ("buffer", accuracy.buffer)):
                for classifier, experts in values.items():
                    for expert, row in experts.items():
                        self.records[kind].setdefault(classifier, {}).setdefault(expert, []).append(row)
            self.records["confusion"] = accuracy.confusion
            self.records["evaluated_after"].append(seen)
        self.position |= {"task": task + 1, "epoch": 0, "batch": 0}
        if self.folder is not None and accuracy is not None:
            table = accuracy_csv(self.records["test"], self.records["buffer"], self.records["evaluated_after"])
            write_atomically(self.folder.accuracy, table)
        self._save()
        for listener in self.listeners:
            listener.on_task_end(task, self.position["done"], accuracy)

    def _finish(self) -> dict[str, Any]:
        if self.writer is not None:
            with self._timed("checkpoint"):
                self.writer.wait()
        with self._timed("evaluate"):
            untrained = self._untrained()
        results = build_results(
            self.config,
            self.stream,
            self.learner,
            self.records["test"],
            self.records["buffer"],
            self.records["confusion"],
            self.records["evaluated_after"],
            untrained,
            self.seconds,
            self.records["resumed"],
        )
        if self.folder is not None:
            write_atomically(self.folder.figure, accuracy_figure(results))
            write_atomically(self.folder.results, json.dumps(results, indent=1, allow_nan=False) + "\n")
        for listener in self.listeners:
            listener.on_end(results)
        return results

    def _untrained(self) -> dict[str, dict[str, list[float]]]:
        """Accuracies of the same seed's untrained network with the same final memory: what training must beat."""
        untrained = _learner(self.config, self.stream)
        untrained.memory, untrained.seen = self.learner.memory, self.learner.seen
        with warnings.catch_warnings():
            # The trained learner has warned about the same memory already.
            warnings.filterwarnings("ignore", message=".* no sample in the memory")
            return evaluate_learner(untrained, self.stream, len(self.stream.tasks) - 1, prepare=False).test

    def _batches(self) -> int:
        stream = sum(map(self.presented.count_batches, range(len(self.presented.tasks))))
        if not self.joint:
            return stream * self.config.epochs
        filled = min(self.config.memory, sum(len(self.presented.train_rows(task)) for task in range(len(self.presented.tasks))))
        return stream + self.config.epochs * -(-filled // self.config.options.buffer_batch)

    def _save(self, *, wait: bool = False) -> None:
        """Writes a checkpoint; on a card while the run goes on, unless it is to ``wait``."""
        if self.writer is None:
            return
        with self._timed("checkpoint"):
            self.ring.settle()
            tensors, values = self.learner.state()
            finite = torch.stack([tensor.isfinite().all().to(self.learner.device) for tensor in tensors.values()]).tolist()
            broken = [name for name, whole in zip(tensors, finite, strict=True) if not whole]
            if broken:
                raise TrainingDiverged(f"{broken[0]} holds NaN or infinity after batch {self.position['done']}; {_AGAINST_DIVERGENCE}")
            values = {"learner": values, "position": self.position, "records": self.records, "seconds": self.seconds}
            self.writer.write(self.position["done"] + self.position["task"], tensors, values)
            if wait:
                self.writer.wait()

    def restore(self, checkpoint: Path) -> None:
        """Takes over the state in a checkpoint of this very run."""
        tensors, values = load_checkpoint(checkpoint)
        try:
            self.learner.load_state(tensors, values["learner"])
            self.position, self.records = values["position"], values["records"]
            self.seconds |= values["seconds"]
        except (ValueError, KeyError) as error:
            raise RunError(f"the checkpoint {checkpoint} does not belong to the configuration beside it: {error}") from error
        self.records["resumed"] += 1

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets instead of breaking into a half-done step; a second one interrupts at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: Any) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
