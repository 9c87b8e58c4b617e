"""How a learner goes through its stream: tasks, planned batches and steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from mose_fast.learner.data import DataRecord
from mose_fast.learner.hooks import MethodHooks, Planning
from mose_fast.learner.kept import WRITTEN, KeptValues
from mose_fast.learner.latch import undone_if
from mose_fast.learner.model import Model
from mose_fast.learner.prepared import PlannedStep, Prepared, ViewsToCome, WholeBatch
from mose_fast.learner.returned import are_scalars, are_slots, check_returned
from mose_fast.nn import Classifiers, ExpertNetwork
from mose_fast.ops.draws import Purpose, permutation
from mose_fast.settings.knob import whole_number
from mose_fast.settings.run import ConfigError, RunConfig

# What the review multiplies gradients by.
_REVIEW_WEIGHT = 0.1


class Planner(MethodHooks):
    """Takes a method through its stream: :meth:`observe` learns from a batch at once;
    :meth:`prepare` plans it, and the prepared batch's ``take`` does the rest.
    """

    _kept: KeptValues
    _model: Model
    _classifiers: Classifiers | None
    _warned_boundaries: bool

    @property
    def model(self) -> Model:
        """The network and its optimiser; RuntimeError while a batch is planned ahead of steps."""
        if self.memory.extras.planning:
            raise RuntimeError(
                f"method {self.config.method!r} looks at its model in plan or store, which run ahead of the steps;"
                " wanted planning = Planning.LOOKS_AT_MODEL in its class, or the model used in the step alone"
            )
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    @property
    def network(self) -> ExpertNetwork:
        return self.model.network

    @property
    def steps(self) -> int:
        """Training steps taken."""
        return self.data.steps

    @property
    def reads_losses_late(self) -> bool:
        """Whether losses are read only after later steps were launched."""
        return self.planning is Planning.CAPTURED and self.device.type == "cuda"

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite, so that nothing is trained any more; waits for a GPU."""
        return bool(self.model.latch)

    def begin_task(self, task: int, classes: Sequence[int] | None = None) -> None:
        """Starts a task, and ends the previous one if it has not been ended. :meth:`observe` calls
        it when the task changes. A run that is resumed in the middle of a task does not, so
        everything that a method builds here must be part of its state.

        Args:
            task: A number that no other task has.
            classes: All labels of the task, if they are known beforehand.
        """
        task = whole_number("task", task, low=None)
        if classes is not None:
            classes = [whole_number("a class of the task", c, low=0, below=self.classes) for c in classes]
        if not self.data.ended:
            self.end_task()
        self.data.begin_task(task, classes)

    def end_task(self) -> None:
        """Ends the current task."""
        kept = self._kept.written(*WRITTEN)
        with undone_if(self.model.latch.closed, kept) if kept else nullcontext():
            self.on_task_end()
        if self.config.options.pull_back:
            self.model.pull_back(self.config.options.pull_back)
        if getattr(self.config.options, "optimiser_per_task", False):
            self.model.forget_moments()
        self.data.ended = True
        self._classifiers = None

    def observe(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray | Sequence[int],
        task: int,
        *,
        index: Tensor | None = None,
        train: bool = True,
        store: bool = True,
    ) -> dict[str, Tensor] | None:
        """Learns from one incoming batch, then offers it to the memory.

        Args:
            x: uint8 [B, H, W, 3], raw images.
            y: integers [B] in 0 ... K - 1.
            task: The task that the batch belongs to.
            index: int64 [B], positions in the original stream; None: counted from 0.
            train: False only stores the batch.
            store: False does not change the memory (every epoch after the first).

        Returns:
            The losses of the batch's last step by name, as scalars on the learner's device; None if
            nothing was trained.

        Raises:
            ValueError: The batch has the wrong shape, dtype or labels, or the task is no integer.
                Nothing has changed.
        """
        if self.planning >= Planning.AHEAD:
            prepared = self.prepare(x, y, task, index=index, train=train, store=store)
            losses = prepared.take()
            # If losses are read late, the host must not wait here.
            if losses is not None and not self.reads_losses_late and self.diverged:
                prepared.undo()
            return losses
        x, y, index = self._receive(*self.data.check_batch(x, y), task, index)
        losses = None
        for _ in range(self.config.options.iterations if train else 0):
            losses = self.train_batch(x, y)
        if store and (losses is None or not self.diverged):
            self._stored(x, y, index)
        return losses

    def prepare(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray | Sequence[int],
        task: int,
        *,
        index: Tensor | None = None,
        train: bool = True,
        store: bool = True,
    ) -> Prepared:
        """Does everything of :meth:`observe` that does not need the model, with its arguments and
        errors; what comes back does the rest. A learner that plans ahead chooses the step's rows
        and fills the memory here, and may prepare more batches before it takes this one's step.
        ``x`` may be on the learner's device; ``y`` on the host is read without waiting for a GPU.
        """
        x, y = self.data.check_batch(x, y)
        with self.data.record() as before:
            if self.planning < Planning.AHEAD:
                observe = partial(self.observe, x, y, task, index=index, train=train, store=store)
                return WholeBatch(self, before, do=observe, size=f"{len(x)} incoming rows")
            x, y, index = self._receive(x, y, task, index)
            with self._without_model():
                plans = []
                for _ in range(self.config.options.iterations if train else 0):
                    plan = self.plan(x, y)
                    if plan is not None:
                        plans.append(plan)
                        self.data.ahead += 1
                stored = self._stored(x, y, index) if store else None
        if not plans:
            return Prepared(self, before, stored=None if stored is None else (x, stored))
        steps = [PlannedStep(plan, self.inputs(plan)) for plan in plans[:-1]]
        return Prepared(self, before, [*steps, PlannedStep(plans[-1], self.inputs(plans[-1], stored))])

    def prepare_rehearsal(self, slots: Tensor) -> Prepared:
        """Prepares :meth:`rehearse`."""
        with self.data.record() as before:
            if self.planning < Planning.AHEAD:
                rehearse = partial(self.rehearse, slots)
                return WholeBatch(self, before, do=rehearse, size=f"{len(slots)} rows of the memory")
            plan = self.rehearsal(slots)
        self.data.ahead += 1
        return Prepared(self, before, [PlannedStep(plan, self.inputs(plan))])

    def rehearse(self, slots: Tensor) -> dict[str, Tensor]:
        """A training step on memory slots, int64 [n], alone; returns its losses by name."""
        return self.step(self.inputs(self.rehearsal(slots)))

    def step(self, inputs: Any, train_on: Callable[[Any], dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """Takes one training step on the result of :meth:`inputs`, by ``train_on`` in place of
        :meth:`take_step`, and counts it. Returns the losses by name, scalars on the device.
        """
        if isinstance(inputs, ViewsToCome):
            inputs = inputs.complete(inputs.make())
        losses = (self.take_step if train_on is None else train_on)(inputs)
        self.data.steps += not self.model.latch.froze
        self._classifiers = None
        return losses

    def take_step(self, inputs: Any) -> dict[str, Tensor]:
        """:meth:`train_on`, without effect once the run has diverged; what a graph captures."""
        with undone_if(self.model.latch.closed, self._kept.written("steps")):
            losses = self.train_on(inputs)
        wanted = "the losses by name, floating-point scalars, the minimised one first"
        check_returned(self, "train_on", losses, are_scalars(losses), wanted)
        return losses

    def undo(self, record: DataRecord) -> None:
        """Undoes the batch since a record of the data plane, except in the model."""
        self.data.undo(record)
        self._classifiers = None

    def review(self) -> None:
        """One epoch over the memory, but for what is held out, in whole batches of ``buffer_batch``
        (RaptorMai/online-continual-learning).
        """
        size = self.config.options.buffer_batch
        order = permutation(self.config.seed, self.steps, self.memory.drawable, Purpose.REVIEW, self.device)
        with self.model.weighted(_REVIEW_WEIGHT):
            for slots in order.split(size):
                if len(slots) == size:
                    self.rehearse(slots)
                    self.after_step()

    def after_step(self) -> None:
        """Called after each step of work that takes many: an evaluation, the training before one, a
        review. The learner's caller may replace it to watch the work, or to stop it with an
        exception; then only the state from before the work is valid.
        """

    def expect_boundaries(self, found: str) -> None:
        """Raises ConfigError for a stream without task boundaries if the method needs them; warns
        once if one of its options does. ``found`` says what shows it, after "but".
        """
        self.check_boundaries(self.config, found)
        for (switch, value), effect in self.without_boundaries.items():
            if not self._warned_boundaries and getattr(self.config.options, switch, None) == value:
                self._warned_boundaries = True
                warnings.warn(
                    f"options.{switch} of method {self.config.method!r} is {value!r}, which needs several tasks, but"
                    f" {found}: without task boundaries the method {effect} (said once)",
                    stacklevel=4,
                )

    @classmethod
    def check_boundaries(cls, config: RunConfig, found: str) -> None:
        """The refusal of :meth:`expect_boundaries`, before there is a learner."""
        if cls.needs_boundaries:
            raise ConfigError(
                f"method {config.method!r} {cls.needs_boundaries}, but {found}; wanted a stream of several tasks"
                " (without the loop: a new task number at each boundary, or begin_task with the task's classes)"
            )

    def _receive(self, x: Tensor, y: Tensor, task: int, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Registers a checked batch's task and labels; returns it on the device."""
        data, task = self.data, whole_number("task", task, low=None)
        known, current = (data.task_classes, data.current) if task == self.task else (None, [])
        # While the classes of the first task are unknown, the task number may be constant. With
        # several equal tasks, none has more than half of all classes.
        if data.first_task in (None, task) and known is None:
            count = len({*current, *y.tolist()})
            if 2 * count > self.classes:
                self.expect_boundaries(f"{count} of {self.classes} classes came in task {task}, the only one so far")
        if task != self.task:
            self.begin_task(task)
        self._classifiers = None
        return data.receive(x, y, index)

    def _stored(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        slots = self.store(x, y, index)
        fits = are_slots(slots, -1, self.memory.capacity, len(y))
        check_returned(self, "store", slots, fits, f"int64 [{len(y)}], the slot of each item now, -1 if it has none")
        return slots

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        """A context in which a method must neither look at the model nor write what steps write."""
        self.memory.extras.planning = True
        try:
            with self._kept.only_plans():
                yield
        finally:
            self.memory.extras.planning = False
