"""ER-ACE: Experience Replay with Asymmetric Cross-Entropy (Caccia et al., "New Insights on Reducing
Abrupt Representation Change in Online Continual Learning", ICLR 2022;
docs/specification/baselines.md section 6.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mose_fast.config import knob
from mose_fast.methods.registry import Preset, method
from mose_fast.methods.replay import (
    BaselineOptions,
    Inputs,
    Outputs,
    ReplayLearner,
    cross_entropy,
    sources_preset,
    table_preset,
)
from mose_fast.nn.cosine import CosineClassifier

__all__ = ["ErAce", "ErAceOptions"]


@dataclass(frozen=True)
class ErAceOptions(BaselineOptions):
    """Switches of ER-ACE."""

    head: str = knob("cosine", "classifier", "pclucas14/AML", choices={"cosine": "scale 10", "linear": ""})


@method(
    "er-ace",
    options=ErAceOptions,
    presets={
        "table": table_preset("the paper's table does not have this method; all values are those of er-aml's"),
        "sources": sources_preset("pclucas14/AML @ 0c183e9: passes separate, head cosine", passes="separate"),
        # Its images are scaled to [-1, 1] and incoming rows not augmented; here as in all methods.
        "official": Preset(
            "pclucas14/AML @ 0c183e9, its augmented CIFAR settings",
            {
                "optimiser": "sgd",
                "lr": 0.1,
                "weight_decay": 0.0,
                "buffer_batch": 10,
                "augment": "pad_crop",
                "passes": "separate",
            },
        ),
    },
    year=2022,
    reference="ER-ACE, Caccia et al., ICLR 2022",
    cost=1.0,
)
class ErAce(ReplayLearner):
    """ER, but incoming rows are told apart from the classes of their own batch only, which leaves
    the features of old classes alone.
    """

    # Its cosines are computed in float32 from float32 weights.
    uses_shadows: ClassVar[bool] = False

    def classification_head(self, linear: nn.Linear) -> nn.Module:
        return CosineClassifier(linear.weight) if self.config.options.head == "cosine" else linear

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        """As those of ER; but beside replayed rows, incoming rows have the logits of the incoming
        batch's classes only.
        """
        incoming, replayed = outputs.logits.float().split(rows.sizes)
        y, y_replayed = rows.labels.split(rows.sizes)
        if not len(replayed):
            return {"incoming": cross_entropy(incoming, y)}
        terms = {}
        if len(y):
            present = (torch.arange(self.classes, device=y.device)[:, None] == y).any(1)
            terms["incoming"] = cross_entropy(incoming.masked_fill(~present, -torch.inf), y)
        return terms | {"replayed": cross_entropy(replayed, y_replayed)}
