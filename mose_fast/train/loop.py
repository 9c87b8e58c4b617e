"""The training loop: batches, evaluations and checkpoints between them, and the results."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mose_fast.device import deterministic, own_stream, upload
from mose_fast.evaluate import AnytimeSample, TaskAccuracy, evaluate_learner
from mose_fast.learner.saved import made_by
from mose_fast.methods import Learner
from mose_fast.runs.checkpoint import CheckpointWriter, Snapshot, load_checkpoint
from mose_fast.runs.clock import Clock
from mose_fast.runs.figure import accuracy_figure
from mose_fast.runs.files import RunError, RunFolder
from mose_fast.runs.identity import check_identity
from mose_fast.runs.listeners import Listener, TensorBoard
from mose_fast.runs.results import AccuracyTable, build_results
from mose_fast.settings.run import RunConfig
from mose_fast.signals import Interrupted, StopRequest, stop_request
from mose_fast.streams import Stream
from mose_fast.streams.draws import draw_order
from mose_fast.train.pipeline import Batch, Pipeline, Taken, incoming, resident

# Purpose word for the random order of rehearsals of the final memory: above the words of the tasks'
# orders, below that of the class order.
_REHEARSAL_ORDER = 2**62

# Number of losses that a message on divergence shows.
_REMEMBERED_LOSSES = 5

_AGAINST_DIVERGENCE = "lower options.lr, or use precision fp32. The checkpoints before it are kept."


class TrainingDiverged(RunError):
    """A loss became NaN or infinite."""


class Loop:
    """A run in progress, with an untrained learner or one that :meth:`restore` restores; without a
    ``folder`` it writes nothing.

    Attributes:
        position: The next batch: ``task`` (the part of the stream), epoch and number within the
            epoch; ``done`` counts batches over the whole run. After the parts of the stream,
            training on the final memory is one more.
        records: The results of all evaluations so far, how often the run was resumed, how many
            steps were replayed, how many captures were tried once more, and the image files
            ``skipped``.
            ``test`` and ``buffer``: accuracies on test images and on memory samples (None for a
            task without) by classifier and expert, a row for each of ``evaluated_after``, the parts
            of the stream with an evaluation. ``confusion``: test images by task and predicted task
            after the last; ``confusion_by_class``: likewise, without zeros. ``anytime``: the curve
            of the accuracy at any time, lists with an entry for each evaluation, or None.
            ``evaluation_points``: without task boundaries, the images and classes that had come at
            each; else None.
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
        # What the learner sees: the upper bound, the images of all tasks shuffled into one task.
        self.presented = self.stream.as_one_task() if learner.joint_stream else self.stream
        self.position = {"task": 0, "epoch": 0, "batch": 0, "done": 0}
        self.records: dict[str, Any] = {
            **{"resumed": 0, "replayed": 0, "retries": 0, "skipped": []},
            **{"test": {}, "buffer": {}, "evaluated_after": [], "confusion": [], "confusion_by_class": []},
            "anytime": None,
            "evaluation_points": None if stream.has_boundaries else {"images_seen": [], "classes_seen": []},
        }
        self.table = None if folder is None else AccuracyTable(folder.accuracy)
        self.sample = None
        if config.evaluate_every is not None:
            self.sample = AnytimeSample(config, self.stream)
            names = ("batch", "images_seen", "classes_seen", "task", "ends_task")
            self.records["anytime"] = {name: [] for name in names} | {"accuracy": {}}
        self.clock = clock
        self.pipeline = Pipeline(learner, clock)
        self.writer = None if folder is None else CheckpointWriter(folder.checkpoints, learner.device)
        # What checkpoints and results note about how a run was made; ConfigError if the method's
        # files were edited after they had been imported.
        self.identity = {"config": config.to_dict(), **made_by(learner)}
        self.last_losses: deque[float] = deque(maxlen=_REMEMBERED_LOSSES)

    def run(self) -> dict[str, Any]:
        """Continues the run from its position to its end; returns the results."""
        try:
            if self.folder is not None:
                self.learner.check_kept()
            with stop_request() as stop, deterministic(self.config.deterministic), own_stream(self.learner.device):
                self._notify("on_start", self.config, self.stream, self.learner, self.position["done"], self._count())
                parts = self.presented.parts
                for part in range(self.position["task"], parts + int(self.joint)):
                    self._notify("on_task_start", part)
                    task = self.presented.task_of(part)
                    if part < parts and self.learner.task != task:
                        self.learner.begin_task(task, self.presented.tasks[task])
                        self.learner.data.task_batches = self.config.epochs * self.presented.task_batches(task)
                    self._train(part, stop)
                    self._finish_part(part, stop)
                return self._finish()
        finally:
            self.pipeline.close()
            if self.writer is not None:
                self.writer.close()
            self._notify("close")

    # Batches

    def _train(self, part: int, stop: StopRequest) -> None:
        rehearsing = part == self.presented.parts
        for epoch in range(self.position["epoch"], self.config.epochs if rehearsing or not self.joint else 1):
            if rehearsing:
                batches = self._rehearsed(epoch)[self.position["batch"] :]
            else:
                rows = self.presented.batches(part, seed=self.config.seed, epoch=epoch)[self.position["batch"] :]
                task = self.presented.task_of(part)
                batches = incoming(self.stream, task, rows, train=not self.joint, store=epoch == 0)
            every, evaluate_every = self.config.checkpoint_every, self.config.evaluate_every
            while batches:
                if evaluate_every is not None and self.position["done"] % evaluate_every == 0:
                    self._evaluate_between(part, stop)
                # No plan is made beyond a checkpoint or an evaluation.
                ends = [n - self.position["done"] % n for n in (every, evaluate_every) if n is not None]
                count = min([len(batches), *ends])
                coming = [Batch(_after(self.position, n), content) for n, content in enumerate(batches[:count])]
                batches = batches[count:]
                self._follow(self.pipeline.run(coming), stop)
                if every is not None and self.position["done"] % every == 0:
                    self._save()
            self.position |= {"epoch": epoch + 1, "batch": 0}

    def _rehearsed(self, epoch: int) -> list[Tensor]:
        order = torch.from_numpy(draw_order(self.learner.memory.filled, self.config.seed, _REHEARSAL_ORDER + epoch))
        return list(upload(order, self.learner.device).split(self.config.options.buffer_batch))

    def _follow(self, steps: Iterator[tuple[Taken, dict[str, float] | None]], stop: StopRequest) -> None:
        """Records each step; stops the run if a signal or a listener asks for it."""
        try:
            for taken, losses in steps:
                self._note(taken, losses)
                stop.check()
        except Interrupted:
            self.pipeline.stop()
            # On a GPU, more steps may have been taken since the last recorded one.
            while self.pipeline.reader:
                with suppress(Interrupted):
                    for taken, losses in self.pipeline.drain(wait=True):
                        self._note(taken, losses)
            self._save(wait=True)
            raise

    def _note(self, taken: Taken, losses: dict[str, float] | None) -> None:
        if losses is not None and not all(map(math.isfinite, losses.values())):
            self._diverge(taken, losses)
        self.position = _after(taken.position, 1)
        self.records["replayed"] += taken.replayed
        self.records["retries"] += taken.retries
        self.last_losses.extend([] if losses is None else [next(iter(losses.values()))])
        self._notify("on_batch", self.position["done"], losses)

    def _diverge(self, taken: Taken, losses: dict[str, float]) -> None:
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
            # Weights may be broken although the previous loss was finite. The message is the same.
            with suppress(TrainingDiverged):
                self._save(wait=True)
                message += " The newest is the state before this batch."
        raise TrainingDiverged(message)

    # Evaluations

    def _evaluate_between(self, part: int, stop: StopRequest) -> None:
        """Evaluates on the sample, unless the end of the part before, or the run before it was
        resumed, has done it.
        """
        if self.position["done"] in (0, *self.records["anytime"]["batch"][-1:]):
            return
        self.pipeline.ring.synchronise()
        with self._stoppable(stop), self.clock.timed("evaluate"):
            accuracy = self.sample.evaluate(self.learner)
        self._add_point(accuracy, part, ends_task=False)

    def _add_point(self, accuracy: dict[str, dict[str, float]], part: int, *, ends_task: bool) -> None:
        point = {
            "batch": self.position["done"],
            "images_seen": self._images_seen(part),
            "classes_seen": len(self.learner.seen),
            "task": part,
            "ends_task": ends_task,
        }
        curve = self.records["anytime"]
        for name, value in point.items():
            curve[name].append(value)
        for classifier, experts in accuracy.items():
            for expert, value in experts.items():
                curve["accuracy"].setdefault(classifier, {}).setdefault(expert, []).append(value)
        self._notify("on_evaluation", point["batch"], point["images_seen"], accuracy)

    def _images_seen(self, part: int) -> int:
        """Images that have arrived at the present position in a part, each pass counted."""
        position, stream = self.position, self.presented
        passes = [self.config.epochs * stream.count_images(earlier) for earlier in range(part)]
        return sum(passes, position["epoch"] * stream.count_images(part) + stream.count_images(part, position["batch"]))

    def _finish_part(self, part: int, stop: StopRequest) -> None:
        """Ends the task, if a part of the stream is one or the last of one, and evaluates."""
        accuracy = None
        last = self.presented.parts - 1
        self.pipeline.ring.synchronise()
        with self._stoppable(stop):
            if part == last or (part < last and self.presented.has_boundaries):
                self.learner.end_task()
            if part > last or not self.joint:
                seen = self.stream.parts - 1 if self.learner.joint_stream else min(part, last)
                with self.clock.timed("train"):
                    self.learner.prepare_evaluation()
                with self.clock.timed("evaluate"):
                    sample = None if self.sample is None else self.sample.rows(self.learner.seen)
                    accuracy = evaluate_learner(self.learner, self.stream, seen, sample=sample)
        if accuracy is not None:
            self._record(accuracy, seen)
            if not self.stream.has_boundaries:
                points = self.records["evaluation_points"]
                points["images_seen"].append(sum(map(self.presented.count_images, range(min(part, last) + 1))))
                points["classes_seen"].append(len(self.learner.seen))
            if accuracy.sample is not None:
                self._add_point(accuracy.sample, part, ends_task=True)
        self.position |= {"task": part + 1, "epoch": 0, "batch": 0}
        self._save()
        self._notify("on_task_end", part, self.position["done"], accuracy)

    def _record(self, accuracy: TaskAccuracy, seen: int) -> None:
        records = self.records
        for kind, values in (("test", accuracy.test), ("buffer", accuracy.buffer)):
            for classifier, experts in values.items():
                for expert, row in experts.items():
                    records[kind].setdefault(classifier, {}).setdefault(expert, []).append(row)
        records |= {"confusion": accuracy.confusion, "confusion_by_class": accuracy.confusion_by_class}
        records["evaluated_after"].append(seen)
        if self.table is not None:
            self.table.write(records["test"], records["buffer"], records["evaluated_after"])

    @contextmanager
    def _stoppable(self, stop: StopRequest) -> Iterator[None]:
        """A context in which the end of a task, which may train and evaluate for minutes, can be
        stopped between two steps. The resumed run repeats it from the state before it.

        Raises:
            TrainingDiverged: A loss of this training, which nobody reads, was not finite.
        """
        state = None if self.writer is None else self._state()

        def after_step() -> None:
            self._notify("on_step")
            stop.check()

        self.learner.after_step = after_step
        try:
            yield
            if self.learner.diverged:
                raise TrainingDiverged(
                    f"a loss is not finite in the training for the end of task {self.position['task'] + 1} or its"
                    f" evaluation; {_AGAINST_DIVERGENCE} The newest is the state before this training."
                )
        except (Interrupted, TrainingDiverged):
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
        self._note_skipped()
        results = build_results(
            self.config, self.stream, self.learner, self.identity, self.records, untrained, self.clock
        )
        if self.folder is not None:
            self.folder.write(self.folder.figure, accuracy_figure(results))
            results["seconds"] = self.clock.results()
            self.folder.write(self.folder.results, json.dumps(results, indent=1, allow_nan=False) + "\n")
        self._notify("on_end", results)
        return results

    def _untrained(self) -> dict[str, dict[str, list[float]]]:
        """Accuracies of the untrained network with the same final memory: a lower bound."""
        # Not with create_learner, which may refuse for lack of memory; that must not happen at the
        # end of a run.
        untrained = type(self.learner)(
            dataclasses.replace(self.config, precision=self.learner.precision.name), **self.stream.spec
        )
        untrained.data = self.learner.data
        with warnings.catch_warnings():
            # The trained learner has already warned about the same memory.
            warnings.filterwarnings("ignore", message=".* no sample in the memory")
            return evaluate_learner(untrained, self.stream, self.stream.parts - 1, prepare=False).test

    def _count(self) -> int:
        parts = range(self.presented.parts)
        stream = sum(map(self.presented.count_batches, parts))
        if not self.joint:
            return stream * self.config.epochs
        filled = min(self.config.memory, sum(map(self.presented.count_images, parts)))
        return stream + self.config.epochs * -(-filled // self.config.options.buffer_batch)

    # Checkpoints

    def _save(self, *, wait: bool = False) -> None:
        """Writes a checkpoint; on a GPU while training continues, unless ``wait`` is True."""
        if self.writer is not None:
            self._write(*self._state(), wait=wait)

    def _state(self) -> tuple[int, Snapshot, dict[str, Any]]:
        """A copied checkpoint of the current state: its number, the tensors and the values."""
        with self.clock.timed("checkpoint"):
            self.pipeline.ring.synchronise()
            self.learner.check_kept()
            self._note_skipped()
            # Before the copy: asking waits for the GPU, which would hide a copy that is not waited
            # for.
            numbers = copy.deepcopy(self.learner.values())
            snapshot = Snapshot(self.learner.tensors())
            broken = snapshot.not_finite()
            if broken is not None:
                raise TrainingDiverged(
                    f"{broken} holds NaN or infinity after batch {self.position['done']}; {_AGAINST_DIVERGENCE}"
                )
            values = {
                "learner": numbers,
                "position": dict(self.position),
                "records": _copied(self.records),
                "seconds": self.clock.state(),
                "identity": self.identity,
            }
            return self.position["done"] + self.position["task"], snapshot, values

    def _write(self, step: int, snapshot: Snapshot, values: dict[str, Any], *, wait: bool) -> None:
        with self.clock.timed("checkpoint"):
            self.writer.write(step, snapshot, values)
            if wait:
                self.writer.wait()

    def restore(self, checkpoint: Path) -> None:
        tensors, values = load_checkpoint(checkpoint)
        check_identity(values["identity"], self.identity, checkpoint)
        try:
            self.learner.load_state(tensors, values["learner"])
            self.position, self.records = values["position"], values["records"]
            self.clock.load(values["seconds"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"the checkpoint {checkpoint} does not belong to the configuration beside it: {error}"
            ) from error
        self.records["resumed"] += 1

    def _note_skipped(self) -> None:
        """Adds the files that this process left out to those of the run before it was resumed."""
        self.records["skipped"] = sorted({*self.records["skipped"], *self.stream.skipped})

    def _notify(self, event: str, *arguments: Any) -> None:
        for listener in self.listeners:
            getattr(listener, event)(*arguments)


def _after(position: dict[str, int], batches: int) -> dict[str, int]:
    """The position ``batches`` batches later in the same epoch."""
    return position | {"batch": position["batch"] + batches, "done": position["done"] + batches}


def _copied(records: Any) -> Any:
    """A copy of records, which shares what is never changed: the rows of one evaluation."""
    if isinstance(records, dict):
        return {name: _copied(value) for name, value in records.items()}
    return list(records) if isinstance(records, list) else records
