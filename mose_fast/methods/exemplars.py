"""What the methods share that were made for offline streams: exemplars of earlier tasks, chosen
when a task ends, and a teacher (docs/specification/baselines.md section 0.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mose_fast.config import knob
from mose_fast.knobs import Search
from mose_fast.memory.exemplars import SELECTIONS, ExemplarMemory
from mose_fast.methods.base import Learner
from mose_fast.methods.replay import BaselineOptions, ReplayLearner

__all__ = ["TEMPERATURES", "ExemplarLearner", "ExemplarOptions", "log_softmax_within"]

#: The range of the distillation's temperature.
TEMPERATURES = Search(1, 8, log=True, source="choice: around the 2 that BiC, CCIL and SS-IL have")


@dataclass(frozen=True)
class ExemplarOptions(BaselineOptions):
    """Switches of methods with exemplars. They replay earlier tasks only, since those of a task are
    chosen when it is over.
    """

    memory_policy: str = knob(
        "exemplars",
        "what the memory keeps",
        "the methods' own papers",
        choices={"exemplars": "equally many of each class, chosen when its task ends"},
    )
    replay_from: str = knob(
        "others", "tasks that replayed rows come from", "the methods' own papers", choices={"others": "earlier ones"}
    )
    selection: str = knob(
        "first", "which images of a class become exemplars", "the methods' own repositories", choices=SELECTIONS
    )
    current_classes: str = knob(
        "seen",
        "classes of the current task",
        "the methods' own repositories: task; for table a choice, since a method need not know classes beforehand",
        choices={"seen": "those seen so far in it", "task": "all of it, known at its start"},
    )


def log_softmax_within(logits: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """The log of the softmax over the classes of a mask.

    Args:
        logits: [N, K].
        classes: bool [K], at least one of them True.
        temperature: What logits are divided by.

    Returns:
        [N, K]; 0 for classes outside the mask.
    """
    logits = (logits / temperature).masked_fill(~classes, -torch.inf)
    return logits.log_softmax(1).masked_fill(~classes, 0)


class ExemplarLearner(ReplayLearner):
    """A learner that replays exemplars of earlier tasks and has a teacher in evaluation mode.

    When a task ends, its exemplars are chosen, then the teacher is taken.
    """

    teacher_mode: ClassVar[str | None] = "eval"
    hides_unseen: ClassVar[bool] = True
    needs_boundaries: ClassVar[str] = "chooses its exemplars and its teacher when a task ends"
    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = Learner.without_boundaries
    memory: ExemplarMemory

    #: Share of a class's exemplars that is held out for validation.
    validation: ClassVar[float] = 0.0

    def build_memory(self) -> ExemplarMemory:
        config = self.config
        return ExemplarMemory(
            config.memory,
            self.image_size,
            selection=config.options.selection,
            validation=self.validation,
            classes=self.classes,
            seed=config.seed,
            device=self.device,
        )

    def begin_task(self, task: int, classes: Sequence[int] | None = None) -> None:
        super().begin_task(task, classes)
        self.data.own["old"] = len(self.seen)

    @property
    def old(self) -> list[int]:
        """The classes that were seen before the current task."""
        return self.seen[: self.data.own["old"]]

    def current(self) -> list[int]:
        """The classes of the current task, by the option ``current_classes``."""
        return self.data.current_classes(self.config.options.current_classes)

    def on_task_end(self) -> None:
        buffer, features = self.memory.buffer, None
        if self.memory.selection == "herding":
            features = self.outputs(buffer.images)[0][-1]
        self.memory.rebuild(self.seen, self.task, features)
        super().on_task_end()
