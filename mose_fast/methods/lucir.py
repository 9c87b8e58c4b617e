"""LUCIR (Hou et al., CVPR 2019; docs/specification/baselines.md section 15)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.exemplar_learner import REPLAY_LOSS_SOURCE, ExemplarLearner, ExemplarOptions
from mose_fast.learner.latch import undone_if
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import REPLAY_LOSSES, Inputs, Outputs, Rows
from mose_fast.nn.cosine import CosineClassifier, directions

_SOURCE = "hshustc/CVPR19_Incremental_Learning"


@dataclass(frozen=True)
class LucirOptions(ExemplarOptions):
    selection: str = ExemplarOptions.again("selection", "herding", _SOURCE)
    scale: float = knob(
        10.0,
        "initial scale of the cosines, which is learned",
        f"choice: Adam cannot leave 1 in one pass; {_SOURCE}: 1",
        above=0,
    )
    distillation: float = knob(
        5.0,
        "weight of the distillation, times the root of old classes to new",
        f"{_SOURCE} on CIFAR-100",
        low=0,
        search=Search(0.5, 50, log=True, source="choice: a decade around the repository's 5"),
    )
    replay_loss: str = knob("two_means", "mean of the cross-entropy", REPLAY_LOSS_SOURCE, choices=REPLAY_LOSSES)
    ranking: float = knob(1.0, "weight of the margin ranking loss", _SOURCE, low=0)
    margin: float = knob(
        0.5,
        "wanted margin of a row's own class over new ones, in cosines",
        _SOURCE,
        low=0,
        search=Search(0.1, 1, source="choice: around the repository's 0.5; cosines differ by 2 at most"),
    )
    rivals: int = knob(2, "new classes that the margin ranking compares a row with", _SOURCE, low=1)


@method(
    "lucir",
    options=LucirOptions,
    presets={
        "table": table_preset(
            "the scale of the cosines starts at 10, the repository's at 1; new and old rows have a mean each, where the"
            " repository has batches that are mostly new"
        ),
        "sources": sources_preset(
            f"{_SOURCE} @ e5a90ae: scale 1, replay_loss one_mean, current_classes task, optimiser_per_task true",
            scale=1.0,
            replay_loss="one_mean",
            current_classes="task",
            optimiser_per_task=True,
        ),
        # A first task of 50 classes and 160 epochs have no place here.
        "official": official_preset(
            f"{_SOURCE} @ e5a90ae, its CIFAR-100 settings",
            batch=128,
            lr=0.1,
            weight_decay=5e-4,
            optimiser_per_task=True,
            augment="pad_crop",
            scale=1.0,
            replay_loss="one_mean",
            current_classes="task",
        ),
    },
    year=2019,
    reference="Learning a Unified Classifier Incrementally via Rebalancing, Hou et al., CVPR 2019",
    # A forward pass of the teacher over all rows.
    cost=(74 + 74 / 3) / 74,
)
class Lucir(ExemplarLearner):
    """LUCIR: classifies by cosines, keeps the directions of features and the weights of old
    classes, and wants a margin of old rows over new classes.
    """

    not_averaged = "takes back, after each step, what the optimiser did to rows of its classifier"

    # Its cosines are computed in float32 from float32 weights.
    uses_shadows = False

    def classification_head(self, linear: nn.Linear) -> nn.Module:
        return CosineClassifier(linear.weight, self.config.options.scale, learned_scale=True)

    def begin_task(self, task: int, classes: Sequence[int] | None = None) -> None:
        super().begin_task(task, classes)
        # How many of the task's classes seen so far were imprinted.
        self.data.own["imprinted"] = 0

    def plan(self, x: Tensor, y: Tensor) -> Rows:
        rows, seen = super().plan(x, y), self.data.current
        fresh = seen[self.data.own["imprinted"] :]
        self.data.own["imprinted"] = len(seen)
        if not fresh or not rows.extras["distils"]:
            return rows
        images = self.views.normalise(x).contiguous(memory_format=torch.channels_last)
        return rows._replace(extras={**rows.extras, "fresh": self.mask(fresh), "images": images})

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the masks ``weight``, a scalar, of the distillation."""
        extras = super().extras(labels, sizes)
        if extras["distils"]:
            share = len(self.old) / len(self.current())
            extras["weight"] = self.scalar(self.config.options.distillation * math.sqrt(share))
        return extras

    def train_on(self, rows: Inputs) -> dict[str, Tensor]:
        if not rows.extras["distils"]:
            return super().train_on(rows)
        # Adam moves a row also where its gradient is zero, by its moments and by weight decay.
        with undone_if(rows.extras["old"][:, None], [self.network.classifier1.weight]):
            return super().train_on(rows)

    def new_rows(self, rows: Inputs) -> AbstractContextManager:
        new = super().new_rows(rows)
        if "fresh" not in rows.extras:
            return new
        both = ExitStack()
        both.enter_context(new)
        values, imprinted = self.imprint(rows)
        both.enter_context(self.model.renewed(imprinted, {self.network.classifier1.weight: values}))
        return both

    def imprint(self, rows: Inputs) -> tuple[Tensor, Tensor]:
        """The weights of classes that come for the first time: the mean direction of their
        features, as long as the weights of old classes on average, float32 [K, D]; and bool [K],
        the classes that have rows.
        """
        weight, extras = self.network.classifier1.weight, rows.extras
        self.network.eval()
        with torch.no_grad(), self.model.precise():
            features = self.model.forward(extras["images"]).features[0]
            classes = torch.arange(self.classes, device=weight.device)
            own = (classes[:, None] == rows.labels[: rows.sizes[0]]) & extras["fresh"][:, None]
            length = torch.where(extras["old"], weight.norm(dim=1), 0).sum() / extras["old"].sum()
            return length * directions(own.float() @ directions(features)), own.any(1)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        o, extras, features = self.config.options, rows.extras, outputs.features
        known, old = extras["known"], extras["old"]
        terms = self.cross_entropies(outputs, rows, known)
        if extras["distils"]:
            taught = self.teacher.outputs(rows.views).features
            terms["distillation"] = extras["weight"] * feature_distillation(features, taught)
            cosines = directions(features) @ directions(self.network.classifier1.weight).T
            terms["ranking"] = o.ranking * margin_ranking(cosines, rows.labels, old, known & ~old, o.rivals, o.margin)
        return terms


def feature_distillation(features: Tensor, taught: Tensor) -> Tensor:
    """Mean over rows of 1 - cos(feature, the teacher's feature), both float [N, D], in float32."""
    return 1 - (directions(features) * directions(taught)).sum(1).mean()


def margin_ranking(cosines: Tensor, labels: Tensor, old: Tensor, new: Tensor, rivals: int, margin: float) -> Tensor:
    """How far rows of ``old`` classes, bool [K], are from having a margin over the ``rivals`` most
    similar ``new`` classes: with cosines float32 [N, K] between features and class weights, the
    mean of max(0, margin - (cosine of the own class - cosine of the rival)) over pairs of such a
    row and one of its rivals; 0 without any.
    """
    own = cosines.gather(1, labels[:, None])
    nearest = cosines.masked_fill(~new, -math.inf).topk(min(rivals, cosines.shape[1]), 1).values
    counts = old[labels][:, None] & nearest.isfinite()
    return torch.where(counts, (margin - own + nearest).clamp_min(0), 0).sum() / counts.sum().clamp_min(1)
