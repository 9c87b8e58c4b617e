"""Batches between being prepared and their step: each can be taken, and undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from mose_fast.methods.base import Learner

__all__ = ["PlannedBatch", "Prepared", "Rehearsal", "StoredBatch", "ViewsToCome", "WholeBatch"]


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


class Prepared(ABC):
    """A batch that a learner was given and whose step is still to be taken.

    Args:
        learner: Prepares it.
        before: What :meth:`mose_fast.methods.Learner.record` gave before the batch came.
    """

    #: Whether a step belongs to it that may change the model.
    trains = True

    def __init__(self, learner: Learner, before: Any) -> None:
        self.learner = learner
        self._before = before
        self._taken = False

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
        exact = not self._taken or not self.trains or self.learner.changed_nothing_since(self._before)
        self.learner.undo(self._before)
        return exact

    @abstractmethod
    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor] | None: ...

    @abstractmethod
    def describe(self) -> str:
        """How large its step is, for messages."""


class WholeBatch(Prepared):
    """A batch of a learner that does not plan ahead: all is still to do.

    Args:
        learner, before: See :class:`Prepared`.
        arguments: Those of :meth:`mose_fast.methods.Learner.observe`, by name.
    """

    def __init__(self, learner: Learner, before: Any, arguments: dict[str, Any]) -> None:
        super().__init__(learner, before)
        self._arguments = arguments

    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor] | None:
        return self.learner.observe(**self._arguments)

    def describe(self) -> str:
        return f"{len(self._arguments['x'])} incoming rows"


class StoredBatch(Prepared):
    """A batch that was offered to the memory and trains nothing."""

    trains = False

    def _take(self, train_on: Callable[[Any], Any] | None) -> None:
        return None

    def describe(self) -> str:
        return "nothing to train on"


class PlannedBatch(Prepared):
    """A batch whose step is planned: only the step itself is still to do.

    Args:
        learner, before: See :class:`Prepared`.
        plan: From the learner's ``plan``.
        inputs: What the step reads, from the learner's ``inputs``.

    Attributes:
        plan: As given.
        inputs: As given; whoever makes views ahead puts the inputs with views here.
    """

    def __init__(self, learner: Learner, before: Any, plan: Any, inputs: Any) -> None:
        super().__init__(learner, before)
        self.plan, self.inputs = plan, inputs

    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor]:
        self.learner.data.ahead -= 1
        return self.learner.step(self.inputs, train_on)

    def describe(self) -> str:
        return self.learner.describe(self.plan)


class Rehearsal(Prepared):
    """A step on memory slots alone (training on the final memory).

    Args:
        learner, before: See :class:`Prepared`.
        slots: int64 [n].
    """

    def __init__(self, learner: Learner, before: Any, slots: Tensor) -> None:
        super().__init__(learner, before)
        self._slots = slots

    def _take(self, train_on: Callable[[Any], Any] | None) -> dict[str, Tensor]:
        return self.learner.rehearse(self._slots)

    def describe(self) -> str:
        return f"{len(self._slots)} rows of the memory"
