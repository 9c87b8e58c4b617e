"""ER-AML (Caccia et al., ICLR 2022; docs/specification/baselines.md section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mose_fast.device import upload
from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, Inputs, Outputs, ReplayLearner, Rows, cross_entropy
from mose_fast.memory import draw_pairs
from mose_fast.nn.cosine import CosineClassifier, directions

# The temperature that the loss is scaled against (pclucas14/AML).
_BASE_TEMPERATURE = 0.07


@dataclass(frozen=True)
class ErAmlOptions(BaselineOptions):
    """Switches of ER-AML. With ``incoming`` cross_entropy and a linear ``head`` it is ER."""

    incoming: str = knob(
        "metric",
        "loss of incoming rows",
        "ER-AML: metric",
        choices={"metric": "against drawn positives and negatives", "cross_entropy": ""},
    )
    negatives: str = knob(
        "batch",
        "labels of negatives",
        "pclucas14/AML: batch in its task-free form, task in the other; a choice",
        choices={"batch": "those of the incoming batch", "task": "those of the current task seen so far"},
    )
    temperature: float = knob(
        0.1,
        "temperature of the metric loss",
        "pclucas14/AML: its best on CIFAR-100; for table a choice",
        above=0,
        search=Search(0.02, 0.5, log=True, source="choice: a factor of 5 around the repository's 0.1"),
    )
    head: str = knob("cosine", "linear classifier", "pclucas14/AML", choices={"cosine": "scale 10", "linear": ""})


@method(
    "er-aml",
    options=ErAmlOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "pclucas14/AML @ 7c92936: passes separate, negatives batch, temperature 0.1, head cosine", passes="separate"
        ),
        # Its images are scaled to [-1, 1] and those of the very first batch not augmented; here as
        # in all methods.
        "official": official_preset(
            "pclucas14/AML @ 7c92936, its augmented CIFAR settings",
            lr=0.1,
            weight_decay=0.0,
            buffer_batch=10,
            augment="pad_crop",
            init="default",
            passes="separate",
        ),
    },
    year=2022,
    reference="ER-AML, Caccia et al., ICLR 2022",
    cost=94 / 74,
)
class ErAml(ReplayLearner):
    """ER-AML: incoming rows are told apart from each other only, by a metric loss, which leaves the
    features of old classes alone.
    """

    without_boundaries = ReplayLearner.without_boundaries | {
        ("negatives", "task"): (
            "draws negatives from every class seen, so that incoming rows move the features of old classes too"
        )
    }

    sets = 4
    # Its cosines are computed in float32 from float32 weights.
    uses_shadows = False

    def classification_head(self, linear: nn.Linear) -> nn.Module:
        return CosineClassifier(linear.weight) if self.config.options.head == "cosine" else linear

    def plan(self, x: Tensor, y: Tensor) -> Rows | None:
        """Incoming rows, their positives, their negatives, replayed rows. Incoming rows that lack a
        positive or a negative are left out. With an empty memory all are trained on by
        cross-entropy, without pairs.
        """
        o = self.config.options
        memory, none = self.memory, y[:0]
        replayed = self.retrieve(x, y)
        if o.incoming == "cross_entropy" or memory.filled == 0:
            return self.rows(x, y, none, none, replayed)
        allowed = torch.zeros(self.classes, dtype=torch.bool, device=y.device)
        allowed[y if o.negatives == "batch" else upload(torch.tensor(self.data.current), y.device)] = True
        stored = memory.labels[: memory.filled]
        anchors, *pairs = draw_pairs(y, stored, allowed, self.config.seed, self.data.sequence)
        places = torch.cat(pairs)
        if len(anchors) + len(replayed) == 0:
            return None
        in_batch = (places - len(stored)).clamp(min=0)
        slots = torch.where(places < len(stored), places, -1)
        from_memory = slots >= 0
        images = torch.where(from_memory[:, None, None, None], memory.images[slots.clamp(min=0)], x[in_batch])
        labels = torch.where(from_memory, memory.labels[slots.clamp(min=0)], y[in_batch])
        return Rows(
            torch.cat([x[anchors], images, memory.images[replayed]]),
            torch.cat([y[anchors], labels, memory.labels[replayed]]),
            (*[len(anchors)] * 3, len(replayed)),
            torch.cat([slots, replayed]),
            self.data.sequence,
            {},
        )

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        incoming, positives, negatives, replayed = rows.sizes
        return incoming, positives + negatives, replayed

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        incoming, positives, _, replayed = rows.sizes
        contrast = slice(incoming, len(rows.labels) - replayed)
        terms = {}
        if positives:
            terms["incoming"] = metric_loss(
                outputs.features[:incoming],
                rows.labels[:incoming],
                outputs.features[contrast],
                rows.labels[contrast],
                self.config.options.temperature,
            )
        elif incoming:
            terms["incoming"] = cross_entropy(outputs.logits[:incoming], rows.labels[:incoming])
        if replayed:
            first = len(rows.labels) - replayed
            terms["replayed"] = cross_entropy(outputs.logits[first:], rows.labels[first:])
        return terms


def metric_loss(
    anchors: Tensor, labels: Tensor, contrast: Tensor, contrast_labels: Tensor, temperature: float
) -> Tensor:
    """Supervised contrastive loss of anchors, float [n, D], against a set of other vectors, float
    [m, D], among whose labels each anchor's must be; only directions count. -(tau / 0.07) times the
    mean over anchors of the mean log-probability of the vectors with the anchor's label.
    """
    similarities = directions(anchors) @ directions(contrast).T / temperature
    same = labels[:, None] == contrast_labels
    log_probabilities = torch.where(same, similarities.log_softmax(1), 0).sum(1) / same.sum(1)
    return -temperature / _BASE_TEMPERATURE * log_probabilities.mean()
