"""Batches between being prepared and their step: each can be taken, and undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mose_fast.methods.data import DataRecord

if TYPE_CHECKING:
    from mose_fast.methods.base import Learner

__all__ = ["PlannedBatch", "Prepared", "StoredBatch", "ViewsToCome", "WholeBatch"]


class ViewsToCome(NamedTuple):
    """Inputs of a step whose views may be made on another thread before the step.

    Attributes:
        make: Gives the views. It reads nothing but the plan and what never changes.
        kind: Makes of views and ``targets`` the inputs as ``train_on`` wants them.
        targets: What the step reads beside its views, a tuple.
    """

    make: Callable[[], Tensor]
    kind: Callable[[Tensor, Any], Any]
    targets: Any

    def complete(self, views: Tensor) -> Any:
        """The inputs with their views."""
        return self.kind(views, self.targets)


@dataclass(eq=False)
class Prepared(ABC):
    """A batch that a learner was given and whose step is still to be taken.

    Attributes:
        learner: The learner.
        before: Its data plane before the batch came.
    """

    learner: Learner
    before: DataRecord
    _taken: bool = field(default=False, init=False)

    def take(self, train_on: Callable[[Any], Any] | None = None) -> dict[str, Tensor] | None:
        """Does the rest of :meth:`mose_fast.methods.Learner.observe`; of several batches, the
        oldest first.

        Args:
            train_on: Takes the step of a planned batch in place of the learner's ``train_on``.

        Returns:
            The step's losses by name, as scalars on the learner's device; None where nothing was
            trained.
        """
        self._taken = True
        return self._take(train_on)

    def undo(self) -> bool:
        """Undoes the batch; of several, the newest first.

        Returns:
            Whether all is as before the batch. After a step that is so only if the step changed
            nothing: its loss was not finite, and this was seen before any weight changed.
        """
        exact = not self._taken or self._changed_nothing()
        self.learner.undo(self.before)
        return exact

    def _changed_nothing(self) -> bool:
        learner = self.learner
        return learner.diverged and (learner.reads_losses_late or learner.steps == self.before.sequence)

    @property
    def reads(self) -> tuple:
        """The tensors that were made with the plan and that :meth:`take` reads, in any tuples."""
        return ()

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
    """A batch that trains nothing.

    Attributes:
        x: Its images.
        slots: Where they were stored, from the learner's ``store``; None if they were not offered.
    """

    x: Tensor
    slots: Tensor | None
    _wrote: bool = field(default=False, init=False)

    @property
    def reads(self) -> tuple:
        return self.x, self.slots

    def _take(self, train_on: Callable[[Any], Any] | None) -> None:
        self._wrote = self.slots is not None and self.learner.on_stored(self.x, self.slots)

    def _changed_nothing(self) -> bool:
        return not self._wrote or self.learner.diverged

    def describe(self) -> str:
        return "nothing to train on"


@dataclass(eq=False)
class PlannedBatch(Prepared):
    """A batch whose step is planned: only the step itself is still to do.

    Attributes:
        plan: From the learner's ``plan``.
        inputs: From the learner's ``inputs``; whoever makes views ahead puts the inputs with their
            views here.
    """

    plan: Any
    inputs: Any

    @property
    def reads(self) -> tuple:
        return self.plan, self.inputs

    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor]:
        self.learner.data.ahead -= 1
        return self.learner.step(self.inputs, train_on)

    def describe(self) -> str:
        return self.learner.describe(self.plan)
