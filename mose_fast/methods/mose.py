"""MOSE: Multi-level Online Sequential Experts (CVPR 2024; docs/specification/mose.md section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mose_fast.augment.views import padded
from mose_fast.device import upload
from mose_fast.learner.base import Learner, Planning, class_mask
from mose_fast.learner.prepared import ViewsToCome
from mose_fast.learner.registry import Preset, method
from mose_fast.losses import ExpertLosses
from mose_fast.methods.mose_rows import Composition, StepPlan, StepRows, StepViews, Targets
from mose_fast.nn import ExpertNetwork
from mose_fast.settings.run import MOSE_PRESETS, MoseOptions, RunConfig

__all__ = ["Mose"]

_PARTS = ("contrastive", "cross_entropy", "distillation")


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
class Mose(Learner):
    """Nested experts with supervised contrastive loss and cross-entropy each, and reverse
    self-distillation into the student.
    """

    planning: ClassVar[Planning] = Planning.CAPTURED
    uses_shadows: ClassVar[bool] = True
    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = {
        (
            "first_task",
            "joint",
        ): "trains as in the first task to the end: one set of rows, one cross-entropy over all classes",
        ("replay_from", "others"): "has no row of an old class in its buffer set",
        **Learner.without_boundaries,
    }

    def __init__(self, config: RunConfig, **stream: Any) -> None:
        super().__init__(config, **stream)
        self.losses = ExpertLosses(config.options)
        if self.shadowed:
            self.views.dtype = torch.bfloat16  # as the network reads them
        # A new one is made only where the classes have changed, and none is ever written to again.
        self._mask_of = lru_cache(maxsize=1)(partial(class_mask, self.classes, self.device))

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

    def plan(self, x: Tensor, y: Tensor) -> StepPlan | None:
        o = self.config.options
        if o.skip_first_batch and self.memory.seen == 0:
            return None
        current = self.data.current_classes(o.current_classes)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        if self.task == self.data.first_task and o.first_task == "joint":
            extra, copies, old = self.memory.draw(o.buffer_batch, only=self.task), 0, none
            mask = None
        else:
            extra = self.memory.draw(o.new_extra, only=self.task) if o.new_extra else none
            copies = (
                min(o.buffer_batch * len(current) // len(self.seen), o.buffer_batch, len(x)) if o.incoming_copies else 0
            )
            wanted = o.buffer_batch - copies
            if o.per_class_cap is not None:
                wanted = min(wanted, o.per_class_cap * len(self.seen))
            old = self.memory.draw(wanted, others=self.task) if o.replay_from == "others" else self.memory.draw(wanted)
            mask = self._mask_of(tuple(current))
        m = self.memory
        images = torch.cat([x, m.images[extra], x[:copies], m.images[old]])
        labels = torch.cat([y, m.labels[extra], y[:copies], m.labels[old]])
        return StepPlan(images, labels, Composition(len(x), len(extra), copies, len(old)), mask, self.data.sequence)

    def rehearsal(self, slots: Tensor) -> StepPlan:
        """A step on memory slots: they are the buffer set, with one cross-entropy over all
        classes.
        """
        images, labels = self.memory.images[slots], self.memory.labels[slots]
        return StepPlan(images, labels, Composition(0, 0, 0, len(slots)), None, self.data.sequence)

    def describe(self, plan: StepPlan) -> str:
        rows = plan.composition
        return (
            f"{rows.incoming} incoming, {rows.current} current, {rows.copies} copied and {rows.old} old rows, "
            f"{sum(rows) * self.views.views_per_row} views"
        )

    def inputs(self, plan: StepPlan, stored: Tensor | None = None) -> StepRows | StepViews | ViewsToCome:
        """The inputs of a plan's step; padded on a card, so that steps share a graph."""
        if not self.reads_losses_late:
            return self.step_inputs(plan)
        return self.step_inputs(plan, self.padded_rows(plan), ready=not self.views.capturable)

    def step_inputs(
        self, plan: StepPlan, rows: int | None = None, *, ready: bool = False
    ) -> StepRows | StepViews | ViewsToCome:
        """The inputs of a plan's step. Nothing is drawn here, so that the same plan always gives
        the same step.

        Args:
            plan: The result of :meth:`plan`.
            rows: Pad to this many rows, so that steps of different sizes have inputs of the same
                shapes; None: no padding.
            ready: Make the views here, for a feed that cannot be captured, unless they are made on
                a thread of their own.
        """
        sizes, count = plan.sizes, len(plan.labels) if rows is None else rows
        labels = padded(plan.labels, count)[self.views.shown(sizes, count, self.device)]
        per_row = self.views.views_per_row
        new_views, valid_views = sizes[0] * per_row, None
        if rows is not None:
            counts = torch.tensor([new_views, sum(sizes) * per_row], dtype=torch.int32)
            new_views, valid_views = upload(counts, self.device).unbind()
        targets = Targets(labels, new_views, plan.current_classes, valid_views)
        if self.views.apart:
            return ViewsToCome(partial(self.make_views, plan, rows), StepViews, targets)
        if ready:
            return StepViews(self.make_views(plan, rows), targets)
        images = padded(plan.images, count)
        return StepRows(images, self.views.inputs(images, sizes, self.config.seed, plan.sequence), targets)

    def make_views(self, plan: StepPlan, rows: int | None = None) -> Tensor:
        """The views of a plan's step, float32 [V, 3, H, W], of as many rows as :meth:`step_inputs`
        was asked for.
        """
        return self.views.views(plan.images, plan.sizes, self.config.seed, plan.sequence, rows)

    def padded_rows(self, plan: StepPlan) -> int | None:
        """Rows that a step of this kind has at most, to which a captured step pads; None where it
        cannot be padded.

        Padding needs norms that leave the padded rows out, and a batch no larger than the stream's.
        Steps on rows of the memory alone have one size and need no padding.
        """
        if not plan.composition.incoming:
            return None
        o = self.config.options
        rows = self.config.stream.batch + o.buffer_batch + (0 if plan.current_classes is None else o.new_extra)
        return rows if self.kernels == "fused" and len(plan.images) <= rows else None

    def train_on(self, inputs: StepRows | StepViews) -> dict[str, Tensor]:
        """Views, forward, losses, backward and optimiser: all that a captured step captures.

        Returns:
            The loss and its three parts, each summed over the experts, float32 scalars. Once the
            run has diverged, the loss is NaN or infinite in every step.
        """
        rows, targets = isinstance(inputs, StepRows), inputs.targets
        views = self.views.apply(inputs.images, inputs.views) if rows else inputs.views
        self.network.train()
        with self.model.step():
            # PyTorch's own norms count padding rows.
            padded = {} if targets.valid_views is None else {"valid_rows": targets.valid_views}
            views = views.contiguous(memory_format=torch.channels_last)
            outputs = self.model.forward(views, self.config.options.distillation == "sd", **padded)
            terms = self.losses(outputs, *targets)
            reported = self.model.minimise(terms.sum())
        return {"loss": reported, **dict(zip(_PARTS, terms.detach().sum(0).unbind(), strict=True))}
