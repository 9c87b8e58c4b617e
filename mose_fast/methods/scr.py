"""SCR: Supervised Contrastive Replay (Mai et al., CVPR 2021 workshops;
docs/specification/baselines.md section 8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mose_fast.config import RECIPES, RunConfig, knob
from mose_fast.methods.registry import Preset, method
from mose_fast.methods.replay import BaselineOptions, Inputs, Outputs, ReplayLearner, Rows, sources_preset, table_preset
from mose_fast.ops.draws import Purpose, permutation
from mose_fast.ops.expert_losses import contrastive_loss

__all__ = ["Scr", "ScrOptions"]

# What the review multiplies gradients by (RaptorMai/online-continual-learning). Adam undoes it.
_REVIEW_WEIGHT = 0.1


@dataclass(frozen=True)
class ScrOptions(BaselineOptions):
    """Switches of SCR."""

    augment: str = knob(
        "scr",
        "recipe of the second view",
        "RaptorMai/online-continual-learning; the comparison keeps it (paper 5.1)",
        choices=RECIPES,
    )
    classifier: str = knob(
        "ncm",
        "what predict() classifies by",
        "SCR",
        choices={"ncm": "nearest class mean", "linear": "which is never trained"},
    )
    head: str = knob(
        "mlp", "projection", "SCR: mlp; MOSE repository: linear", choices={"mlp": "two layers", "linear": ""}
    )
    projection: int = knob(128, "width of the contrastive projection", "SCR", low=1)
    temperature: float = knob(0.07, "temperature of the contrastive loss", "SCR's README; paper 5.1", above=0)
    review: bool = knob(
        False, "at the end of a task, once through the memory with the same loss", "SCR's README: off; its configs: on"
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
        "official": Preset(
            "RaptorMai/online-continual-learning, the command in its README",
            {"optimiser": "sgd", "lr": 0.1, "weight_decay": 0.0, "buffer_batch": 100, "passes": "separate"},
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

    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = {
        **ReplayLearner.without_boundaries,
        ("review", True): "reviews the memory once, at the end of the whole stream",
    }

    def __init__(self, config: RunConfig, **stream: object) -> None:
        super().__init__(config, **stream)
        self._weight = 1.0

    def projection_head(self, feature_size: int) -> nn.Module:
        o = self.config.options
        if o.head == "linear":
            return nn.Linear(feature_size, o.projection)
        return nn.Sequential(nn.Linear(feature_size, feature_size), nn.ReLU(), nn.Linear(feature_size, o.projection))

    def plan(self, x: Tensor, y: Tensor) -> Rows | None:
        return None if self.memory.filled == 0 else super().plan(x, y)

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [2R, 3, H, W]: every row as it is, then every row augmented."""
        return torch.cat([self.views.normalise(rows.images), super().make_views(rows)])

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        return len(rows.labels), len(rows.labels)

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, float]:
        return {"weight": self._weight}

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        loss = contrastive_loss(outputs.projections, rows.labels.repeat(2), self.config.options.temperature)
        return {"contrastive": rows.extras["weight"] * loss}

    def on_task_end(self) -> None:
        """The review: one epoch over the memory in batches of ``buffer_batch``, of which an
        incomplete last one is left out.
        """
        config = self.config
        if not config.options.review or config.train_on == "final_memory":
            return
        order = permutation(config.seed, self.steps, self.memory.filled, Purpose.REVIEW, self.device)
        size = config.options.buffer_batch
        self._weight = _REVIEW_WEIGHT
        for batch in range(len(order) // size):
            self.rehearse(order[batch * size : (batch + 1) * size])
            self.after_step()
        self._weight = 1.0
