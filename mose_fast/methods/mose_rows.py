"""The rows of a step of MOSE: its plan, and the inputs that the step reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mose_fast.augment import ViewInputs

__all__ = ["Composition", "StepPlan", "StepRows", "StepViews", "Targets"]


class Composition(NamedTuple):
    """Numbers of rows of a step by their origin: the new set is ``incoming`` and ``current``, the
    buffer set ``copies`` and ``old``.
    """

    incoming: int
    current: int
    copies: int
    old: int


class StepPlan(NamedTuple):
    """A step's data, chosen without looking at the model.

    It contains copies of the rows, never slots of the memory, which later plans may overwrite
    before the step is taken.

    Attributes:
        images: uint8 [R, H, W, 3]: the rows of the new set, then those of the buffer set.
        labels: int64 [R].
        composition: Numbers of rows by origin; R is their sum.
        current_classes: bool [K], the current task's classes; None: one cross-entropy over all rows
        and classes.
        sequence: Number of the step among those that draw views.
    """

    images: Tensor
    labels: Tensor
    composition: Composition
    current_classes: Tensor | None
    sequence: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of rows of the new set and of the buffer set."""
        return self.composition.incoming + self.composition.current, self.composition.copies + self.composition.old


class Targets(NamedTuple):
    """What the losses of a step compare its views with: tensors of one shape for every step of a
    kind, once they are padded.

    Attributes:
        labels: int64 [V], by view; 0 for padding.
        new_views: Views of the new set, which come first; an int32 scalar on the device where the
            inputs are padded.
        current_classes: See :class:`StepPlan`.
        valid_views: Views that are not padding, likewise; None where none is.
    """

    labels: Tensor
    new_views: int | Tensor
    current_classes: Tensor | None
    valid_views: Tensor | None


class StepRows(NamedTuple):
    """The inputs of a step that makes its views itself.

    Attributes:
        images: uint8 [R, H, W, 3]; rows beyond those of the plan are padding.
        views: What decides the views; those of padding come last.
        targets: See :class:`Targets`.
    """

    images: Tensor
    views: ViewInputs
    targets: Targets


class StepViews(NamedTuple):
    """The inputs of a step whose views were made before.

    Attributes:
        views: float32 [V, 3, H, W].
        targets: See :class:`Targets`.
    """

    views: Tensor
    targets: Targets
