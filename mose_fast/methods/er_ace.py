"""ER-ACE (Caccia et al., ICLR 2022; docs/specification/baselines.md section 6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mose_fast.learner.about import knob, official_preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, Inputs, Outputs, ReplayLearner
from mose_fast.nn.cosine import CosineClassifier
from mose_fast.settings.run import BeyondOptions


@dataclass(frozen=True)
class ErAceOptions(BaselineOptions, BeyondOptions):
    head: str = knob("cosine", "classifier", "pclucas14/AML", choices={"cosine": "scale 10", "linear": ""})
    incoming_classes: str = knob(
        "batch",
        "classes that incoming rows are told apart from",
        "ER-ACE, the text: batch; pclucas14/AML: released",
        choices={
            "batch": "those of the batch, and all where nothing is replayed",
            "released": "those of the batch, and every class from the highest label seen on",
        },
    )


@method(
    "er-ace",
    options=ErAceOptions,
    presets={
        "table": table_preset("the paper's table does not have this method; all values are those of er-aml's"),
        "sources": sources_preset(
            "pclucas14/AML @ 7c92936: passes separate, head cosine, incoming_classes released",
            passes="separate",
            incoming_classes="released",
        ),
        # Its images are scaled to [-1, 1]; here as in all methods. It augments incoming rows, which
        # the commit 0c183e9 before it did not.
        "official": official_preset(
            "pclucas14/AML @ 7c92936, its augmented CIFAR settings",
            lr=0.1,
            weight_decay=0.0,
            buffer_batch=10,
            augment="pad_crop",
            init="default",
            passes="separate",
            incoming_classes="released",
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
    uses_shadows = False

    def classification_head(self, linear: nn.Linear) -> nn.Module:
        return CosineClassifier(linear.weight) if self.config.options.head == "cosine" else linear

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """``told_apart``: bool [K], the classes whose logits incoming rows have."""
        if not sizes[0]:
            return {}
        released, classes = self.config.options.incoming_classes == "released", range(self.classes)
        if released:
            allowed = {*self.data.incoming, *classes[max(self.seen) :]}
        else:
            allowed = self.data.incoming if sum(sizes[1:]) else classes
        return {"told_apart": self.mask(allowed)}

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        return self.cross_entropies(outputs, rows, rows.extras.get("told_apart"), None)
