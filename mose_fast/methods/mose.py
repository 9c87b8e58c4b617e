"""MOSE: Multi-level Online Sequential Experts (CVPR 2024; docs/specification/mose.md section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mose_fast.augment import ViewInputs
from mose_fast.augment.views import padded
from mose_fast.device import upload
from mose_fast.learner.about import Preset, Search, knob
from mose_fast.learner.data import class_mask
from mose_fast.learner.hooks import Planning
from mose_fast.learner.learner import Learner
from mose_fast.learner.prepared import ViewsToCome
from mose_fast.learner.registry import method
from mose_fast.losses import ExpertLosses, distillation
from mose_fast.nn import ExpertNetwork, ExpertOutputs
from mose_fast.settings.knob import documented
from mose_fast.settings.run import (
    CONTRASTIVE_TEMPERATURES,
    CURRENT_CLASSES,
    REPLAY_FROM,
    BeyondOptions,
    ConfigError,
    RunConfig,
)

_PARTS = ("contrastive", "cross_entropy", "distillation")


@documented
@dataclass(frozen=True)
class MoseOptions(BeyondOptions):
    """Every switch of MOSE; defaults: preset ``released``; paper: :data:`MOSE_PRESETS`."""

    # The network
    experts: int = knob(
        4, "branch points, 1 to 8; 4: after each residual stage", "paper 4.1; released; code's history", low=1, below=9
    )
    attention: bool = knob(
        True, "attention gate before the alignment of every expert but the last", "only in the released code"
    )
    adapter: bool = knob(True, "Linear(D, D) on the student's feature before distillation", "only in the released code")
    projection: int = knob(128, "width of the contrastive projection", "paper, appendix; released", low=1)

    # The losses
    cross_entropy: str = knob(
        "all", "experts with cross-entropy", "paper, ablation table", choices=("off", "last", "all")
    )
    contrastive: str = knob(
        "all", "experts with supervised contrastive loss", "paper, ablation table", choices=("off", "last", "all")
    )
    distillation: str = knob(
        "rsd",
        "distillation between experts",
        "paper 4.2 and table SD vs. RSD",
        choices={"rsd": "the experts teach the student", "sd": "the student teaches them", "off": ""},
    )
    student: int | None = knob(
        None,
        "expert that is distilled into, from 1",
        "paper, appendix on RSD variations",
        low=1,
        below=9,
        none="the deepest",
    )
    rsd_reduction: str = knob(
        "frobenius",
        "norm of the distillation's differences",
        "released: one norm; paper: eq. RSD averages",
        choices={"frobenius": "one norm of the whole batch's difference", "mean_of_norms": "per image, averaged"},
    )
    separate_cross_entropy: bool = knob(
        True,
        "new rows use only the current task's classes; false: one cross-entropy over all rows and classes",
        "paper, eq. new CE; released",
    )
    buffer_weight: float = knob(
        2.0,
        "weight of the buffer rows' cross-entropy",
        "released: 2; paper: 1",
        low=0,
        search=Search(0.5, 8, log=True, source="choice: around the paper's 1 and the released 2"),
    )
    temperature: float = knob(
        0.07, "temperature of the contrastive loss", "released; SCR", above=0, search=CONTRASTIVE_TEMPERATURES
    )

    # The composition of a step
    new_extra: int = knob(
        22,
        "rows of the current task drawn from memory into the new set, at most",
        "released: 64 / 2 - 10; paper: none",
        low=0,
    )
    incoming_copies: bool = knob(
        True, "part of the incoming rows is repeated in the buffer set", "released; paper: memory only"
    )
    replay_from: str = knob(
        "others", "tasks that buffer rows come from", "released: others; paper: the memory", choices=REPLAY_FROM
    )
    per_class_cap: int | None = knob(
        7, "old rows for each class seen so far, at most", "released: 7; paper: none", low=1, none="no cap"
    )
    first_task: str = knob(
        "joint",
        "task 0",
        "released: joint; paper: same",
        choices={
            "joint": "memory rows join the new set and one cross-entropy covers all classes",
            "same": "as later tasks",
        },
    )
    skip_first_batch: bool = knob(
        True,
        "the first batch of the stream only enters the memory",
        "released (its memory is empty then); paper: trained on",
    )
    current_classes: str = knob(
        "seen", "classes of the current task", "released: seen; paper: C^t", choices=CURRENT_CLASSES
    )
    inner_views: int = knob(
        2,
        "fixed copies of every row",
        "released: 2; the paper describes 4 and doubles: 2",
        choices={1: "", 2: "mirror", 4: "each half mirrored or not", 16: "and quarter turns"},
    )

    # The classifier of predict()
    expert: str = knob(
        "last",
        "expert that predict() uses: last | 1 ... experts | mean (over all experts) | all (their features together)",
        "paper: MOSE is the last expert, MOE-MOSE the mean",
        pattern="last|mean|all|[1-8]",
        wanted="last, mean, all, or an expert from 1 to 8",
        cost=False,
    )
    mean_of_experts: str = knob(
        "distance",
        "what the mean of experts averages with classifier ncm or linear",
        "released: distance; paper 4.2: logits",
        choices={"distance": "squared, to class means", "logit": ""},
        cost=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student", "expert"):
            value = getattr(self, name)
            if str(value).isdigit() and int(value) > self.experts:
                raise ConfigError(f"options.{name} is {value!r}; wanted at most options.experts, {self.experts}")
        if self.expert == "all" and (self.experts == 1 or self.classifier in ("linear", "adjusted")):
            raise ConfigError(
                f"options.expert is 'all' with options.classifier {self.classifier!r} and options.experts"
                f" {self.experts}; wanted a classifier that reads features, and several experts"
            )
        if self.cross_entropy == "off" and self.contrastive == "off":
            raise ConfigError(
                "options.cross_entropy and options.contrastive are both 'off'; wanted at least one loss to train with"
            )

    @property
    def student_index(self) -> int:
        """The student's position among the experts, from 0."""
        return (self.student or self.experts) - 1


#: What each preset sets differently from :class:`MoseOptions`' defaults.
MOSE_PRESETS: dict[str, dict[str, Any]] = {
    "released": {},
    "paper": {
        "attention": False,
        "adapter": False,
        "rsd_reduction": "mean_of_norms",
        "buffer_weight": 1.0,
        "new_extra": 0,
        "incoming_copies": False,
        "replay_from": "all",
        "per_class_cap": None,
        "first_task": "same",
        "skip_first_batch": False,
        "current_classes": "task",
        "augment": "simclr",
        "mean_of_experts": "logit",
    },
    "mose+": {"classifier": "lda_adjusted", "expert": "mean"},
    "mose++": {
        "classifier": "lda_adjusted",
        "expert": "mean",
        "teacher": "momentum",
        "teacher_raw": True,
        "predict_with": "mean",
    },
}


class Composition(NamedTuple):
    """Numbers of rows of a step by their origin: the new set is ``incoming`` and ``current``, the
    buffer set ``copies`` and ``old``.
    """

    incoming: int
    current: int
    copies: int
    old: int


class StepPlan(NamedTuple):
    """A step's data, chosen without looking at the model; copies, since later plans may overwrite
    slots of the memory before the step is taken.

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
    """What the losses of a step compare its views with; padded, its tensors have one shape for
    every step of a kind.

    Attributes:
        labels: int64 [V], by view; 0 for padding.
        new_views: Views of the new set, which come first; padded, an int32 scalar on the device.
        current_classes: See :class:`StepPlan`.
        valid_views: Views that are not padding, likewise; None where none is.
    """

    labels: Tensor
    new_views: int | Tensor
    current_classes: Tensor | None
    valid_views: Tensor | None


class StepRows(NamedTuple):
    """The inputs of a step that makes its views itself: images uint8 [R, H, W, 3], of which those
    beyond the plan's are padding, and what decides the views; those of padding come last.
    """

    images: Tensor
    views: ViewInputs
    targets: Targets


class StepViews(NamedTuple):
    """The inputs of a step whose views, float32 [V, 3, H, W], were made before."""

    views: Tensor
    targets: Targets


@method(
    "mose",
    options=MoseOptions,
    presets={
        "released": Preset("AnAppleCore/MOSE @ c24a0e6", MOSE_PRESETS["released"]),
        "paper": Preset("CVPR 2024, the text taken literally", MOSE_PRESETS["paper"]),
        "mose+": Preset("docs/beyond.md: the best at the cost of `released`", MOSE_PRESETS["mose+"]),
        "mose++": Preset("docs/beyond.md: the best of one step a batch at up to twice that", MOSE_PRESETS["mose++"]),
    },
    year=2024,
    reference="Orchestrate Latent Expertise, Yan et al., CVPR 2024",
    cost=5.3,
)
class Mose(Learner):
    """Nested experts with supervised contrastive loss and cross-entropy each, and reverse
    self-distillation into the student.
    """

    planning = Planning.CAPTURED
    uses_shadows = True
    not_taught = ""
    without_boundaries = {
        ("first_task", "joint"): (
            "trains as in the first task to the end: one set of rows, one cross-entropy over all classes"
        ),
        ("replay_from", "others"): "has no row of an old class in its buffer set",
    } | Learner.without_boundaries

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
            share = o.buffer_batch * len(current) // len(self.seen) if o.incoming_copies else 0
            copies = min(share, o.buffer_batch, len(x))
            wanted = o.buffer_batch - copies
            if o.per_class_cap is not None:
                wanted = min(wanted, o.per_class_cap * len(self.seen))
            old = self.memory.draw(wanted, others=self.task if o.replay_from == "others" else None)
            mask = self._mask_of(tuple(current))
        m = self.memory
        images = torch.cat([x, m.images[extra], x[:copies], m.images[old]])
        labels = torch.cat([y, m.labels[extra], y[:copies], m.labels[old]])
        return StepPlan(images, labels, Composition(len(x), len(extra), copies, len(old)), mask, self.data.sequence)

    def rehearsal(self, slots: Tensor) -> StepPlan:
        """A step on memory slots: the buffer set, with one cross-entropy over all classes."""
        images, labels = self.memory.images[slots], self.memory.labels[slots]
        return StepPlan(images, labels, Composition(0, 0, 0, len(slots)), None, self.data.sequence)

    def describe(self, plan: StepPlan) -> str:
        rows = plan.composition
        return (
            f"{rows.incoming} incoming, {rows.current} current, {rows.copies} copied and {rows.old} old rows, "
            f"{sum(rows) * self.views.views_per_row} views"
        )

    def inputs(self, plan: StepPlan, stored: Tensor | None = None) -> StepRows | StepViews | ViewsToCome:
        """The inputs of a plan's step; padded on a GPU, so that steps share a graph."""
        if not self.reads_losses_late:
            return self.step_inputs(plan)
        return self.step_inputs(plan, self.padded_rows(plan), ready=not self.views.capturable)

    def step_inputs(
        self, plan: StepPlan, rows: int | None = None, *, ready: bool = False
    ) -> StepRows | StepViews | ViewsToCome:
        """The inputs of a plan's step. Nothing is drawn here, so that the same plan always gives
        the same step.

        Args:
            rows: Pad to this many rows, so that steps of all sizes have inputs of the same shapes.
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
        """A step's views, float32 [V, 3, H, W], of the rows that :meth:`step_inputs` wants."""
        return self.views.views(plan.images, plan.sizes, self.config.seed, plan.sequence, rows)

    def padded_rows(self, plan: StepPlan) -> int | None:
        """Rows that a step of this kind has at most, to which a captured step pads; None where it
        cannot be padded: that needs norms that leave padded rows out, and a batch no larger than
        the stream's. Steps on rows of the memory alone have one size and need no padding.
        """
        if not plan.composition.incoming:
            return None
        o = self.config.options
        rows = self.config.stream.batch + o.buffer_batch + (0 if plan.current_classes is None else o.new_extra)
        return rows if self.kernels == "fused" and len(plan.images) <= rows else None

    def train_on(self, inputs: StepRows | StepViews) -> dict[str, Tensor]:
        """The loss and its three parts, each summed over the experts."""
        targets = inputs.targets
        views = self.views.apply(inputs.images, inputs.views) if isinstance(inputs, StepRows) else inputs.views
        self.network.train()
        with self.model.step():
            # PyTorch's own norms count padding rows.
            padded = {} if targets.valid_views is None else {"valid_rows": targets.valid_views}
            views = views.contiguous(memory_format=torch.channels_last)
            outputs = self.model.forward(views, self.config.options.distillation == "sd", **padded)
            terms = self.losses(outputs, *targets)
            beside = self.taught(outputs, views, targets, padded) | self.chained(outputs.logits[-1], targets)
            reported = self.model.minimise(sum(beside.values(), terms.sum()))
        parts = dict(zip(_PARTS, terms.detach().sum(0).unbind(), strict=True))
        return {"loss": reported, **parts, **{name: term.detach() for name, term in beside.items()}}

    def taught(
        self, outputs: ExpertOutputs, views: Tensor, targets: Targets, padded: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The loss of the momentum teacher by its name, if there is one. The fixed copies among the
        views are the raw rows.
        """
        o = self.config.options
        if o.teacher != "momentum":
            return {}
        number = torch.arange(len(views), device=self.device)
        new = targets.new_views
        valid = len(views) if targets.valid_views is None else targets.valid_views
        teacher, student = self.model.teach(views, **padded).logits, outputs.logits
        if o.teacher_raw and self.views.recipe is not None:
            teacher = teacher[:, self.fixed_copies(len(views), targets)[1]]
        if o.teacher_outputs == "last":
            teacher, student = teacher[-1:], student[-1:]
        counted = number < valid if o.teacher_rows == "all" else (number >= new) & (number < valid)
        loss = distillation(student, teacher, o.teacher_temperature, views=counted)
        return {"teacher": o.teacher_weight * loss}

    def chained(self, logits: Tensor, targets: Targets) -> dict[str, Tensor]:
        """The term of the option ``view_chain`` by its name, if it is on, for the logits [V, K] of
        the last expert: the distance of every fixed copy to the same copy augmented.
        """
        o = self.config.options
        if not o.view_chain:
            return {}
        fixed, augmented = self.fixed_copies(len(logits), targets)
        loss = distillation(logits, logits[augmented], o.view_chain_temperature, views=fixed)
        return {"chain": o.view_chain * loss}

    def fixed_copies(self, count: int, targets: Targets) -> tuple[Tensor, Tensor]:
        """Which of a step's ``count`` views are fixed copies, bool [V], and where the same copy is
        augmented, int64 [V]; its own place for every other view.
        """
        number = torch.arange(count, device=self.device)
        new, valid = targets.new_views, count if targets.valid_views is None else targets.valid_views
        # Each set has its fixed copies, then as many augmented ones; the last one ends with the
        # valid views.
        first = torch.where(number < new, 0, new)
        half = torch.where(number < new, new, valid - new) // 2
        fixed = number < first + half
        return fixed, torch.where(fixed, number + half, number)
