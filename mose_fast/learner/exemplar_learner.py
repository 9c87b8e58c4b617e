"""What the methods share that were made for offline streams: exemplars of earlier tasks, chosen
when a task ends, and a teacher (docs/specification/baselines.md section 0.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mose_fast.learner.learner import Learner
from mose_fast.learner.replay_learner import BaselineOptions, ReplayLearner
from mose_fast.memory.exemplars import HERDINGS, SELECTIONS, ExemplarMemory
from mose_fast.settings.knob import Search
from mose_fast.settings.run import CURRENT_CLASSES, RunConfig, knob

#: The range of the distillation's temperature.
TEMPERATURES = Search(1, 8, log=True, source="choice: around the 2 that BiC, CCIL and SS-IL have")

#: Source of ``replay_loss`` where a method's repository has new and old images in one batch.
REPLAY_LOSS_SOURCE = (
    "choice, as ER: of 10 new and 64 old rows one mean is almost all replay; repository: one_mean, of batches that"
    " are mostly new"
)


@dataclass(frozen=True)
class ExemplarOptions(BaselineOptions):
    """Switches of methods with exemplars, which are chosen at the end of their task."""

    memory_policy: str = knob(
        "exemplars",
        "what the memory keeps",
        "the methods' own papers",
        choices={"exemplars": "equally many of each class, chosen when its task ends"},
    )
    replay_from: str = BaselineOptions.again(
        "replay_from",
        "others",
        "the methods' own repositories; docs/specification/baselines.md section 0.3",
        choices={
            "others": "earlier ones",
            "all": "the current one too: of each of its classes as many images as it would have exemplars",
        },
    )
    selection: str = knob(
        "first", "which images of a class become exemplars", "the methods' own repositories", choices=SELECTIONS
    )
    current_classes: str = knob(
        "seen",
        "classes of the current task",
        "the methods' own repositories: task; for table a choice, since a method need not know classes beforehand",
        choices=CURRENT_CLASSES,
    )
    task_images: str = knob(
        "beside",
        "where images of the current task wait until exemplars are chosen",
        "choice (docs/specification/baselines.md section 0.3)",
        choices={
            "beside": "beside the memory, as many as the method needs",
            "within": "in slots of the memory, which old classes give up",
        },
    )


def log_softmax_within(logits: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """The log of the softmax of logits [N, K] / ``temperature`` over the classes of a mask bool
    [K], which must not be empty: [N, K], 0 for classes outside it.
    """
    logits = (logits / temperature).masked_fill(~classes, -torch.inf)
    return logits.log_softmax(1).masked_fill(~classes, 0)


class ExemplarLearner(ReplayLearner):
    """A learner that replays exemplars of earlier tasks and has a teacher in evaluation mode. When
    a task ends, its exemplars are chosen, then the teacher is taken.
    """

    teacher_mode = "eval"
    hides_unseen = True
    needs_boundaries = "chooses its exemplars and its teacher when a task ends"
    without_boundaries = Learner.without_boundaries
    memory: ExemplarMemory

    #: Share of a class's exemplars that is held out for validation, if the stream is trained on.
    validation: ClassVar[float] = 0.0

    #: Whether the method needs every image of a task when it ends.
    needs_task: ClassVar[bool] = False

    @classmethod
    def images_kept(cls, config: RunConfig, tasks: Sequence[tuple[int, int]]) -> int:
        o, slots, most, before, came = config.options, config.memory, 0, 0, 0
        for classes, images in tasks:
            share, more = divmod(slots, before + classes)  # the first classes seen have one more
            room = classes * share + min(max(more - before, 0), classes)
            waiting = images if cls.needs_task or o.selection in HERDINGS else min(images, room)
            most, before, came = max(most, min(slots, came) + waiting), before + classes, came + images
        return most if o.task_images == "beside" else min(slots, came)

    def build_memory(self) -> ExemplarMemory:
        config, o = self.config, self.config.options
        return ExemplarMemory(
            config.memory,
            self.image_size,
            selection=o.selection,
            validation=self.validation if config.train_on == "stream" else 0.0,
            whole=self.needs_task,
            within=o.task_images == "within",
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

    def known(self) -> list[int]:
        """The classes that share the memory, in order: those seen or known to come in this task."""
        return self.data.known_classes(self.config.options.current_classes)

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """``current``, ``old``, ``known``: bool [K], the classes of the task, those before it, and
        both; ``distils``: whether there is a teacher to follow. Rows of memory alone are only
        classified: each mask has all classes seen.
        """
        current, old = (self.current(), self.old) if sizes[0] else (self.seen, self.seen)
        masks = {"current": self.mask(current), "old": self.mask(old), "known": self.mask({*old, *current})}
        return {**masks, "distils": sizes[0] > 0 and bool(old)}

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        o = self.config.options
        # In the first task there is nothing to keep: its rows are told apart as they come.
        if o.replay_from == "all" and self.old:
            return self.memory.draw_all(o.buffer_batch, self.known())
        return super().retrieve(x, y)

    def held_out(self) -> list[bool]:
        """Whether each image of the batch that came last is kept from training; by default none."""
        return [False] * len(self.data.incoming)

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        on_host = {"classes": torch.tensor(self.data.incoming), "held_out": torch.tensor(self.held_out())}
        return self.memory.insert(x, y, self.task, index, known=self.known(), **on_host)

    def on_task_end(self) -> None:
        buffer, features = self.memory.buffer, None
        if self.memory.selection in HERDINGS:
            features = self.outputs(buffer.images)[0][-1]
        self.memory.rebuild(self.seen, self.task, features)
        super().on_task_end()
