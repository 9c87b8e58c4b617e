"""Batches between being prepared and their step: each can be taken, and undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from mose_fast.learner.data import DataRecord
from mose_fast.learner.hooks import MethodHooks


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


@dataclass(eq=False)
class PlannedStep:
    """A planned step: ``plan`` and ``inputs`` of the learner's functions of these names; ``views``:
    those of inputs that have none yet, where they were made ahead.
    """

    plan: Any
    inputs: Any
    views: Tensor | None = None


@dataclass(eq=False)
class Prepared:
    """A batch whose planned steps are still to be taken.

    Attributes:
        before: The data before it came.
        steps: Its steps; a batch that trains nothing has none.
        stored: Images and slots of a batch that trains nothing and was offered to the memory.
    """

    learner: MethodHooks
    before: DataRecord
    steps: Sequence[PlannedStep] = ()
    stored: tuple[Tensor, Tensor] | None = None
    _taken: bool = field(default=False, init=False)
    # Whether it wrote something without a step.
    _wrote: bool = field(default=False, init=False)
    # Whether the model was frozen after the first of several steps, where the host does not ask.
    _froze_first: Tensor | None = field(default=None, init=False)

    @property
    def trains(self) -> bool:
        return bool(self.steps)

    @property
    def reads(self) -> Sequence:
        """The tensors that were made with the plan and that :meth:`take` reads, in sequences."""
        return [self.stored, *((step.plan, step.inputs) for step in self.steps)]

    def take(self, train_on: Callable[[Any], Any] | None = None) -> dict[str, Tensor] | None:
        """Does the rest of :meth:`mose_fast.methods.Learner.observe`; of several batches, the
        oldest first. ``train_on`` takes planned steps in place of the learner's ``take_step``.

        Returns:
            The losses of its last step by name, as scalars on the learner's device; None where
            nothing was trained.
        """
        self._taken, learner, losses = True, self.learner, None
        if self.stored is not None:
            self._wrote = learner.on_stored(*self.stored)
        for step in self.steps:
            learner.data.ahead -= 1
            losses = learner.step(step.inputs if step.views is None else step.inputs.complete(step.views), train_on)
            if self._froze_first is None and learner.reads_losses_late and len(self.steps) > 1:
                self._froze_first = learner.model.latch.closed.clone()
        return losses

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
        if not self.trains:
            return not self._wrote or learner.diverged
        frozen = self._froze_first is None or bool(self._froze_first)
        return learner.diverged and frozen and (learner.reads_losses_late or learner.steps == self.before.sequence)

    def describe(self) -> str:
        """How large its step is, for messages."""
        return self.learner.describe(self.steps[0].plan) if self.steps else "nothing to train on"


@dataclass(eq=False)
class WholeBatch(Prepared):
    """A batch, or slots of the final memory, of a learner that does not plan ahead: all of it is
    still to do. ``do`` does it; ``size`` describes it.
    """

    do: Callable[[], dict[str, Tensor] | None] = field(kw_only=True)
    size: str = field(kw_only=True)

    trains = True

    def take(self, train_on: Callable[[Any], Any] | None = None) -> dict[str, Tensor] | None:
        self._taken = True
        return self.do()

    def describe(self) -> str:
        return self.size
