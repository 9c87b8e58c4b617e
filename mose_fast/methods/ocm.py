"""OCM (Guo et al., ICML 2022; docs/specification/baselines.md section 9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mose_fast.learner.about import Preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import Inputs, Outputs, Rows, cross_entropy
from mose_fast.learner.rotated import RotatedLearner, RotatedOptions
from mose_fast.losses.information import class_information, view_information
from mose_fast.nn.cosine import directions


@method(
    "ocm",
    options=RotatedOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset("gydpku/OCM @ 7be9dfe: beta2 0.99", beta2=0.99),
        "official": Preset(
            "gydpku/OCM @ 7be9dfe, which has the shared augmentation", {"beta2": 0.99, "init": "default"}
        ),
    },
    year=2022,
    reference="Online Continual Learning through Mutual Information Maximization, Guo et al., ICML 2022",
    cost=(2 * 16 * 74 + 64 + (16 * 64 + 64) / 3) / 74,
)
class Ocm(RotatedLearner):
    """OCM: contrasts sixteen rotations of new and replayed rows, classifies replayed rows, and
    keeps projections and logits near those of the network of the task before.
    """

    without_boundaries = RotatedLearner.without_boundaries | {("first_task", "same"): "has no teacher"}
    not_taught = "contrasts rotated views, whose logits it never trains"
    teacher_mode = "train"

    def plan(self, x: Tensor, y: Tensor) -> Rows:
        return self.rows(x, y, y[:0] if self.alone else self.retrieve(x, y))

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the offsets ``earlier``, bool [K], the classes of earlier tasks; ``taught``,
        whether replayed rows have a teacher. Rows of memory alone have none: training on the final
        memory, nothing was trained before it.
        """
        earlier = self.mask(c for c in self.seen if c not in self.data.current)
        taught = self.teacher.present and min(sizes) > 0
        return {**super().extras(labels, sizes), "earlier": earlier, "taught": taught}

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [V, 3, H, W]: contrasted views of all rows; one augmented view of each classified
        row, a replayed one if there are any; where there is a teacher, another of each for it.
        """
        classified = rows.images[rows.sizes[0] :] if rows.sizes[1] else rows.images
        others = [classified] * (1 + rows.extras["taught"])
        return torch.cat(self.view_parts(rows, len(rows.images), *others))

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        return 2 * self.config.options.rotations * sum(rows.sizes), rows.sizes[1] or rows.sizes[0]

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        temperature = self.config.options.temperature
        (incoming, replayed), count = rows.sizes, sum(rows.sizes)
        y, y_replayed = map(self.rotated_labels, rows.labels.split(rows.sizes))
        logits = outputs.logits[self.view_sizes(rows)[0] :].float()
        terms = {"cross_entropy": cross_entropy(logits, rows.labels[incoming:] if replayed else rows.labels)}
        if incoming:
            similarities = self.similarities(outputs, count, 0, incoming, rows.extras["offsets"][0])
            terms["incoming"] = view_information(similarities, y.repeat(2), temperature)
        if replayed:
            similarities = self.similarities(outputs, count, incoming, count, rows.extras["offsets"][1])
            terms["replayed"] = class_information(similarities, y_replayed.repeat(2), temperature)
        if rows.extras["taught"]:
            own = self.contrasted(outputs.projections, count, incoming, count).chunk(2)[0]
            taught = self.teacher.outputs(self.contrasted(rows.views, count, incoming, count).chunk(2)[0])
            similarities = directions(own, 1e-8) @ directions(taught.projections, 1e-8).T
            terms["distillation"] = class_information(similarities, y_replayed, temperature)
            squares = (logits - self.teacher.outputs(rows.views[-replayed:]).logits.float()) ** 2
            earlier = rows.extras["earlier"]
            terms["regression"] = torch.where(earlier, squares, 0).sum() / (replayed * earlier.sum()).clamp_min(1)
        return terms
