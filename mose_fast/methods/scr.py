"""SCR (Mai et al., CVPR 2021 workshops; docs/specification/baselines.md section 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mose_fast.learner.about import knob, official_preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, Inputs, Outputs, ReplayLearner, Rows
from mose_fast.nn.heads import projection_mlp
from mose_fast.ops.expert_losses import contrastive_loss
from mose_fast.settings.run import CONTRASTIVE_TEMPERATURES


@dataclass(frozen=True)
class ScrOptions(BaselineOptions):
    augment: str = BaselineOptions.again(
        "augment",
        "scr",
        "RaptorMai/online-continual-learning; the comparison keeps it (paper 5.1)",
        doc="recipe of the second view",
    )
    classifier: str = BaselineOptions.again(
        "classifier", "ncm", "SCR; it never trains the head that linear and adjusted read"
    )
    head: str = knob(
        "mlp", "projection", "SCR: mlp; MOSE repository: linear", choices={"mlp": "two layers", "linear": ""}
    )
    projection: int = knob(128, "width of the contrastive projection", "SCR", low=1)
    temperature: float = knob(
        0.07, "temperature of the contrastive loss", "SCR's README; paper 5.1", above=0, search=CONTRASTIVE_TEMPERATURES
    )


@method(
    "scr",
    options=ScrOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "RaptorMai/online-continual-learning @ 6175ca0, the command in its README: passes separate, head mlp,"
            " temperature 0.07, review false",
            passes="separate",
        ),
        # Images are normalised here, which that repository leaves out: its networks see [0, 1].
        "official": official_preset(
            "RaptorMai/online-continual-learning, the command in its README",
            lr=0.1,
            weight_decay=0.0,
            buffer_batch=100,
            init="default",
            passes="separate",
        ),
    },
    year=2021,
    reference="Supervised Contrastive Replay, Mai et al., CVPR 2021 workshops",
    cost=2.0,
)
class Scr(ReplayLearner):
    """SCR: trains the representation alone, contrasting two views of incoming and replayed rows;
    the nearest class mean classifies.
    """

    not_taught = "never trains a logit"

    def projection_head(self, feature_size: int) -> nn.Module:
        o = self.config.options
        if o.head == "linear":
            return nn.Linear(feature_size, o.projection)
        return projection_mlp(feature_size, o.projection)

    def plan(self, x: Tensor, y: Tensor) -> Rows | None:
        return None if self.memory.filled == 0 else super().plan(x, y)

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [2R, 3, H, W]: every row as it is, then every row augmented."""
        return torch.cat([self.views.normalise(rows.images), super().make_views(rows)])

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        return len(rows.labels), len(rows.labels)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        loss = contrastive_loss(outputs.projections, rows.labels.repeat(2), self.config.options.temperature)
        return {"contrastive": loss}
