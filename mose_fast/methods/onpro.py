"""OnPro (Wei et al., ICCV 2023; docs/specification/baselines.md section 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mose_fast.learner.about import Preset, Search, knob, sources_preset, table_preset
from mose_fast.learner.hooks import Planning
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import Inputs, Outputs, Rows
from mose_fast.learner.rotated import RotatedLearner, RotatedOptions
from mose_fast.losses.information import class_information, class_means, prototype_loss, view_information
from mose_fast.memory.feedback import feedback
from mose_fast.nn import ExpertNetwork
from mose_fast.settings.run import ConfigError


@dataclass(frozen=True)
class OnProOptions(RotatedOptions):
    random_share: float = knob(
        0.9,
        "share of the replayed rows drawn at random; the others come from pairs of classes with close prototypes",
        "weilllllls/OnPro on CIFAR-100 and Tiny-ImageNet; on CIFAR-10 0.75",
        low=0,
        search=Search(0.5, 1, source="choice: around the repository's 0.75 and 0.9"),
    )
    mixup: float = knob(
        0.2,
        "probability of mixing replayed rows",
        "weilllllls/OnPro on CIFAR-100 and Tiny-ImageNet; on CIFAR-10 0.6",
        low=0,
        search=Search(0, 1, source="all that there are; the repository's are 0.2 and 0.6"),
    )
    prototype_temperature: float = knob(0.5, "temperature of the prototypes' loss", "weilllllls/OnPro", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("random_share", "mixup"):
            if getattr(self, name) > 1:
                raise ConfigError(f"options.{name} is {getattr(self, name)!r}; wanted a share, at most 1")


@method(
    "onpro",
    options=OnProOptions,
    presets={
        "table": table_preset("its repository's learning rate is 5e-4"),
        "sources": sources_preset("weilllllls/OnPro @ a92f8ae: beta2 0.99", beta2=0.99),
        "official": Preset(
            "weilllllls/OnPro @ a92f8ae, its settings for CIFAR-100", {"lr": 5e-4, "beta2": 0.99, "init": "default"}
        ),
    },
    year=2023,
    reference="Online Prototype Learning, Wei et al., ICCV 2023",
    cost=(2 * 16 * 74 + 2 * 64 + 64) / 74,
)
class OnPro(RotatedLearner):
    """OnPro: contrasts sixteen rotations of rows and, view against view, the classes' prototypes;
    classifies replayed rows, mixed more often where prototypes are close.
    """

    planning = Planning.LOOKS_AT_MODEL
    not_taught = "contrasts rotated views, whose logits it never trains"
    not_captured = "mixes rows by the prototypes of the step before"
    sets = 3

    def build_network(self) -> ExpertNetwork:
        network = super().build_network()
        # Part of the network's state, as batch norm's statistics are.
        size = self.projection_size(network.feature_size)
        network.register_buffer("prototypes", torch.zeros(self.classes, size))
        return network

    def plan(self, x: Tensor, y: Tensor) -> Rows:
        """Incoming rows; replayed ones, mixed from a task's second step on; those of prototypes."""
        if self.alone:
            return self.rows(x, y, y[:0], self.memory.draw(self.config.options.buffer_batch))
        drawn = self.retrieve(x, y)
        rows = self.rows(x, y, drawn, drawn)
        return self.mixed(rows) if self.data.task_step > 1 and len(drawn) else rows

    def rehearsal(self, slots: Tensor) -> Rows:
        none = slots[:0]
        return self.rows(self.memory.images[none], self.memory.labels[none], slots, slots)

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the offsets ``partners``, int64 [n], the second label of each replayed row, and
        ``shares``, float32 [n], its weight.
        """
        partners = labels.split(sizes)[1]
        return {**super().extras(labels, sizes), "partners": partners, "shares": torch.zeros_like(partners).float()}

    def mixed(self, rows: Rows) -> Rows:
        """The rows with the replayed ones chosen and mixed by adaptive prototypical feedback."""
        o, memory, (incoming, replayed, _) = self.config.options, self.memory, rows.sizes
        slots, partners, shares = feedback(
            rows.slots[:replayed],
            memory.labels[: memory.filled],
            self.network.prototypes,
            o.random_share,
            o.mixup,
            self.config.seed,
            rows.sequence,
        )
        images, labels, every = rows.images.clone(), rows.labels.clone(), rows.slots.clone()
        one, other = (memory.images[chosen].float() for chosen in (slots, partners))
        place = slice(incoming, incoming + replayed)
        images[place] = torch.lerp(one, other, shares[:, None, None, None]).round().to(torch.uint8)
        labels[place] = memory.labels[slots]
        every[:replayed] = torch.where(shares == 0, slots, -1)
        extras = {**rows.extras, "partners": memory.labels[partners], "shares": shares}
        return rows._replace(images=images, labels=labels, slots=every, extras=extras)

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [V, 3, H, W]: contrasted views of incoming and replayed rows; rows for prototypes
        as they are, and augmented; one augmented view of each classified row, a replayed one if
        there are any.
        """
        incoming, replayed, seen = rows.images.split(rows.sizes)
        classified = replayed if len(replayed) else incoming
        *contrasted, augmented, last = self.view_parts(rows, len(incoming) + len(replayed), seen, classified)
        return torch.cat([*contrasted, self.views.normalise(seen), augmented, last])

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        incoming, replayed, seen = rows.sizes
        return 2 * self.config.options.rotations * (incoming + replayed), 2 * seen, replayed or incoming

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        o, offsets = self.config.options, rows.extras["offsets"]
        incoming, replayed, seen = rows.sizes
        count, (contrasted, of_seen, _) = incoming + replayed, self.view_sizes(rows)
        y, y_replayed, _ = rows.labels.split(rows.sizes)
        logits = outputs.logits[contrasted + of_seen :].float()
        terms = {}
        if incoming:
            similarities = self.similarities(outputs, count, 0, incoming, offsets[0])
            terms["incoming"] = view_information(similarities, self.rotated_labels(y).repeat(2), o.temperature)
            first, second = self.contrasted(outputs.projections, count, 0, incoming).chunk(2)
            z = torch.stack([first[:incoming], second[:incoming]])
            terms["incoming_prototypes"] = prototype_loss(class_means(z, y, self.classes), o.prototype_temperature)
        if replayed:
            share, partners = rows.extras["shares"], rows.extras["partners"]
            similarities = self.similarities(outputs, count, incoming, count, offsets[1])
            # A mixed row has the mixed number as its class.
            numbers = torch.lerp(y_replayed.double(), partners.double(), share.double())
            terms["replayed"] = class_information(similarities, self.rotated_labels(numbers).repeat(2), o.temperature)
            each = [F.cross_entropy(logits, labels, reduction="none") for labels in (y_replayed, partners)]
            terms["cross_entropy"] = torch.lerp(*each, share).mean()
        else:
            terms["cross_entropy"] = F.cross_entropy(logits, y)
        if seen:
            terms["seen_prototypes"] = prototype_loss(self.means_seen(outputs, rows), o.prototype_temperature)
        return terms

    def means_seen(self, outputs: Outputs, rows: Inputs) -> Tensor:
        """The classes' means over each view of the prototypes' rows, float32 [2, K, P]."""
        contrasted, of_seen, _ = self.view_sizes(rows)
        z = outputs.projections[contrasted : contrasted + of_seen].unflatten(0, (2, -1))
        return class_means(z, rows.labels[len(rows.labels) - rows.sizes[2] :], self.classes)

    def after_update(self, outputs: Outputs, rows: Inputs) -> None:
        if rows.sizes[2]:
            found, kept = self.means_seen(outputs, rows).detach().mean(0), self.network.prototypes
            kept.copy_(torch.where(self.model.latch.closed, kept, found))
