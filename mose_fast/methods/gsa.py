"""GSA (Guo et al., CVPR 2023; docs/specification/baselines.md section 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.learner.about import Preset, Search, knob, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, Inputs, Outputs, ReplayLearner, Rows
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.expert_losses import masked_cross_entropy
from mose_fast.settings.run import CURRENT_CLASSES, BeyondOptions


@dataclass(frozen=True)
class GsaOptions(BaselineOptions, BeyondOptions):
    """Switches of GSA. ``buffer_batch`` is the size of the set whose rows are weighted."""

    replay_from: str = BaselineOptions.again("replay_from", "others", "gydpku/GSA")
    new_extra: int = knob(
        22, "rows of the current task drawn from memory beside the incoming ones, at most", "gydpku/GSA", low=0
    )
    buffer_weight: float = knob(
        2.0,
        "weight of the cross-entropy on the weighted set",
        "gydpku/GSA",
        low=0,
        search=Search(0.5, 8, log=True, source="choice: a factor of 4 around the repository's 2"),
    )
    warm_up: int = knob(5, "first steps of each task in which all classes have weight 1", "gydpku/GSA", low=0)
    current_classes: str = knob(
        "seen",
        "classes of the current task",
        "gydpku/GSA: task; for table a choice, since a method need not know classes beforehand",
        choices=CURRENT_CLASSES,
    )


@method(
    "gsa",
    options=GsaOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "gydpku/GSA @ 3f523ba: beta2 0.99, passes separate, current_classes task",
            beta2=0.99,
            passes="separate",
            current_classes="task",
        ),
        # The released head grows by parameters that its optimiser does not know, so that it is
        # never trained; here all K outputs exist and are trained from the start.
        "official": Preset(
            "gydpku/GSA @ 3f523ba, its CIFAR-100 script",
            {"beta2": 0.99, "passes": "separate", "current_classes": "task", "augment": "gsa", "init": "default"},
        ),
    },
    year=2023,
    reference="Gradient Self-Adaptation, Guo et al., CVPR 2023",
    cost=192 / 74,
)
class Gsa(ReplayLearner):
    """GSA: new classes are told apart from each other only; replayed rows weigh more the more the
    gradients so far have pulled their class's logit up rather than pushed it down.
    """

    # Neither loss has the logits of classes that have not come.
    hides_unseen = True
    without_boundaries = ReplayLearner.without_boundaries | {
        ("replay_from", "others"): "weighs rows of its incoming batch and of the same few classes, and replays no other"
    }

    sets = 3

    def build_network(self) -> ExpertNetwork:
        network = super().build_network()
        # Part of the network's state, as batch norm's statistics are.
        network.register_buffer("sums", torch.zeros(2, self.classes))
        return network

    def plan(self, x: Tensor, y: Tensor) -> Rows:
        o, memory, seen = self.config.options, self.memory, len(self.seen)
        current = memory.draw(o.new_extra, only=self.task)
        # Of the weighted set, the current task has the share that it has of the classes seen.
        now, others = len(self.data.current), o.replay_from == "others"
        copies = min(o.buffer_batch * now // seen, len(x) + len(current)) if memory.filled else 0
        wanted = o.buffer_batch * (seen - now) // seen if others else o.buffer_batch - copies
        old = self.draw(wanted)
        rows = self.rows(x, y, current, old)
        return rows._replace(extras={**rows.extras, "copies": copies})

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """``current``, ``known``: bool [K], the classes of the current task, and all up to it;
        ``weighted``, whether classes have weights; ``copies``, see :func:`two_sets`.
        """
        o = self.config.options
        current = self.data.current_classes(o.current_classes) if sizes[0] else []
        weighted = sizes[0] == 0 or self.data.task_step > o.warm_up
        masks = {"current": self.mask(current), "known": self.mask({*self.seen, *current})}
        return {**masks, "weighted": weighted, "copies": 0}

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [V, 3, H, W]: augmented views of each of :func:`two_sets`, then mirrored ones."""
        images = [part for one in two_sets(rows, rows.images) for part in (one, one.flip(2) if self.mirrored else one)]
        return super().make_views(rows._replace(images=torch.cat(images)))

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        return tuple(2 * len(one) for one in two_sets(rows, rows.labels))

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        new, replayed = (one.repeat(2) for one in two_sets(rows, rows.labels))
        terms = {}
        if len(new):
            terms["incoming"] = masked_cross_entropy(outputs.logits[: len(new)], new, rows.extras["current"])
        if len(replayed):
            each = F.cross_entropy(self.weighted_logits(outputs, rows), replayed, reduction="none")
            sums = self.network.sums + self.pulls_and_pushes(outputs, rows)
            weights = class_weights(sums)[replayed] if rows.extras["weighted"] else 1.0
            terms["replayed"] = self.config.options.buffer_weight * (weights * each).mean()
        return terms

    def weighted_logits(self, outputs: Outputs, rows: Inputs) -> Tensor:
        """The weighted set's logits, float32 at least, [V, K], with the option ``logit_adjustment``
        the adjusted ones; -inf for classes not come yet.
        """
        logits = outputs.logits[self.view_sizes(rows)[0] :]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.masked_fill(~rows.extras["known"], -torch.inf)
        adjustment = self.adjustment((two_sets(rows, rows.labels)[1], 1.0))
        return logits if adjustment is None else logits + adjustment

    def pulls_and_pushes(self, outputs: Outputs, rows: Inputs) -> Tensor:
        """What a step's views add to the sums of :func:`class_weights`, float32 [2, K]."""
        p = self.weighted_logits(outputs, rows).detach().softmax(1)
        labels = two_sets(rows, rows.labels)[1].repeat(2)
        own = labels[:, None] == torch.arange(self.classes, device=labels.device)
        return torch.stack([torch.where(own, 1 - p, 0).sum(0), torch.where(own, 0, p).sum(0)])

    def after_update(self, outputs: Outputs, rows: Inputs) -> None:
        added = self.pulls_and_pushes(outputs, rows)
        self.network.sums.add_(torch.where(self.model.latch.closed, 0, added))


def two_sets(rows: Rows | Inputs, values: Tensor) -> tuple[Tensor, Tensor]:
    """What the two losses are for, of all rows' images or labels: rows of the current task, and
    copies of the first of them with the replayed ones.
    """
    new = rows.sizes[0] + rows.sizes[1]
    return values[:new], torch.cat([values[: rows.extras["copies"]], values[new:]])


def class_weights(sums: Tensor) -> Tensor:
    """The weight of each class, float32 [K]: 2 / (1 + exp(1 - pulled / pushed)), from 0.54 to 2,
    above 1 where its logit was pulled up more than it was pushed down. ``sums`` are float32 [2, K]:
    by class c, the sum of 1 - p_c over views of c, and that of p_c over other views.
    """
    pulled, pushed = sums
    return 2 * torch.sigmoid(pulled / pushed.clamp_min(torch.finfo(sums.dtype).tiny) - 1)
