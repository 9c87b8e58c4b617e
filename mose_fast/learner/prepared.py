"""Batches between being prepared and their step: each can be taken, and undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mose_fast.learner.data import DataPlane, DataRecord
from mose_fast.learner.model import Model

__all__ = ["PlannedBatch", "PlannedStep", "Prepared", "StoredBatch", "ViewsToCome", "WholeBatch"]


class ViewsToCome(NamedTuple):
    """Inputs of a step whose views may be made on another thread, by ``make``, which reads nothing
    but the plan and what never changes. ``kind`` makes of views and ``targets``, a tuple of what
    the step reads beside them, the inputs as ``train_on`` wants them.
    """

    make: Callable[[], Tensor]
    kind: Callable[[Tensor, Any], Any]
    targets: Any

    def complete(self, views: Tensor) -> Any:
        """The inputs with their views."""
        return self.kind(views, self.targets)


class Taker(Protocol):
    """What a prepared batch needs of its learner."""

    data: DataPlane
    model: Model
    diverged: bool
    reads_losses_late: bool
    steps: int

    def step(self, inputs: Any, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor]: ...
    def undo(self, record: DataRecord) -> None: ...
    def on_stored(self, x: Tensor, slots: Tensor) -> bool: ...
    def describe(self, plan: Any) -> str: ...


@dataclass(eq=False)
class PlannedStep:
    """A planned step: ``plan`` and ``inputs`` of the learner's functions of these names; ``views``:
    those of inputs that have none yet, where they were made ahead.
    """

    plan: Any
    inputs: Any
    views: Tensor | None = None


@dataclass(eq=False)
class Prepared(ABC):
    """A batch whose planned steps are still to be taken; ``before``: the data before it came."""

    learner: Taker
    before: DataRecord
    steps: Sequence[PlannedStep] = field(default=(), kw_only=True)
    _taken: bool = field(default=False, init=False)

    def take(self, train_on: Callable[[Any], Any] | None = None) -> dict[str, Tensor] | None:
        """Does the rest of :meth:`mose_fast.methods.Learner.observe`; of several batches, the
        oldest first.

        Args:
            train_on: Takes planned steps in place of the learner's ``train_on``.

        Returns:
            The losses of its last step by name, as scalars on the learner's device; None where
            nothing was trained.
        """
        self._taken = True
        return self._take(train_on)

    def undo(self) -> bool:
        """Undoes the batch; of several, the newest first.

        Returns:
            Whether all is as before the batch. After its steps that is so only if they changed
            nothing: the first one's loss was not finite, and this was seen before any weight
            changed.
        """
        exact = not self._taken or self._changed_nothing()
        self.learner.undo(self.before)
        return exact

    def _changed_nothing(self) -> bool:
        learner = self.learner
        return learner.diverged and (learner.reads_losses_late or learner.steps == self.before.sequence)

    @property
    def reads(self) -> Sequence:
        """The tensors that were made with the plan and that :meth:`take` reads, in sequences."""
        return [(step.plan, step.inputs) for step in self.steps]

    @abstractmethod
    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor] | None: ...

    @abstractmethod
    def describe(self) -> str:
        """How large its step is, for messages."""


@dataclass(eq=False)
class WholeBatch(Prepared):
    """A batch, or slots of the final memory, of a learner that does not plan ahead: all of it is
    still to do. ``do`` does it; ``size`` describes it.
    """

    do: Callable[[], dict[str, Tensor] | None]
    size: str

    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor] | None:
        return self.do()

    def describe(self) -> str:
        return self.size


@dataclass(eq=False)
class StoredBatch(Prepared):
    """A batch of images ``x`` that trains nothing, in memory ``slots``; None: not offered."""

    x: Tensor
    slots: Tensor | None
    _wrote: bool = field(default=False, init=False)

    @property
    def reads(self) -> Sequence:
        return self.x, self.slots

    def _take(self, train_on: Callable[[Any], Any] | None) -> None:
        self._wrote = self.slots is not None and self.learner.on_stored(self.x, self.slots)

    def _changed_nothing(self) -> bool:
        return not self._wrote or self.learner.diverged

    def describe(self) -> str:
        return "nothing to train on"


@dataclass(eq=False)
class PlannedBatch(Prepared):
    """A batch whose steps are planned: only the steps themselves are still to do."""

    #: Whether the model was frozen after the first of several steps, where the host does not ask.
    _froze_first: Tensor | None = field(default=None, init=False)

    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor]:
        learner = self.learner
        for step in self.steps:
            learner.data.ahead -= 1
            inputs = step.inputs if step.views is None else step.inputs.complete(step.views)
            losses = learner.step(inputs, train_on)
            if self._froze_first is None and learner.reads_losses_late and len(self.steps) > 1:
                self._froze_first = learner.model.latch.closed.clone()
        return losses

    def _changed_nothing(self) -> bool:
        return super()._changed_nothing() and (self._froze_first is None or bool(self._froze_first))

    def describe(self) -> str:
        return self.learner.describe(self.steps[0].plan)
