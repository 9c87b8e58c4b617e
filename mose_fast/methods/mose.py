"""MOSE: Multi-level Online Sequential Experts (CVPR 2024; mose.md section 5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mose_fast.config import MOSE_PRESETS, ConfigError, MoseOptions, RunConfig
from mose_fast.losses import ExpertLosses
from mose_fast.methods.network import NetworkLearner
from mose_fast.methods.registry import Preset, method
from mose_fast.nn import ExpertNetwork

__all__ = ["Composition", "Mose", "StepPlan"]


class Composition(NamedTuple):
    """Rows of a step by where they come from: the new set is ``incoming`` and ``current``, the buffer set ``copies`` and ``old``."""

    incoming: int
    current: int
    copies: int
    old: int


class StepPlan(NamedTuple):
    """A step's data, chosen without looking at the model.

    Attributes:
        images: uint8 [R, H, W, 3]: the rows of the new set, then those of the buffer set.
        labels: int64 [R].
        composition: How many rows come from where; R is their sum.
        current_classes: bool [K], the current task's classes; None: one cross-entropy over all rows and classes.
        sequence: Number of the step among those that draw views.
    """

    images: Tensor
    labels: Tensor
    composition: Composition
    current_classes: Tensor | None
    sequence: int


@method(
    "mose",
    options=MoseOptions,
    presets={
        "released": Preset("AnAppleCore/MOSE @ c24a0e6", MOSE_PRESETS["released"]),
        "paper": Preset("CVPR 2024, the text taken literally", MOSE_PRESETS["paper"]),
    },
    year=2024,
    reference="Orchestrate Latent Expertise, Yan et al., CVPR 2024",
    cost=5.3,
)
class Mose(NetworkLearner):
    """Nested experts with supervised contrastive loss and cross-entropy each, and reverse self-distillation into the student."""

    uses_shadows = True

    def __init__(self, config: RunConfig, **stream: Any) -> None:
        super().__init__(config, **stream)
        self.losses = ExpertLosses(config.options)

    def build_network(self) -> ExpertNetwork:
        o = self.config.options
        return ExpertNetwork(
            self.classes,
            width=self.config.width,
            experts=o.experts,
            attention=o.attention,
            adapter=o.adapter,
            projection=o.projection,
            student=o.student_index,
            init=o.init,
        )

    def inner_views(self) -> int:
        return self.config.options.inner_views

    def train_batch(self, x: Tensor, y: Tensor) -> dict[str, Tensor] | None:
        plan = self.plan(x, y)
        return None if plan is None else self.step(plan)

    def plan(self, x: Tensor, y: Tensor) -> StepPlan | None:
        """Chooses the rows of the step for an incoming batch; None where the batch trains nothing.

        Args:
            x: uint8 [B, H, W, 3] on the learner's device; y: int64 [B], registered in ``seen`` and ``current``.
        """
        o = self.config.options
        if o.skip_first_batch and self.memory.seen == 0:
            return None
        if o.current_classes == "task":
            if self.task_classes is None:
                raise ConfigError(
                    "options.current_classes is 'task', but the task's classes are unknown; "
                    "wanted begin_task(task, classes=...) before its first batch, or current_classes 'seen'"
                )
            current = self.task_classes
        else:
            current = self.current
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        if self.task == self.first_task and o.first_task == "joint":
            extra, copies, old = self.memory.draw(o.buffer_batch, only=self.task), 0, none
            mask = None
        else:
            extra = self.memory.draw(o.new_extra, only=self.task) if o.new_extra else none
            copies = min(o.buffer_batch * len(current) // len(self.seen), o.buffer_batch, len(x)) if o.incoming_copies else 0
            wanted = o.buffer_batch - copies
            if o.per_class_cap is not None:
                wanted = min(wanted, o.per_class_cap * len(self.seen))
            old = self.memory.draw(wanted, others=self.task) if o.replay_from == "others" else self.memory.draw(wanted)
            mask = torch.zeros(self.classes, dtype=torch.bool, device=self.device)
            mask[torch.tensor(current, device=self.device)] = True
        m = self.memory
        images = torch.cat([x, m.images[extra], x[:copies], m.images[old]])
        labels = torch.cat([y, m.labels[extra], y[:copies], m.labels[old]])
        return StepPlan(images, labels, Composition(len(x), len(extra), copies, len(old)), mask, self.steps)

    def step(self, plan: StepPlan) -> dict[str, Tensor]:
        """One optimiser step; returns the loss and its three parts, each summed over the experts."""
        composition = plan.composition
        sizes = (composition.incoming + composition.current, composition.copies + composition.old)
        views, rows = self.views.make(plan.images, sizes, self.config.seed, plan.sequence)
        labels = plan.labels[rows]
        self.network.train()
        with self.precise():
            outputs = self.run_network(views.contiguous(memory_format=torch.channels_last), self.config.options.distil == "sd")
            terms = self.losses(outputs, labels, sizes[0] * self.views.views_per_row, plan.current_classes)
            loss = terms.sum()
            self.update(loss)
        supcon, cross_entropy, distillation = terms.detach().sum(0)
        return {"loss": loss.detach(), "supcon": supcon, "cross_entropy": cross_entropy, "distillation": distillation}

    def rehearse(self, slots: Tensor) -> dict[str, Tensor]:
        """One step on memory slots alone: they are the buffer set, with one cross-entropy over all classes."""
        images, labels = self.memory.images[slots], self.memory.labels[slots]
        self._means = None
        return self.step(StepPlan(images, labels, Composition(0, 0, 0, len(slots)), None, self.steps))
