"""The loop: stream in, evaluations, checkpoints and results out; exact resume."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mose_fast import streams
from mose_fast.augment import choose_feed
from mose_fast.config import RunConfig, StreamConfig, takes_settings
from mose_fast.device import own_stream, upload
from mose_fast.evaluate import evaluate_learner
from mose_fast.methods import Learner, create_learner, resolve_device, warn_of_other_protocol
from mose_fast.signals import Interrupted, StopRequest, stop_request
from mose_fast.streams import Stream, StreamError
from mose_fast.streams.registry import check_fingerprint
from mose_fast.streams.stream import draw_order
from mose_fast.train.checkpoint import CheckpointWriter, Snapshot, latest, load_checkpoint
from mose_fast.train.clock import Clock
from mose_fast.train.figure import accuracy_figure
from mose_fast.train.files import RunError, RunFolder, write_atomically
from mose_fast.train.identity import check_identity, identity
from mose_fast.train.listeners import Listener, TensorBoard
from mose_fast.train.lock import FolderLock
from mose_fast.train.losses import Taken
from mose_fast.train.pipeline import Batch, Pipeline, incoming, resident
from mose_fast.train.results import accuracy_csv, build_results

__all__ = ["TrainingDiverged", "resume", "run"]

# Purpose word of the order in which the final memory is rehearsed: above those of the tasks'
# orders, below the class order's.
_REHEARSAL_ORDER = 2**62

# Losses that a message on divergence shows.
_REMEMBERED_LOSSES = 5

_AGAINST_DIVERGENCE = "lower options.lr, or use precision fp32. The checkpoints before it are kept."


class TrainingDiverged(RunError):
    """A loss became NaN or infinite."""


@takes_settings
def run(
    config: RunConfig | None = None,
    *,
    out: str | Path | None = None,
    stream: Stream | StreamConfig | Mapping[str, Any] | str | None = None,
    overwrite: bool = False,
    listeners: Iterable[Listener] = (),
    whole_process: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Trains a learner on a stream in one pass, evaluates it after every task and returns the
    results.

    Args:
        config: The settings; None builds them from ``settings`` with :meth:`RunConfig.create`.
        out: Folder for configuration, checkpoints, results, table, figure and TensorBoard events;
        None writes nothing.
        stream: With ``config``: a :class:`Stream` made by hand, used instead of the one that
            ``config.stream`` names. Without: such a stream, or the name or the settings of one:
            ``"digits"``, a folder or an ``.npz`` file of yours.
        overwrite: Replace an earlier run in ``out``.
        listeners: Are told what happens.
        whole_process: The wall time in the results begins with this process, imports included, not
        with this call.
        **settings: Without ``config``: the settings of the run, and switches of the method
            (:class:`MoseOptions` has those of MOSE), which may also be given by themselves:
            ``lr=0.01``, ``augment="simclr"``.

            {settings}

    Returns:
        The contents of ``results.json``; ``results["acc"]["ncm"]["4"]`` is the paper's ACC of MOSE,
        in [0, 1].

    Raises:
        ConfigError: A setting is unusable.
        StreamError: The data are missing or unusable.
        RunError: The folder is in use, holds files that are not a run's, or cannot be written, or
        training diverged.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after the next batch; continue with :func:`resume`.
    """
    clock = Clock(whole_process=whole_process)
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
        config = dataclasses.replace(
            config, stream=dataclasses.replace(config.stream, name=stream.name, batch=stream.batch)
        )
    else:
        raise TypeError(f"stream is {stream!r}, given beside config; wanted a Stream object, or its name inside config")
    check_fingerprint(config.stream, stream)
    config = dataclasses.replace(config, stream=dataclasses.replace(config.stream, fingerprint=stream.fingerprint))
    learner = _learner(config, stream)
    warn_of_other_protocol(config)
    _warn_of_memory(config, stream)
    if (learner.joint_stream or len(stream.tasks) == 1) and config.train_on == "stream":
        learner.warn_of_boundaries("the stream is presented as one" if learner.joint_stream else "the stream has one")
    if out is None:
        return _Loop(config, stream, learner, None, listeners, clock).run()
    folder = RunFolder(out)
    folder.make()
    with FolderLock(folder.path, "run"):
        folder.create(overwrite=overwrite)
        write_atomically(folder.config, config.to_json())
        return _Loop(config, stream, learner, folder, listeners, clock).run()


def resume(
    out: str | Path, *, stream: Stream | None = None, listeners: Iterable[Listener] = (), whole_process: bool = False
) -> dict[str, Any]:
    """Continues a run from its newest checkpoint, with the same result as if it had never stopped.

    Args:
        out: The run's folder.
        stream: The stream, where it was given to :func:`run`.
        listeners: Are told what happens.
        whole_process: As for :func:`run`.

    Raises:
        RunError: There is no run in the folder, it is finished already, another process works in
            it, or its checkpoint cannot be read.
    """
    clock = Clock(whole_process=whole_process)
    folder = RunFolder(out)
    if not folder.config.is_file():
        raise RunError(
            f"there is no run in {folder.path} (no {folder.config.name}); start one with: mose-fast run --out"
            f" {folder.path}"
        )
    with FolderLock(folder.path, "run"):
        return _resume(folder, stream, list(listeners), clock)


def _resume(folder: RunFolder, stream: Stream | None, listeners: list[Listener], clock: Clock) -> dict[str, Any]:
    if folder.results.is_file():
        raise RunError(f"the run in {folder.path} is finished; its results are in {folder.results}")
    config = RunConfig.load(folder.config)
    if stream is None:
        try:
            stream = _load(config, listeners)
        except StreamError as error:
            raise StreamError(
                f"{error} (a run that was given a Stream object needs it again: resume(out, stream=...))"
            ) from error
    check_fingerprint(config.stream, stream)
    learner = _learner(config, stream)
    loop = _Loop(config, stream, learner, folder, listeners, clock)
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


def _learner(config: RunConfig, stream: Stream) -> Learner:
    if config.deterministic:
        # Read when CUDA starts, so it must be set before the first tensor goes to the card.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return create_learner(config, **stream.spec)


def _warn_of_memory(config: RunConfig, stream: Stream) -> None:
    """Warns of a memory that is thin for the stream's classes, or that holds all of the stream, so
    that nothing need be forgotten.
    """
    images = sum(len(stream.train_rows(task)) for task in range(len(stream.tasks)))
    if config.memory < 2 * stream.classes:
        text = (
            f"fewer than two for each of the {stream.classes} classes: some may have no sample, and then no class mean"
        )
    elif config.memory > images:
        text = f"more than the stream has images, {images}: nothing is ever replaced, and methods hardly differ"
    else:
        return
    warnings.warn(f"memory is {config.memory}, {text}", stacklevel=3)


class _Loop:
    """One run in progress.

    ``position`` and ``records`` are all it must remember beside the learner.
    """

    def __init__(
        self,
        config: RunConfig,
        stream: Stream,
        learner: Learner,
        folder: RunFolder | None,
        listeners: Iterable[Listener],
        clock: Clock,
    ) -> None:
        self.config, self.stream, self.learner, self.folder = config, resident(stream, learner.device), learner, folder
        self.listeners = [*listeners] if folder is None else [*listeners, TensorBoard(folder.events)]
        self.joint = config.train_on == "final_memory"
        #: The stream as the learner meets it: the upper bound gets the images of all tasks shuffled
        #: into one.
        self.presented = self.stream.as_one_task() if learner.joint_stream else self.stream
        #: The next batch: task, epoch and number within the epoch; ``done`` counts batches over the
        #: whole run.
        self.position = {"task": 0, "epoch": 0, "batch": 0, "done": 0}
        self.records: dict[str, Any] = {"test": {}, "buffer": {}, "evaluated_after": [], "resumed": 0}
        self.records |= {"confusion": [], "confusion_by_class": []}
        self.clock = clock
        self.pipeline = Pipeline(learner, clock)
        self.writer = None if folder is None else CheckpointWriter(folder.checkpoints, learner.device)
        self.identity = None if folder is None else identity(config, learner)
        self.last_losses: deque[float] = deque(maxlen=_REMEMBERED_LOSSES)

    def run(self) -> dict[str, Any]:
        try:
            with stop_request() as stop, _deterministic(self.config.deterministic), own_stream(self.learner.device):
                for listener in self.listeners:
                    listener.on_start(self.config, self.stream, self.learner, self.position["done"], self._batches())
                return self._run(stop)
        finally:
            self.pipeline.close()
            if self.writer is not None:
                self.writer.close()
            for listener in self.listeners:
                listener.close()

    def _run(self, stop: StopRequest) -> dict[str, Any]:
        tasks = len(self.presented.tasks)
        # After the tasks of the stream, training on the final memory is one more.
        for task in range(self.position["task"], tasks + (1 if self.joint else 0)):
            for listener in self.listeners:
                listener.on_task_start(task)
            if task < tasks and self.position["epoch"] == self.position["batch"] == 0:
                self.learner.begin_task(task, self.presented.tasks[task])
            self._train_task(task, stop)
            self._finish_task(task, stop)
        return self._finish()

    def _train_task(self, task: int, stop: StopRequest) -> None:
        rehearsing = task == len(self.presented.tasks)
        epochs = self.config.epochs if rehearsing or not self.joint else 1
        for epoch in range(self.position["epoch"], epochs):
            if rehearsing:
                order = torch.from_numpy(
                    draw_order(self.learner.memory.filled, self.config.seed, _REHEARSAL_ORDER + epoch)
                )
                batches = list(upload(order, self.learner.device).split(self.config.options.buffer_batch))
            else:
                batches = self.presented.batches(task, seed=self.config.seed, epoch=epoch)
            self._learn(task, epoch, batches[self.position["batch"] :], rehearsing, stop)
            self.position |= {"epoch": epoch + 1, "batch": 0}

    def _learn(self, task: int, epoch: int, batches: list[Tensor], rehearsing: bool, stop: StopRequest) -> None:
        """Learns from batches, rows of the stream or slots of the memory.

        No plan passes a checkpoint.
        """
        contents = (
            batches if rehearsing else incoming(self.stream, task, batches, train=not self.joint, store=epoch == 0)
        )
        every = self.config.checkpoint_every
        while contents:
            count = len(contents) if every is None else min(len(contents), every - self.position["done"] % every)
            start, part, contents = self.position, contents[:count], contents[count:]
            coming = [Batch(_after(start, before), content) for before, content in enumerate(part)]
            self._follow(self.pipeline.rehearse(coming) if rehearsing else self.pipeline.run(coming), stop)
            if every is not None and self.position["done"] % every == 0:
                self._save()

    def _follow(self, steps: Iterator[tuple[Taken, dict[str, float] | None]], stop: StopRequest) -> None:
        """Tells the listeners of each step; stops the run where someone asks for it."""
        try:
            for taken, losses in steps:
                self._tell(taken, losses)
                stop.check()
        except Interrupted:
            self.pipeline.stop()
            # On a card, more steps may have been taken since the one that a listener was told of.
            while self.pipeline.reader:
                with suppress(Interrupted):
                    for taken, losses in self.pipeline.drain(wait=True):
                        self._tell(taken, losses)
            self._save(wait=True)
            raise

    def _tell(self, taken: Taken, losses: dict[str, float] | None) -> None:
        if losses is not None and not all(map(math.isfinite, losses.values())):
            self._diverge(taken, losses)
        self.position = _after(taken.position, 1)
        self.last_losses.extend([] if losses is None else [next(iter(losses.values()))])
        for listener in self.listeners:
            listener.on_batch(self.position["done"], losses)

    def _diverge(self, taken: Taken, losses: dict[str, float]) -> None:
        """Goes back to before a step whose loss is not finite, leaves a checkpoint of that and
        raises.
        """
        exact = self.pipeline.undo(taken)
        self.position = taken.position
        shown = ", ".join(f"{name} {value:g}" for name, value in losses.items())
        earlier = ", ".join(f"{value:g}" for value in self.last_losses) or "none"
        message = (
            f"the loss is not finite at batch {taken.position['done'] + 1} (task {taken.position['task'] + 1}):"
            f" {shown}; the step had {taken.prepared.describe()}; losses before it: {earlier};"
            f" {_AGAINST_DIVERGENCE}"
        )
        if exact and self.folder is not None:
            # Weights may be broken although the loss before was finite; then the message is still
            # this one.
            with suppress(TrainingDiverged):
                self._save(wait=True)
                message += " The newest is the state before this batch."
        raise TrainingDiverged(message)

    def _finish_task(self, task: int, stop: StopRequest) -> None:
        last = len(self.presented.tasks) - 1
        accuracy = None
        self.pipeline.ring.synchronise()
        with self._stoppable(stop):
            if task <= last:
                self.learner.end_task()
            if not self.joint or task > last:
                seen = len(self.stream.tasks) - 1 if self.learner.joint_stream else min(task, last)
                with self.clock.timed("train"):
                    self.learner.prepare_evaluation()
                with self.clock.timed("evaluate"):
                    accuracy = evaluate_learner(self.learner, self.stream, seen)
        if accuracy is not None:
            for kind, values in (("test", accuracy.test), ("buffer", accuracy.buffer)):
                for classifier, experts in values.items():
                    for expert, row in experts.items():
                        self.records[kind].setdefault(classifier, {}).setdefault(expert, []).append(row)
            self.records["confusion"] = accuracy.confusion
            self.records["confusion_by_class"] = accuracy.confusion_by_class
            self.records["evaluated_after"].append(seen)
        self.position |= {"task": task + 1, "epoch": 0, "batch": 0}
        if self.folder is not None and accuracy is not None:
            table = accuracy_csv(self.records["test"], self.records["buffer"], self.records["evaluated_after"])
            write_atomically(self.folder.accuracy, table)
        self._save()
        for listener in self.listeners:
            listener.on_task_end(task, self.position["done"], accuracy)

    @contextmanager
    def _stoppable(self, stop: StopRequest) -> Iterator[None]:
        """Lets what ends a task, which may train and evaluate for minutes, be stopped between two
        of its steps.

        It is done again from its beginning then, so the checkpoint is of the state before it.
        """
        state = None if self.writer is None else self._state()

        def after_step() -> None:
            for listener in self.listeners:
                listener.on_step()
            stop.check()

        self.learner.after_step = after_step
        try:
            yield
        except Interrupted:
            if state is not None:
                self._write(*state, wait=True)
            raise
        finally:
            del self.learner.after_step

    def _finish(self) -> dict[str, Any]:
        if self.writer is not None:
            with self.clock.timed("checkpoint"):
                self.writer.wait()
        with self.clock.timed("evaluate"):
            untrained = self._untrained()
        results = build_results(
            self.config,
            self.stream,
            self.learner,
            self.records["test"],
            self.records["buffer"],
            self.records["confusion"],
            self.records["confusion_by_class"],
            self.records["evaluated_after"],
            untrained,
            self.clock,
            self.records["resumed"],
        )
        if self.folder is not None:
            write_atomically(self.folder.figure, accuracy_figure(results))
            results["seconds"] = self.clock.results()
            write_atomically(self.folder.results, json.dumps(results, indent=1, allow_nan=False) + "\n")
        for listener in self.listeners:
            listener.on_end(results)
        return results

    def _untrained(self) -> dict[str, dict[str, list[float]]]:
        """Accuracies of the same seed's untrained network with the same final memory: what training
        must beat.
        """
        # Not by create_learner, which may refuse for want of memory: at the end of a run that must
        # not happen.
        untrained = type(self.learner)(
            dataclasses.replace(self.config, precision=self.learner.precision.name), **self.stream.spec
        )
        untrained.data = self.learner.data
        with warnings.catch_warnings():
            # The trained learner has warned about the same memory already.
            warnings.filterwarnings("ignore", message=".* no sample in the memory")
            return evaluate_learner(untrained, self.stream, len(self.stream.tasks) - 1, prepare=False).test

    def _batches(self) -> int:
        stream = sum(map(self.presented.count_batches, range(len(self.presented.tasks))))
        if not self.joint:
            return stream * self.config.epochs
        filled = min(
            self.config.memory, sum(len(self.presented.train_rows(task)) for task in range(len(self.presented.tasks)))
        )
        return stream + self.config.epochs * -(-filled // self.config.options.buffer_batch)

    def _save(self, *, wait: bool = False) -> None:
        """Writes a checkpoint; on a card while the run goes on, unless it is to ``wait``."""
        if self.writer is None:
            return
        self._write(*self._state(), wait=wait)

    def _state(self) -> tuple[int, Snapshot, dict[str, Any]]:
        """What a checkpoint of now is made of, independent of what comes after: its number, the
        tensors and the values.
        """
        with self.clock.timed("checkpoint"):
            self.pipeline.ring.synchronise()
            tensors, values = self.learner.state()
            snapshot = Snapshot(tensors)
            broken = snapshot.not_finite()
            if broken is not None:
                raise TrainingDiverged(
                    f"{broken} holds NaN or infinity after batch {self.position['done']}; {_AGAINST_DIVERGENCE}"
                )
            values = {
                "learner": values,
                "position": self.position,
                "records": self.records,
                "seconds": self.clock.state(),
            }
            return (
                self.position["done"] + self.position["task"],
                snapshot,
                copy.deepcopy(values) | {"identity": self.identity},
            )

    def _write(self, step: int, snapshot: Snapshot, values: dict[str, Any], *, wait: bool) -> None:
        with self.clock.timed("checkpoint"):
            self.writer.write(step, snapshot, values)
            if wait:
                self.writer.wait()

    def restore(self, checkpoint: Path) -> None:
        """Takes over the state in a checkpoint of this very run."""
        tensors, values = load_checkpoint(checkpoint)
        check_identity(values.get("identity"), self.identity, checkpoint)
        try:
            self.learner.load_state(tensors, values["learner"])
            self.position, self.records = values["position"], values["records"]
            self.clock.load(values["seconds"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"the checkpoint {checkpoint} does not belong to the configuration beside it: {error}"
            ) from error
        self.records["resumed"] += 1


def _after(position: dict[str, int], batches: int) -> dict[str, int]:
    """A position so many batches of the same epoch later."""
    return position | {"batch": position["batch"] + batches, "done": position["done"] + batches}


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
