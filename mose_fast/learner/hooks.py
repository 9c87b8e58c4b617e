"""What a method defines: how its rows are chosen, its network and its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mose_fast.learner.about import About
from mose_fast.learner.data import DataPlane, class_mask
from mose_fast.learner.momentum_teacher import keeps_average
from mose_fast.memory import BalancedMemory, ReplayMemory
from mose_fast.nn import ExpertNetwork
from mose_fast.optim import FlatAdam
from mose_fast.settings.run import RunConfig


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
    #: tensors with fixed addresses, and never waits for the GPU. On a GPU, losses are read only
    #: after later steps were launched.
    CAPTURED = 3


class MethodHooks(ABC):
    """What a method overrides of :class:`mose_fast.methods.Learner`. Four functions have no
    default; :class:`mose_fast.methods.ReplayLearner` defines these for one network and replayed
    rows.
    """

    config: RunConfig
    classes: int
    image_size: tuple[int, int]
    device: torch.device
    #: The replay memory, the tasks and classes seen so far, and the counters.
    data: DataPlane
    kernels: str

    #: How far ahead of training batches can be planned.
    planning: ClassVar[Planning] = Planning.BATCH_BY_BATCH

    #: Why steps are not captured, after "it", where ``planning`` is not ``CAPTURED``.
    not_captured: ClassVar[str] = "does not say that its steps can be captured"

    #: True for the upper bound: the loop presents the stream as a single, shuffled task.
    joint_stream: ClassVar[bool] = False

    #: True if every forward pass in training goes through :meth:`Model.forward`, so that the
    #: optimiser may keep bf16 copies of the weights for it.
    uses_shadows: ClassVar[bool] = False

    #: Why the method cannot do without task boundaries, as the end of a sentence about it; empty if
    #: it can. Such a method refuses a stream of one task.
    needs_boundaries: ClassVar[str] = ""

    #: Whether predictions leave out classes that have not come yet; for methods whose losses never
    #: push the logits of such classes down; the option ``logit_adjustment`` makes it True.
    hides_unseen: bool = False

    #: Why the method's step has no loss of a momentum teacher (``teacher``), and why a moving
    #: average of its weights (``predict_with``, ``pull_back``) would not be that of the network
    #: that it predicts with, each after "it"; empty if it has, or would be.
    not_taught: ClassVar[str] = "takes its steps without a teacher"
    not_averaged: ClassVar[str] = ""

    #: What the method does if the whole stream is one task, as the end of a sentence about it; the
    #: key is a switch and its value that needs task boundaries. docs/methods.md lists these, and a
    #: learner whose options have such a value warns.
    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = {
        ("review", True): "reviews the memory once, at the end of the whole stream",
        ("optimiser_per_task", True): "keeps its moments to the end",
    }

    #: Year, reference, cost and presets; the decorator :func:`mose_fast.methods.method` sets it.
    about: ClassVar[About]

    # What the functions below find here

    @property
    def memory(self) -> ReplayMemory:
        return self.data.memory

    @property
    def task(self) -> int | None:
        """The current task; None before the first."""
        return self.data.task

    @property
    def seen(self) -> list[int]:
        """All labels seen so far, in order of appearance."""
        return self.data.seen

    def mask(self, classes: Iterable[int]) -> Tensor:
        """bool [K] on the device, True for these classes."""
        return class_mask(self.classes, self.device, classes)

    # The data

    def build_memory(self) -> ReplayMemory:
        """Builds the empty replay memory; methods override it to store other things."""
        config = self.config
        balanced = config.options.memory_policy == "balanced"
        kind = partial(BalancedMemory, classes=self.classes) if balanced else ReplayMemory
        return kind(config.memory, self.image_size, seed=config.seed, device=self.device)

    @abstractmethod
    def plan(self, x: Tensor, y: Tensor) -> Any:
        """Chooses the rows of the step for a batch, uint8 [B, H, W, 3] and int64 [B] on the device;
        None if it trains nothing. ``seen`` has its labels, the memory does not have it yet.
        """

    @abstractmethod
    def rehearsal(self, slots: Tensor) -> Any:
        """The plan of a step on memory slots only."""

    def inputs(self, plan: Any, stored: Tensor | None = None) -> Any:
        """The inputs of a plan's step, made when the plan is made; by default the plan itself.

        If steps are captured, they are a tuple of tensors, plain values and such tuples or
        dictionaries. Steps whose tensors have equal shapes and whose plain values are equal share a
        graph. ``stored`` is the result of :meth:`store`, int64 [B], if this is the batch's last
        step and it was stored before.
        """
        return plan

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Offers a batch with its positions in the stream, int64 [B], to the memory after its step.
        Returns int64 [B]: the slot of each item now, -1 if it was not stored.
        """
        return self.memory.insert(x, y, self.task, index)

    def on_stored(self, x: Tensor, slots: Tensor) -> bool:
        """Called for images that were stored in slots and train nothing, in their turn among the
        steps. Returns whether anything has changed.
        """
        return False

    def describe(self, plan: Any) -> str:
        """Describes the size of a plan's step, for messages."""
        return "a plan of its own"

    # The model

    @abstractmethod
    def build_network(self) -> ExpertNetwork:
        """Builds the untrained network; PyTorch's random state was set from the weights' seed."""

    def build_optimiser(self, network: ExpertNetwork) -> torch.optim.Optimizer:
        """Builds the optimiser of all parameters of the network."""
        o = self.config.options
        settings = {"lr": o.lr, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": o.weight_decay}
        if self.kernels == "fused":
            shadow_dtype = torch.bfloat16 if self.shadowed else None
            average_rate = o.teacher_rate if keeps_average(o) else None
            return FlatAdam(network.parameters(), **settings, shadow_dtype=shadow_dtype, average_rate=average_rate)
        # PyTorch's fused optimisers can skip a step without the host knowing.
        how = {"fused": True, "capturable": True} if self.reads_losses_late else {}
        return torch.optim.Adam(network.parameters(), **settings, **how)

    def train_batch(self, x: Tensor, y: Tensor) -> dict[str, Tensor] | None:
        """Takes one of the ``iterations`` on a batch, as for :meth:`plan`: by default one step."""
        plan = self.plan(x, y)
        return None if plan is None else self.step(self.inputs(plan))

    @abstractmethod
    def train_on(self, inputs: Any) -> dict[str, Tensor]:
        """Takes one training step on the result of :meth:`inputs`: views, forward pass, losses,
        backward pass and optimiser. Returns the losses by name, scalars on the device; the first
        is the minimised one, as :meth:`Model.minimise` returns it.
        """

    def on_task_end(self) -> None:
        """Called at the end of a task, when all planned steps were taken; by default the review,
        where the options have it. Methods that train here call :meth:`after_step` after every step.
        """
        if self.config.options.review and self.config.train_on != "final_memory":
            self.review()

    def prepare_evaluation(self) -> None:  # noqa: B027 - most methods are ready at any time
        """Called before every evaluation and prediction; methods that train only when asked do it
        here, and call :meth:`after_step` after every step. Calling it again changes nothing.
        """

    # What fits, asked before there is a learner

    @classmethod
    def views_at_once(cls, config: RunConfig) -> int:
        """Views in training's largest forward pass, to estimate what fits; 0 where they are few."""
        return 0

    @classmethod
    def statistics_bytes(cls, config: RunConfig, classes: int) -> int:
        """Bytes kept of each class beside images, to estimate what fits; 0 where they are few."""
        return 0

    @classmethod
    def images_kept(cls, config: RunConfig, tasks: Sequence[tuple[int, int]]) -> int:
        """The most images that a learner keeps from one batch to the next, for tasks of so many
        equally large classes of their own, and of so many images.
        """
        return min(config.memory, sum(images for _, images in tasks))
