"""The learner: one interface to a data plane and a model, and the functions that a method defines
for both."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mose_fast import _loader
from mose_fast.augment import RECIPES, ViewMaker, choose_feed
from mose_fast.device import Choice, choose_precision, upload
from mose_fast.learner.data import IMAGE_SIZE, DataPlane, DataRecord, check_stream
from mose_fast.learner.hooks import are_scalars, are_slots, check_returned
from mose_fast.learner.kept import WRITTEN, KeptValues, survives_json, undone_if, unsaved
from mose_fast.learner.model import Model
from mose_fast.learner.prepared import PlannedBatch, PlannedStep, Prepared, StoredBatch, ViewsToCome, WholeBatch
from mose_fast.memory import BalancedMemory, ReplayMemory
from mose_fast.nn import CLASSIFIERS, MEAN_OF_EXPERTS, ClassMeans, Cost, ExpertNetwork, classify
from mose_fast.nn.kernels import choose_kernels
from mose_fast.ops.draws import Purpose, permutation
from mose_fast.optim import FlatAdam
from mose_fast.self_check import settle
from mose_fast.settings.knob import plain, whole_number
from mose_fast.settings.run import ConfigError, RunConfig, near_matches, shown

if TYPE_CHECKING:
    from mose_fast.learner.registry import About

__all__ = ["Learner", "Planning", "resolve_device"]

K = TypeVar("K", Tensor, nn.Module)

# Attributes whose tensors are saved by themselves or computed again.
_OWN = ("data", "views", "_model", "_means", "_kept")

# Images in a forward pass of an evaluation, unless the configuration has another number.
_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}

# What the review multiplies gradients by.
_REVIEW_WEIGHT = 0.1


class Planning(IntEnum):
    """How far ahead of training batches can be planned. Each value allows more than the last."""

    #: The rows to replay or to store are chosen by looking at the network.
    LOOKS_AT_MODEL = 0
    #: Rows are chosen without the network, but one batch at a time.
    BATCH_BY_BATCH = 1
    #: Neither ``plan`` nor ``store`` looks at the model or at what training changes: several
    #: batches are planned, and the memory filled, before the first of their steps is taken.
    AHEAD = 2
    #: In addition, ``train_on`` can be captured as a CUDA graph: it reads only its inputs and
    #: tensors with fixed addresses, and never waits for the card. On a card, losses are read only
    #: after later steps were launched.
    CAPTURED = 3


def resolve_device(name: str | torch.device) -> torch.device:
    """The device that a configuration's ``device`` means on this machine.

    Raises:
        ConfigError: The card that is asked for does not exist.
    """
    name = plain(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = (
                "this torch was built without CUDA"
                if torch.version.cuda is None
                else "torch sees no GPU (is there a driver?)"
            )
            raise ConfigError(
                f"device is {name!r}, but {why}; wanted a machine with an NVIDIA GPU, or cpu", instead=("device", "cpu")
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPU(s); wanted a lower number"
            )
    return device


def class_mask(count: int, device: torch.device, classes: Iterable[int]) -> Tensor:
    """bool [count] on a device, True for some classes."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(classes)] = True
    return upload(mask, device)


class Learner(ABC):
    """An online learner: sees each batch once, keeps a replay memory, predicts at any time.

    Users call :meth:`observe` and :meth:`predict`. To plan batches ahead, call :meth:`prepare` and
    the prepared batch's ``take`` instead; together they do what :meth:`observe` does.

    A method defines how rows are chosen (:meth:`plan`, :meth:`rehearsal`, :meth:`store`), the
    network (:meth:`build_network`) and the step (:meth:`train_on`).
    :class:`mose_fast.methods.ReplayLearner` defines all of these for one network and replayed rows.

    Args:
        config: The run's settings.
        classes: Number of classes K of the whole stream; labels are 0 ... K - 1.
        image_size: (H, W) of the images, multiples of 8.
        mean: Mean of images in [0, 1], by channel.
        std: Standard deviation of images in [0, 1], by channel.
        mirror_safe: False if mirroring changes the label, as for digits.

    Attributes:
        data: The memory, the tasks and the classes seen.
        views: Makes views of raw images.
        mirrored: Whether images are mirrored, in fixed copies and at random.
        kernels: ``fused`` or ``torch``: the value that the configuration's ``kernels`` has here.
        evaluation_batch: Images in a forward pass of an evaluation.
        precision: The value that the configuration's ``precision`` has here, and why.
        self_check: The verdict on the kernels of this kind of card, which the process obeys; None
            where no kernels run.
        stepping: The value that the configuration's ``step`` has here, and why.
        feed: What makes the views, and why.
    """

    #: How far ahead of training batches can be planned.
    planning: ClassVar[Planning] = Planning.BATCH_BY_BATCH

    #: Why steps are not captured, after "it"; docs/methods.md shows it. Only for methods whose
    #: ``planning`` is not ``CAPTURED``.
    not_captured: ClassVar[str] = "does not say that its steps can be captured"

    #: True for the upper bound that sees the data of all tasks shuffled into one: the loop presents
    #: the stream as a single task.
    joint_stream: ClassVar[bool] = False

    #: True if every forward pass in training goes through :meth:`Model.forward`, so that the
    #: optimiser may keep bf16 copies of the weights for it.
    uses_shadows: ClassVar[bool] = False

    #: Why the method cannot do without task boundaries, as the end of a sentence about it; empty if
    #: it can. Such a method refuses a stream of one task.
    needs_boundaries: ClassVar[str] = ""

    #: Whether predictions leave out classes that have not come yet; for methods whose losses never
    #: push the logits of such classes down.
    hides_unseen: ClassVar[bool] = False

    #: What the method does if the whole stream is one task, as the end of a sentence about it; the
    #: key is a switch and its value that needs task boundaries. docs/methods.md lists these, and a
    #: learner whose options have such a value warns.
    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = {
        ("review", True): "reviews the memory once, at the end of the whole stream",
        ("optimiser_per_task", True): "keeps its moments to the end",
    }

    #: Year, reference, cost and presets; the decorator :func:`mose_fast.methods.method` sets it.
    about: ClassVar[About]

    def __init__(
        self,
        config: RunConfig,
        *,
        classes: int,
        image_size: tuple[int, int] = IMAGE_SIZE,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        mirror_safe: bool = True,
    ) -> None:
        stream = check_stream(classes=classes, image_size=image_size, mean=mean, std=std, mirror_safe=mirror_safe)
        self._kept = KeptValues()
        self.config = config
        self.classes, self.image_size = stream["classes"], stream["image_size"]
        self.mean, self.std = stream["mean"], stream["std"]
        self.mirrored = stream["mirror_safe"] if config.options.mirror == "auto" else config.options.mirror == "on"
        self.device = resolve_device(config.device)
        self.self_check = settle(self.device)
        self.precision = choose_precision(config.precision, self.device)
        self.stepping = self._choose_step(config.step)
        self.evaluation_batch = config.evaluation_batch or _EVALUATION_BATCH[self.device.type]
        self.kernels = choose_kernels(config.kernels, self.device)
        memory = self.build_memory()
        check_returned(self, "build_memory", memory, isinstance(memory, ReplayMemory), "a ReplayMemory")
        self.data = DataPlane(memory, classes=self.classes, image_size=self.image_size, device=self.device)
        self.data.kept = partial(self._kept.written, "plans")
        self.views = self._build_views()
        self._planning_ahead = False
        self.model = self.build_model()
        self._means: ClassMeans | None = None
        self._warned_missing = False
        self._warned_boundaries = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_kept", ()) and value is not self.__dict__[name]:
            raise ConfigError(
                f"self.{name} of {type(self).__qualname__} is kept, so it must stay the same object; wanted"
                f" self.{name}.copy_(...), or self.keep({name!r}, ...) for one of another shape"
            )
        super().__setattr__(name, value)

    def keep(self, name: str, value: K, *, written: str = "steps") -> K:
        """Makes a tensor or a module of the method's own part of the state, as ``self.<name>`` on
        the learner's device: it is saved, restored and undone with the rest.

        Call it while the learner is built, in ``__init__`` or ``build_model``; later code writes it
        in place, without gradients. Another call with the name replaces it.

        Args:
            name: Name of the attribute.
            value: The tensor or module; of a module its ``state_dict``.
            written: When it is written. ``steps``: by :meth:`train_on` and what it calls; a step
                whose loss is not finite, and all after it, leave it as it was. ``plans``: by
                :meth:`plan`, :meth:`store` and what they call; undoing a batch restores it.
                ``tasks``: between steps alone, by :meth:`begin_task` or :meth:`on_task_end`, so
                that steps need no copy of it; only then may its shape change during a run.

        Returns:
            The value, on the device.

        Raises:
            ConfigError: One of the arguments is unusable, or the first task has begun.
        """
        call = f"{type(self).__qualname__}.keep({name!r}, ...)"
        if "data" not in self.__dict__:
            raise ConfigError(f"{call} came too early; wanted it after super().__init__(...)")
        if not isinstance(value, Tensor | nn.Module):
            raise ConfigError(f"{call} was given a {type(value).__qualname__}; wanted a tensor or a torch.nn.Module")
        if written not in WRITTEN:
            raise ConfigError(f"{call} has written={written!r}; wanted one of {', '.join(WRITTEN)}")
        taken = hasattr(type(self), name) or self.__dict__.get(name, value) is not value
        value = (value.detach() if isinstance(value, Tensor) and not value.is_leaf else value).to(self.device)
        if name not in self._kept:
            if taken or not name.isidentifier():
                why = f"self.{name} is something else already" if taken else "an attribute cannot have this name"
                raise ConfigError(f"{call}: {why}; wanted another name")
            if self.task is not None:
                raise ConfigError(f"{call} came after the first task had begun; wanted it in __init__")
        elif self.task is not None and written != "tasks" and not self._kept.same_shapes(name, value):
            raise ConfigError(f"{call} has another shape than before; wanted the same, or written='tasks'")
        self._kept.put(name, value, written)
        self.__dict__[name] = value
        return value

    @classmethod
    def views_at_once(cls, config: RunConfig) -> int:
        """The views in the largest forward pass of training, for an estimate of what fits; 0 where
        they are few.
        """
        return 0

    @classmethod
    def statistics_bytes(cls, config: RunConfig, classes: int) -> int:
        """The bytes of what a learner keeps of each class beside images, for an estimate of what
        fits; 0 where they are few.
        """
        return 0

    @classmethod
    def images_kept(cls, config: RunConfig, tasks: Sequence[tuple[int, int]]) -> int:
        """The most images that a learner keeps from one batch to the next.

        Args:
            config: The run's settings.
            tasks: Number of classes and of images of each task; the classes of a task have equally
                many, and no two tasks have one in common.
        """
        return min(config.memory, sum(images for _, images in tasks))

    def kept(self) -> dict[str, int]:
        """What the learner has kept from one batch to the next beside its network and optimiser:
        ``images``, the most so far; ``bytes`` of them, with labels and what else is stored beside
        each; ``bytes_beside`` of all else, such as a teacher or statistics of classes.
        """
        others = (t for name, t in self.state()[0].items() if not name.startswith(("network/", "adam/", "memory/")))
        return {
            "images": self.memory.most,
            "bytes": self.memory.most * self.memory.bytes_a_sample,
            "bytes_beside": sum(tensor.nbytes for tensor in others),
        }

    @property
    def memory(self) -> ReplayMemory:
        """The replay memory."""
        return self.data.memory

    @property
    def model(self) -> Model:
        """The network and its optimiser.

        Raises:
            RuntimeError: A batch is being planned ahead of earlier steps.
        """
        if self._planning_ahead:
            raise RuntimeError(
                f"method {self.config.method!r} looks at its model in plan or store, which run ahead of the steps;"
                " wanted planning = Planning.LOOKS_AT_MODEL in its class, or the model used in the step alone"
            )
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    @property
    def task(self) -> int | None:
        """The current task; None before the first."""
        return self.data.task

    @property
    def seen(self) -> list[int]:
        """All labels seen so far, in order of appearance."""
        return self.data.seen

    @property
    def steps(self) -> int:
        """Training steps taken."""
        return self.data.steps

    @property
    def network(self) -> ExpertNetwork:
        """The network."""
        return self.model.network

    @property
    def reads_losses_late(self) -> bool:
        """Whether losses are read only after later steps were launched."""
        return self.planning is Planning.CAPTURED and self.device.type == "cuda"

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite. Since then, nothing is trained or stored.

        On a card this waits for the card.
        """
        return bool(self.model.latch)

    # The stream

    def begin_task(self, task: int, classes: Sequence[int] | None = None) -> None:
        """Starts a task, and ends the previous one if it has not been ended. :meth:`observe` calls
        it when the task changes.

        A run that is resumed in the middle of a task does not call it again, so everything that a
        method builds here must be part of its state.

        Args:
            task: A number that no other task has.
            classes: All labels of the task, if they are known beforehand.

        Raises:
            ConfigError: One of them is no integer, or no label.
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
        if getattr(self.config.options, "optimiser_per_task", False):
            self.model.forget_moments()
        self.data.ended = True
        self._means = None

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
            index: int64 [B], positions in the original stream, kept in the memory; None: counted
                from 0.
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
        """Does everything of :meth:`observe` that does not need the model. Arguments and errors are
        those of :meth:`observe`.

        A learner that plans ahead chooses the step's rows and fills the memory here. It may prepare
        more batches before it takes this batch's step. ``x`` may already be on the learner's
        device; if ``y`` is on the host, it is read without waiting for a card.
        """
        x, y = self.data.check_batch(x, y)
        with self.data.record() as before:
            if self.planning < Planning.AHEAD:
                observe = partial(self.observe, x, y, task, index=index, train=train, store=store)
                return WholeBatch(self, before, observe, f"{len(x)} incoming rows")
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
            return StoredBatch(self, before, x, stored)
        *earlier, last = plans
        steps = [PlannedStep(plan, self.inputs(plan)) for plan in earlier]
        return PlannedBatch(self, before, steps=[*steps, PlannedStep(last, self.inputs(last, stored))])

    def prepare_rehearsal(self, slots: Tensor) -> Prepared:
        """Prepares :meth:`rehearse`."""
        with self.data.record() as before:
            if self.planning < Planning.AHEAD:
                return WholeBatch(self, before, partial(self.rehearse, slots), f"{len(slots)} rows of the memory")
            plan = self.rehearsal(slots)
        self.data.ahead += 1
        return PlannedBatch(self, before, steps=[PlannedStep(plan, self.inputs(plan))])

    def rehearse(self, slots: Tensor) -> dict[str, Tensor]:
        """Takes one training step on memory slots only (training on the final memory).

        Args:
            slots: int64 [n], the slots.

        Returns:
            The step's losses by name.
        """
        return self.step(self.inputs(self.rehearsal(slots)))

    def step(self, inputs: Any, train_on: Callable[[Any], dict[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """Takes one training step and counts it.

        Args:
            inputs: The result of :meth:`inputs`.
            train_on: A function that takes the step in place of :meth:`take_step`.

        Returns:
            The step's losses by name, as scalars on the learner's device.
        """
        if isinstance(inputs, ViewsToCome):
            inputs = inputs.complete(inputs.make())
        losses = (self.take_step if train_on is None else train_on)(inputs)
        self.data.steps += not self.model.latch.froze
        self._means = None
        return losses

    def take_step(self, inputs: Any) -> dict[str, Tensor]:
        """:meth:`train_on`, which changes nothing that is kept once the run has diverged. This is
        what a captured step captures.
        """
        with undone_if(self.model.latch.closed, self._kept.written("steps")):
            losses = self.train_on(inputs)
        wanted = "the losses by name, floating-point scalars, the minimised one first"
        check_returned(self, "train_on", losses, are_scalars(losses), wanted)
        return losses

    def _stored(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        slots = self.store(x, y, index)
        fits = are_slots(slots, -1, self.memory.capacity, len(y))
        check_returned(self, "store", slots, fits, f"int64 [{len(y)}], the slot of each item now, -1 if it has none")
        return slots

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        """A context in which the method must neither look at the model, nor write what steps
        write.
        """
        self._planning_ahead = True
        try:
            with self._kept.only_plans():
                yield
        finally:
            self._planning_ahead = False

    def mask(self, classes: Iterable[int]) -> Tensor:
        """bool [K] on the device, True for these classes."""
        return class_mask(self.classes, self.device, classes)

    def undo(self, record: DataRecord) -> None:
        """Undoes the batch since a record of the data plane, except in the model."""
        self.data.undo(record)
        self._means = None

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
        self._means = None
        return data.receive(x, y, index)

    def expect_boundaries(self, found: str) -> None:
        """Refuses a stream without task boundaries if the method needs them; warns once if one of
        its options does.

        Args:
            found: What shows that there are none; completes a sentence after "but".

        Raises:
            ConfigError: The method needs task boundaries.
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

    # What a method defines for the data

    def build_memory(self) -> ReplayMemory:
        """Builds the empty replay memory. Methods override it for another policy, or to store more
        for each slot.
        """
        config = self.config
        balanced = config.options.memory_policy == "balanced"
        kind = partial(BalancedMemory, classes=self.classes) if balanced else ReplayMemory
        return kind(config.memory, self.image_size, seed=config.seed, device=self.device)

    @abstractmethod
    def plan(self, x: Tensor, y: Tensor) -> Any:
        """Chooses the rows of the step for an incoming batch; None if the batch trains nothing.

        Args:
            x: uint8 [B, H, W, 3] on the learner's device.
            y: int64 [B] on the learner's device, registered in ``seen`` and ``current``. The memory
                does not contain the batch yet.
        """

    @abstractmethod
    def rehearsal(self, slots: Tensor) -> Any:
        """The plan of a step on memory slots only."""

    def inputs(self, plan: Any, stored: Tensor | None = None) -> Any:
        """The inputs of a plan's step, made when the plan is made; by default the plan itself.

        If steps are captured, they are a tuple of tensors, plain values and such tuples or
        dictionaries. Steps whose tensors have equal shapes and whose plain values are equal share a
        graph.

        Args:
            plan: The result of :meth:`plan` or :meth:`rehearsal`.
            stored: int64 [B], the result of :meth:`store` if the batch was stored before its last
                step, which this is.
        """
        return plan

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Offers a batch to the memory after its training step. The arguments are those of
        :meth:`observe`, checked and on the device.

        Returns:
            int64 [B]: the slot of each item now, -1 if it was not stored.
        """
        return self.memory.insert(x, y, self.task, index)

    def on_stored(self, x: Tensor, slots: Tensor) -> bool:
        """Called for a batch that was stored and trains nothing, in its turn among the steps.

        Args:
            x: uint8 [B, H, W, 3], the images.
            slots: int64 [B], the result of :meth:`store`.

        Returns:
            Whether anything has changed.
        """
        return False

    def describe(self, plan: Any) -> str:
        """Describes the size of a plan's step, for messages."""
        return "a plan of its own"

    # What a method defines for the model

    @abstractmethod
    def build_network(self) -> ExpertNetwork:
        """Builds the untrained network; PyTorch's random state was set from the weights' seed."""

    def build_optimiser(self, network: ExpertNetwork) -> torch.optim.Optimizer:
        """Builds the optimiser of all parameters of the network."""
        o = self.config.options
        settings = {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
        if self.kernels == "fused":
            shadow_dtype = torch.bfloat16 if self.shadowed else None
            return FlatAdam(network.parameters(), **settings, shadow_dtype=shadow_dtype)
        # PyTorch's fused optimisers can skip a step without the host knowing.
        how = {"fused": True, "capturable": True} if self.reads_losses_late else {}
        return torch.optim.Adam(network.parameters(), **settings, **how)

    @property
    def shadowed(self) -> bool:
        """Whether the optimiser keeps bf16 copies of the weights."""
        return self.uses_shadows and self.kernels == "fused" and self.precision.name == "bf16"

    def _build_views(self) -> ViewMaker:
        # Augmentations that are no recipe (pad_crop) are made by the method itself.
        recipe = self.config.options.augment if self.config.options.augment in RECIPES else "none"
        self.feed = choose_feed(self.config.feed, self.device, RECIPES[recipe])
        return ViewMaker(
            recipe,
            getattr(self.config.options, "inner_views", 1),
            mirror=self.mirrored,
            mean=self.mean,
            std=self.std,
            jitter_normalised=self.config.options.jitter_domain == "normalised",
            feed=self.feed.name,
        )

    def build_model(self) -> Model:
        """Builds an untrained network, the same for the same seed, and its optimiser."""
        # The weights depend only on their seed, not on the device or on earlier random numbers of
        # the program.
        seed = self.config.seed if self.config.init_seed is None else self.config.init_seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self.build_network()
        check_returned(self, "build_network", network, isinstance(network, ExpertNetwork), "an ExpertNetwork")
        network.use_kernels(self.kernels)
        network = network.to(self.device, memory_format=torch.channels_last)
        optimiser = self.build_optimiser(network)
        fits = isinstance(optimiser, torch.optim.Optimizer)
        check_returned(self, "build_optimiser", optimiser, fits, "an optimiser of PyTorch's")
        return Model(
            network,
            optimiser,
            self.views,
            precision=self.precision.name,
            evaluation_batch=self.evaluation_batch,
            reads_losses_late=self.reads_losses_late,
        )

    def train_batch(self, x: Tensor, y: Tensor) -> dict[str, Tensor] | None:
        """Takes one of the ``iterations`` on a batch, which is given as for :meth:`plan`: one step,
        unless a method takes several.
        """
        plan = self.plan(x, y)
        return None if plan is None else self.step(self.inputs(plan))

    @abstractmethod
    def train_on(self, inputs: Any) -> dict[str, Tensor]:
        """Takes one training step: views, forward pass, losses, backward pass and optimiser. It
        does not count the step.

        Args:
            inputs: The result of :meth:`inputs`.

        Returns:
            The step's losses by name, as scalars on the learner's device; the first is the
            minimised loss, as :meth:`Model.minimise` returns it.
        """

    def on_task_end(self) -> None:
        """Called at the end of a task, before the next one begins; by default the review, where the
        options have it.

        Methods that train here call :meth:`after_step` after every step. All planned steps must
        have been taken before.
        """
        if self.config.options.review and self.config.train_on != "final_memory":
            self.review()

    def review(self) -> None:
        """One epoch over the memory, but for what is held out, in batches of ``buffer_batch``, of
        which an incomplete last one is left out.

        Source: RaptorMai/online-continual-learning.
        """
        config = self.config
        order = permutation(config.seed, self.steps, self.memory.drawable, Purpose.REVIEW, self.device)
        with self.model.weighted(_REVIEW_WEIGHT):
            for slots in order.split(config.options.buffer_batch):
                if len(slots) == config.options.buffer_batch:
                    self.rehearse(slots)
                    self.after_step()

    def prepare_evaluation(self) -> None:  # noqa: B027 - most methods are ready at any time
        """Called before every evaluation and prediction; methods that train only when asked do it
        here.

        Calling it again before the next batch changes nothing. Methods that train here call
        :meth:`after_step` after every step.
        """

    def after_step(self) -> None:  # noqa: B027 - empty unless a caller replaces it
        """Called after each step of work that takes many: an evaluation, the training before one, a
        review at the end of a task.

        The caller of the learner may replace this function to watch the work, or to stop it with an
        exception; then only the state from before the work is valid.
        """

    # Prediction

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features float32 [E, N, D] and logits float32 [E, N, K] of raw images uint8 [N, H, W, 3],
        in evaluation mode; with :attr:`hides_unseen` the logits of classes not seen are -inf.
        """
        features, logits = self.model.outputs(x, self.after_step)
        if self.hides_unseen:
            unseen = torch.ones(self.classes, dtype=torch.bool)
            unseen[self.seen] = False
            logits = logits.masked_fill(unseen.to(self.device), -torch.inf)
        return features, logits

    def class_means(self, features: Tensor | None = None) -> ClassMeans:
        """The class means of the current memory; computed once between two batches.

        Args:
            features: [E, filled, D], the features of the memory's samples, if already computed.
        """
        if self._means is None:
            filled = self.memory.filled
            if features is None:
                features = self.outputs(self.memory.images[:filled])[0]
            self._means = ClassMeans(features, self.memory.labels[:filled], self.classes)
            known = self._means.known.tolist()
            missing = [c for c in sorted(self.seen) if not known[c]]
            if missing and filled and not self._warned_missing:
                self._warned_missing = True
                shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
                warnings.warn(
                    f"{len(missing)} of {len(self.seen)} classes seen have no sample in the memory of"
                    f" {self.memory.capacity} ({shown}); the nearest-class-mean classifier cannot predict them (said"
                    " once)",
                    stacklevel=2,
                )
        return self._means

    def predict(self, x: Tensor | np.ndarray, classifier: str | None = None, expert: str | int | None = None) -> Tensor:
        """Predicts the labels of raw images among the classes seen so far.

        Args:
            x: uint8 [N, H, W, 3].
            classifier: ``ncm`` | ``linear``; None: the configuration's.
            expert: ``1`` ... | ``last`` | ``mean``, or a name of the results (``mean_distance``,
                ``mean_logit``); None: the configuration's.

        Returns:
            int64 [N], on the CPU.

        Raises:
            ValueError: Unusable images or names, no class was seen yet, or an empty memory with
                ``ncm``.
        """
        x = self.data.check_images(x)
        classifier, expert = self.resolve_expert(classifier, expert)
        if not self.seen:
            raise ValueError("no class was seen yet, so there is none to predict; wanted observe() with a batch first")
        self.prepare_evaluation()
        features, logits = self.outputs(x)
        if classifier == "linear":
            votes = logits.mean(0) if expert == "mean_logit" else logits[int(expert) - 1]
            return votes.argmax(-1).cpu()
        return classify(features, logits, self.class_means())[classifier][expert].cpu()

    def resolve_expert(self, classifier: str | None = None, expert: str | int | None = None) -> tuple[str, str]:
        """The names that the results use for this classifier and expert; None means those of the
        configuration.
        """
        o = self.config.options
        classifier, expert = o.classifier if classifier is None else plain(classifier), plain(expert)
        if expert is None:
            expert = o.expert
            if expert == "mean":
                classifier = "ncm" if o.mean_of_experts == "distance" else "linear"
        expert = str(o.experts) if expert == "last" else str(expert)
        if classifier not in CLASSIFIERS:
            raise ValueError(f"classifier is {classifier!r}{near_matches(str(classifier), list(CLASSIFIERS))}")
        mean = MEAN_OF_EXPERTS[classifier]
        expert = mean if expert == "mean" else expert
        known = [*(str(e + 1) for e in range(o.experts)), mean]
        if expert not in known:
            raise ValueError(
                f"expert is {expert!r} for classifier {classifier!r}; known: last, mean, {', '.join(known)}"
            )
        return classifier, expert

    def costs(self) -> tuple[Cost, Cost]:
        """Parameters and multiply-accumulates per image, of the network in training and of the part
        that :meth:`predict` needs by default.
        """
        return self.model.costs(self.image_size, deepest=self.resolve_expert() == ("ncm", str(self.network.experts)))

    # State

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that must be restored to continue exactly: tensors by name, values for JSON.

        The tensors are contiguous copies, each with memory of its own.
        """
        tensors = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }
        return tensors, copy.deepcopy(self.values())

    def save(self, path: str | Path) -> None:
        """Writes the learner to one file (safetensors), from which :func:`mose_fast.load_learner`
        continues exactly, also in the middle of a task.

        Args:
            path: The file; an earlier one is replaced.

        Raises:
            ConfigError: Planned steps were not taken, the method holds what is not part of its
                state (:meth:`keep`), or it could not be found by its name.
            StateFileError: The file cannot be written.
        """
        from mose_fast.learner.saved import save_learner  # which finds methods, and so imports this

        save_learner(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: as if saved and loaded."""
        from mose_fast.learner.saved import class_of, parts, rebuilt

        return rebuilt, (class_of(self), *parts(self))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of :meth:`state` themselves, many of them views of common memory, which the
        next step changes.
        """
        memory = {f"memory/{name}": tensor for name, tensor in self.memory.tensors().items()}
        return self.model.state() | memory | {f"kept/{name}": t for name, t in self._kept.tensors().items()}

    def values(self) -> dict[str, Any]:
        """The values of :meth:`state`."""
        own = {"precision": self.precision.name, "optimiser": self.model.changed_numbers()}
        return self.data.values() | own

    def check_kept(self) -> None:
        """Refuses a method that holds tensors, modules or random generators that are not part of
        its state: a run that is resumed would not have them.

        Raises:
            ConfigError: There is one; the message names the attribute.
        """
        if name := next((name for name, value in self.data.own.items() if not survives_json(value)), None):
            raise ConfigError(
                f"method {self.config.method!r} has {shown(self.data.own[name])} in self.data.own[{name!r}], which a"
                " checkpoint would not give back; wanted numbers, text, lists, and dictionaries with text as keys"
            )
        own = {name: value for name, value in vars(self).items() if name not in (*_OWN, *self._kept)}
        known = [self, *(vars(self)[name] for name in _OWN), *vars(self._model).values()]
        if found := unsaved(own, self.tensors().values(), known):
            path, what = found
            raise ConfigError(
                f"method {self.config.method!r} has a {what} in self.{path}, which is not part of its state, so that a"
                f" resumed run would not have it; wanted self.keep(NAME, TENSOR OR MODULE) in {type(self).__qualname__}"
                ".__init__, plain values in self.data.own, and random numbers of mose_fast.ops.draws"
            )

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restores the result of :meth:`state`. If the configuration leaves the precision open, the
        precision of the state is used from now on.

        Raises:
            ValueError: The state belongs to another network or memory, or to a method that keeps
                other tensors.
        """
        values = dict(values)
        precision = values.pop("precision", self.precision.name)
        if self.config.precision == "auto" and precision != self.precision.name:
            self.precision = Choice(precision, "as the run began")
            # The optimiser may keep copies of the weights in this precision.
            self.model = self.build_model()

        def part(owner: str) -> dict[str, Tensor]:
            return {name.removeprefix(owner): t for name, t in tensors.items() if name.startswith(owner)}

        changed = values.pop("optimiser", [])
        self.model.load({name: t for name, t in tensors.items() if not name.startswith(("memory/", "kept/"))}, changed)
        self.data.load(values, part("memory/"))
        self._kept.load(part("kept/"))
        self.__dict__ |= self._kept.values()
        self._means = None

    def weights_hash(self) -> str:
        """SHA-256 of all weights and running statistics: equal hashes mean bit-equal networks."""
        return self.model.weights_hash()

    def _choose_step(self, wanted: str) -> Choice:
        obstacle = ""
        if self.device.type != "cuda":
            obstacle = f"the device is {self.device}, and CUDA graphs are a card's"
        elif self.planning < Planning.CAPTURED:
            obstacle = f"method {self.config.method!r} {self.not_captured}"
        if wanted == "captured" and obstacle:
            raise ConfigError(f"step is 'captured', but {obstacle}; wanted step 'auto' or 'eager'")
        if not obstacle and "captured" in _loader.off:
            obstacle = f"the self-check of captured steps failed: {_loader.off['captured']}"
        if wanted == "eager" or obstacle:
            return Choice("eager", "" if wanted == "eager" or self.device.type != "cuda" else obstacle)
        return Choice("captured")
