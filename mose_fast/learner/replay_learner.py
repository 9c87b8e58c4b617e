"""What the baselines share: one network, incoming rows and rows replayed from memory in one forward
pass (docs/specification/baselines.md sections 0.2 and 0.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.augment.pad_crop import pad_crop
from mose_fast.device import upload
from mose_fast.learner.hooks import Planning
from mose_fast.learner.learner import Learner
from mose_fast.learner.model import Model
from mose_fast.learner.prepared import ViewsToCome
from mose_fast.learner.returned import are_plain, are_scalars, are_slots, are_views, check_returned
from mose_fast.learner.teacher import Outputs, Teacher, outputs_of
from mose_fast.losses import distillation, label_counts
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.expert_losses import masked_cross_entropy
from mose_fast.settings.run import RECIPES, REPLAY_FROM, ConfigError, ReplayOptions, knob, shown


@dataclass(frozen=True)
class BaselineOptions(ReplayOptions):
    """Switches of all baselines; the defaults are the shared protocol of the MOSE comparison."""

    augment: str = ReplayOptions.again(
        "augment", "simclr", "paper 5.1: flip, gray and crop for all but SCR and DER++", choices=RECIPES
    )
    lr: float = ReplayOptions.again("lr", 1e-3, "paper 5.1", doc="learning rate")
    weight_decay: float = ReplayOptions.again(
        "weight_decay", 1e-4, "paper 5.1", doc="weight decay, added to the gradient"
    )
    classifier: str = ReplayOptions.again("classifier", "linear", "the methods' own papers")
    optimiser: str = knob(
        "adam", "optimiser", "paper 5.1: Adam for all; repositories: SGD", choices={"adam": "", "sgd": ""}
    )
    momentum: float = knob(0.0, "momentum of SGD", "paper 5.1: Adam; repositories: most have none", low=0, below=1)
    passes: str = knob(
        "joint",
        "how sets of rows pass the network",
        "choice (docs/specification/baselines.md section 2), as the MOSE repository; the methods' repositories:"
        " separate",
        choices={"joint": "batch norm sees all of them", "separate": "one set after the other"},
    )
    replay_from: str = knob(
        "all",
        "tasks that replayed rows come from",
        "choice (docs/specification/baselines.md section 2); the repositories differ",
        choices=REPLAY_FROM,
    )


class Rows(NamedTuple):
    """The plan of a step: its rows, copied from the memory.

    Attributes:
        images: uint8 [R, H, W, 3]: the incoming batch, then one set of replayed rows after another.
        labels: int64 [R].
        sizes: Rows of each set; R is their sum.
        slots: int64 [R - sizes[0]], the memory slots of the replayed rows.
        sequence: Number of the step, which decides its random views.
        extras: What :meth:`ReplayLearner.extras` returned.
    """

    images: Tensor
    labels: Tensor
    sizes: tuple[int, ...]
    slots: Tensor
    sequence: int
    extras: dict[str, Any]


class Inputs(NamedTuple):
    """All that a step reads beside the model: ``labels``, ``sizes``, ``slots`` and ``extras`` of
    the plan (:class:`Rows`), and ``views`` float32 [V, 3, H, W], as
    :meth:`ReplayLearner.make_views` made them. ``stored``: int64 [B], the slot that each incoming
    row was stored in, -1 if in none; None if they were not offered to the memory before the step.
    """

    views: Tensor | None
    labels: Tensor
    sizes: tuple[int, ...]
    slots: Tensor
    stored: Tensor | None
    extras: dict[str, Any]


#: How the cross-entropy of incoming and replayed rows may be averaged.
REPLAY_LOSSES = {
    "two_means": "a mean over incoming rows plus one over replayed rows",
    "one_mean": "one mean over all rows",
}


def cross_entropy(logits: Tensor, labels: Tensor, adjustment: Tensor | None = None) -> Tensor:
    """Mean cross-entropy over all classes in float32, whatever precision the network ran in;
    ``adjustment``, float32 [K], is added to the logits [N, K].
    """
    logits = logits.float()
    return F.cross_entropy(logits if adjustment is None else logits + adjustment, labels)


def _with_views(views: Tensor, inputs: Inputs) -> Inputs:
    return inputs._replace(views=views)


class ReplayLearner(Learner):
    """A learner that trains on the incoming batch and on rows drawn from memory, each seen in one
    augmented view.

    A method overrides what it does differently: :meth:`retrieve` chooses the replayed rows, and
    :meth:`losses` computes what is minimised; docs/adding_a_method.md has the others. All methods
    start from the same weights for the same seed.

    Rows are chosen and views made several batches ahead of the step, which is a CUDA graph on a
    GPU. So :meth:`train_on` and all that it calls read only their arguments, the model, the
    configuration, and tensors that are changed in place; and they never ask a tensor for a value or
    for the places where it is true, which would wait for the GPU.
    """

    planning: ClassVar[Planning] = Planning.CAPTURED
    uses_shadows: ClassVar[bool] = True
    not_taught: ClassVar[str] = ""
    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = {
        ("replay_from", "others"): "replays nothing",
        **Learner.without_boundaries,
    }

    #: Sets of rows in a step, including the incoming rows; the last one is replayed with labels.
    sets: ClassVar[int] = 2

    #: The mode of batch norm in the teacher, the network as it was at the end of the last task:
    #: ``eval`` or ``train``; None: there is no teacher.
    teacher_mode: ClassVar[str | None] = None

    #: The teacher, if there is one; see :class:`mose_fast.learner.teacher.Teacher`.
    teacher: Teacher | None

    def build_model(self) -> Model:
        model = super().build_model()
        head = model.network.classifier1.parameters()
        model.first_rows = {p: p.detach().clone() for p in head if p.dim() and len(p) == self.classes}
        if self.teacher_mode is None:
            self.teacher = None
            return model
        if self.teacher_mode not in ("eval", "train"):
            raise ConfigError(
                f"{type(self).__qualname__}.teacher_mode is {shown(self.teacher_mode)}; wanted 'eval', 'train' or None"
            )
        half, training = self.precision.name == "bf16", self.teacher_mode == "train"
        teacher = Teacher(model.network, training=training, half=half, shadowed=self.shadowed)
        self.keep("teacher", teacher, written="tasks")
        return model

    def build_network(self) -> ExpertNetwork:
        o = self.config.options
        network = ExpertNetwork(
            self.classes, width=self.config.width, experts=1, attention=False, adapter=False, init=o.init
        )
        network.classifier1 = self.classification_head(network.classifier1)
        network.projection1 = self.projection_head(network.feature_size)
        return network

    def classification_head(self, linear: nn.Linear) -> nn.Module:
        """The classifier; ``linear`` is the network's own."""
        return linear

    def projection_head(self, feature_size: int) -> nn.Module:
        """The layer from features to the projections of a contrastive loss; by default none."""
        return nn.Identity()

    def build_optimiser(self, network: ExpertNetwork) -> torch.optim.Optimizer:
        o = self.config.options
        if o.optimiser == "adam":
            return super().build_optimiser(network)
        # As with Adam, PyTorch's fused one can skip a step without the host knowing.
        fused = True if self.reads_losses_late else None
        settings = {"lr": o.lr, "momentum": o.momentum, "weight_decay": o.weight_decay}
        optimiser = torch.optim.SGD(network.parameters(), **settings, fused=fused)
        if o.momentum:
            # Zero is where the first step starts from, and no later step makes tensors.
            for parameter in network.parameters():
                optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimiser

    def scalar(self, value: float) -> Tensor:
        """float32 on the device, for :meth:`extras`."""
        return upload(torch.tensor(value), self.device)

    # Rows

    def plan(self, x: Tensor, y: Tensor) -> Rows | None:
        return self.rows(x, y, self.retrieve(x, y))

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        """The slots of the rows to replay with an incoming batch, int64 [at most ``buffer_batch``];
        by default drawn uniformly without replacement.
        """
        return self.draw(self.config.options.buffer_batch)

    def draw(self, count: int) -> Tensor:
        """At most ``count`` slots, drawn uniformly from the tasks that ``replay_from`` names."""
        others = self.config.options.replay_from == "others"
        return self.memory.draw(count, others=self.task if others else None)

    def rows(self, x: Tensor, y: Tensor, *sets: Tensor) -> Rows:
        """The rows of a step: incoming rows and sets of memory slots."""
        end, hook = self.memory.slots_end, "retrieve" if type(self).plan is ReplayLearner.plan else "plan"
        for chosen in sets:
            fits = are_slots(chosen, 0, end)
            check_returned(self, hook, chosen, fits, f"filled slots of the memory, int64 [n] in 0 ... {end - 1}")
        slots = torch.cat(sets)
        replayed, their_labels = self.memory.gather(slots)
        images, labels = torch.cat([x, replayed]), torch.cat([y, their_labels])
        sizes = (len(x), *map(len, sets))
        extras = self.extras(labels, sizes)
        check_returned(self, "extras", extras, are_plain(extras), "tensors and plain values by name")
        new = self.new_classes() if self.hides_unseen and len(x) else []
        if new:
            extras["new"] = self.mask(new)
        if self.hides_unseen and (self.config.options.teacher == "momentum" or self.levels > 2):
            extras["seen"] = self.mask(self.seen)
        return Rows(images, labels, sizes, slots, self.data.sequence, extras)

    def new_classes(self) -> list[int]:
        """The classes that losses may use from this plan on, and that no earlier plan had."""
        had = self.data.own.get("had", [])
        known = self.data.known_classes(getattr(self.config.options, "current_classes", "seen"))
        new = [c for c in known if c not in had]
        self.data.own["had"] = had + new
        # Before the first plan nothing was trained, so that nothing need start anew.
        return new if had else []

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """What :meth:`losses` reads beside rows and outputs, by name, as ``rows.extras``: tensors
        that no later plan changes, and plain values (bool, int, float, str, None), each of which
        has its own graph. It is made with the plan, before the batch is stored, for rows with these
        ``labels`` and ``sizes`` (:class:`Rows`).
        """
        return {}

    def rehearsal(self, slots: Tensor) -> Rows:
        """The rows of a step on memory slots only: they are the last set, all others are empty."""
        none = slots[:0]
        empty = [none] * (self.sets - 2)
        return self.rows(self.memory.images[none], self.memory.labels[none], *empty, slots)

    def inputs(self, plan: Rows, stored: Tensor | None = None) -> Inputs | ViewsToCome:
        wanted = "Rows, as self.rows(x, y, slots) makes them, or None"
        check_returned(self, "plan or rehearsal", plan, isinstance(plan, Rows), wanted)
        inputs = Inputs(None, plan.labels, plan.sizes, plan.slots, stored, plan.extras)
        if self.views.apart:
            return ViewsToCome(partial(self._made_views, plan), _with_views, inputs)
        return _with_views(self._made_views(plan), inputs)

    def _made_views(self, plan: Rows) -> Tensor:
        views = self.make_views(plan)
        check_returned(self, "make_views", views, are_views(views), "normalised views, float [V, 3, H, W]")
        return views

    def describe(self, plan: Rows) -> str:
        incoming, *replayed = plan.sizes
        return f"{incoming} incoming and {sum(replayed)} replayed rows"

    # A step

    def train_on(self, rows: Inputs) -> dict[str, Tensor]:
        with self.new_rows(rows), self.model.step():
            sizes = self.view_sizes(rows)
            count, levels = sum(sizes), self.levels
            enough = levels * count <= len(rows.views)
            check_returned(self, "make_views", rows.views, enough, f"the {levels * count} views of view_sizes, {sizes}")
            views = rows.views[: levels * count].split(count)
            outputs = [self.passed(self.forward, level, sizes) for level in views]
            joined = outputs[0]
            if levels > 1:  # a method's own losses see views of one level alone
                rows = rows._replace(views=views[0])
            terms = self.chained(outputs, rows) if levels > 2 else self.losses(joined, rows)
            fits = are_scalars(terms) and any(term.requires_grad for term in terms.values())
            check_returned(self, "losses", terms, fits, "floating-point scalars of the outputs by name, at least one")
            terms = {**terms, **self.taught(outputs, rows, sizes)}
            loss = self.model.minimise(torch.stack(list(terms.values())).sum())
        self.after_update(joined, rows)
        return {"loss": loss, **{name: term.detach() for name, term in terms.items()}}

    @property
    def levels(self) -> int:
        """Levels of views that a step has of each row: augmented ones; then, where the momentum
        teacher or the chain of views wants them, those without augmentation; then, for the chain,
        mild ones.
        """
        o = self.config.options
        if getattr(o, "view_chain", 0):
            return 3
        return 2 if o.teacher == "momentum" and o.teacher_raw else 1

    def passed(self, forward: Callable[[Tensor], Outputs], views: Tensor, sizes: Sequence[int]) -> Outputs:
        """The outputs for views, which pass together or, by the option ``passes``, by set."""
        parts = views.split(sizes) if self.config.options.passes == "separate" else [views]
        outputs = [forward(part) for part in parts if len(part)]
        return outputs[0] if len(outputs) == 1 else Outputs(*map(torch.cat, zip(*outputs, strict=True)))

    def chained(self, outputs: Sequence[Outputs], rows: Inputs) -> dict[str, Tensor]:
        """The terms for the outputs of augmented, raw and mild views: the means of :meth:`losses`
        over the three, and the distances of raw views to mild ones and of mild ones to augmented
        ones.
        """
        o = self.config.options
        each = [self.losses(one, rows) for one in outputs]
        terms = {name: torch.stack([losses[name] for losses in each]).mean() for name in each[0]}
        hard, raw, mild = (one.logits for one in outputs)
        links = [
            distillation(easier, harder, o.view_chain_temperature, classes=rows.extras.get("seen"))
            for easier, harder in ((raw, mild), (mild, hard))
        ]
        return terms | {"chain": o.view_chain * (links[0] + links[1])}

    def taught(self, outputs: Sequence[Outputs], rows: Inputs, sizes: Sequence[int]) -> dict[str, Tensor]:
        """The loss of the momentum teacher by its name, none where there is no row to teach: the
        distances of the student's outputs for augmented views, and with ``teacher_raw`` for raw
        rows, to the teacher's for the augmented views.
        """
        o = self.config.options
        first = sizes[0] if o.teacher_rows == "buffer" else 0
        if o.teacher != "momentum" or first == sum(sizes):
            return {}
        teacher = self.passed(partial(outputs_of, self.model.teach), rows.views[: sum(sizes)], sizes).logits[first:]
        students = [one.logits[first:] for one in (outputs[:2] if o.teacher_raw else outputs[:1])]
        loss = distillation(
            torch.cat(students),
            torch.cat([teacher] * len(students)),
            o.teacher_temperature,
            classes=rows.extras.get("seen"),
        )
        return {"teacher": o.teacher_weight * loss}

    def new_rows(self, rows: Inputs) -> AbstractContextManager:
        """A context of the step, at whose start the classifier's rows of new classes start anew. No
        loss has moved them so far, but weight decay has: Adam divides it by the root of its own
        second moment, and so takes them to zero within fifty steps.
        """
        new = rows.extras.get("new")
        return nullcontext() if new is None else self.model.renewed(new)

    def after_update(self, outputs: Outputs, rows: Inputs) -> None:
        """Called after the update, with the outputs before it, for what a step changes beside the
        model. What is not kept it must leave alone where ``self.model.latch.closed``.
        """

    def make_views(self, rows: Rows) -> Tensor:
        """Makes one augmented, normalised view of every row, in order: float32 [V, 3, H, W]; then
        those of the other :attr:`levels`. It is called ahead of the step, possibly on another
        thread, and reads only the plan and what never changes.
        """
        seed = self.config.seed
        if self.config.options.augment == "pad_crop":
            brightness = getattr(self.config.options, "brightness", 0.0)
            cropped = pad_crop(rows.images, seed, rows.sequence, mirror=self.mirrored, brightness=brightness)
            views = self.views.augmented(cropped, seed, rows.sequence)  # by the recipe none: normalised
        else:
            views = self.views.augmented(rows.images, seed, rows.sequence)
        raw = [self.views.normalise(rows.images)] if self.levels > 1 else []
        mild = [self.views.mild(rows.images, seed, rows.sequence)] if self.levels > 2 else []
        return torch.cat([views, *raw, *mild]) if raw else views

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        """The numbers of views that pass the network together if ``passes`` is ``separate``; by
        default those of each set. Views beyond their sum do not pass it.
        """
        return rows.sizes

    def forward(self, views: Tensor) -> Outputs:
        """The forward pass in training mode and in the run's precision."""
        self.network.train()
        return outputs_of(self.model.forward, views)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        """The terms whose sum is minimised, float32 scalars by name; by default the cross-entropy.
        Which terms there are depends on plain values alone.
        """
        return self.cross_entropies(outputs, rows)

    def cross_entropies(self, outputs: Outputs, rows: Inputs, *classes: Tensor | None) -> dict[str, Tensor]:
        """The cross-entropy over all classes; over those of a mask, bool [K]; or over those of a
        mask for incoming rows and one for replayed rows. By the option ``replay_loss`` a mean for
        each of these sets that is not empty, or one mean.
        """

        def term(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is not None:
                return masked_cross_entropy(logits, labels, mask)
            return cross_entropy(logits, labels, adjustment)

        pooled = getattr(self.config.options, "replay_loss", "two_means") == "one_mean"
        if pooled and len(classes) < 2:
            adjustment = self.adjustment((rows.labels, 1.0))
            return {"cross_entropy": term(outputs.logits, rows.labels, *classes)}
        masks = classes if len(classes) == 2 else 2 * (classes or (None,))
        sets = rows.labels.split(rows.sizes)
        adjustment = self.adjustment(
            *(
                (labels, len(labels) if pooled else 1.0)
                for labels, mask in zip(sets, masks, strict=True)
                if mask is None
            )
        )
        parts = zip(outputs.logits.split(rows.sizes), sets, masks, strict=True)
        terms = {}
        for name, (logits, labels, mask) in zip(("incoming", "replayed"), parts, strict=True):
            if len(labels):
                mean = term(logits, labels, mask)
                terms[name] = len(labels) / len(rows.labels) * mean if pooled else mean
        return terms

    def adjustment(self, *sets: tuple[Tensor, float]) -> Tensor | None:
        """What the option ``logit_adjustment`` adds to the logits of rows whose cross-entropy is
        over all classes: that number times the log of each class's share of the rows' weight in the
        loss, float32 [K], up to a constant; -inf for a class without rows. None where it is 0.

        Args:
            sets: Labels int64 [n] of each set of such rows, and the weight of its mean.
        """
        tau = getattr(self.config.options, "logit_adjustment", 0)
        filled = [(labels, weight) for labels, weight in sets if len(labels)]
        if not tau or not filled:
            return None
        shares = [weight / len(labels) * label_counts(labels, self.classes) for labels, weight in filled]
        return tau * torch.stack(shares).sum(0).log()

    # The end of a task

    def on_task_end(self) -> None:
        super().on_task_end()
        if self.teacher is not None and not self.diverged:
            self.teacher.take(self.network)
