"""DER++ (Buzzega et al., NeurIPS 2020; docs/specification/baselines.md section 12)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, Inputs, Outputs, ReplayLearner, Rows, cross_entropy
from mose_fast.memory import ReplayMemory
from mose_fast.settings.run import BeyondOptions


@dataclass(frozen=True)
class DerppOptions(BaselineOptions, BeyondOptions):
    """Switches of DER++; ``buffer_batch`` is the size of each of its two draws."""

    augment: str = BaselineOptions.again(
        "augment", "pad_crop", "aimagelab/mammoth; the comparison keeps it (paper 5.1)"
    )
    alpha: float = knob(
        0.1,
        "weight of the distillation from stored logits",
        "mammoth's best on CIFAR; for table a choice",
        low=0,
        search=Search(0.05, 1, log=True, source="choice: around mammoth's best, 0.1 and 0.2"),
    )
    beta: float = knob(
        0.5,
        "weight of the cross-entropy on replayed rows",
        "mammoth's best on CIFAR; for table a choice",
        low=0,
        search=Search(0.25, 2, log=True, source="choice: around mammoth's best, 0.5 and 1"),
    )


@method(
    "derpp",
    options=DerppOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "aimagelab/mammoth @ e75a491, its best on CIFAR-100: passes separate, alpha 0.1, beta 0.5",
            passes="separate",
        ),
        "official": official_preset(
            "aimagelab/mammoth @ e75a491, its best on CIFAR-10 and CIFAR-100",
            batch=32,
            lr=0.03,
            weight_decay=0.0,
            buffer_batch=32,
            init="default",
            passes="separate",
        ),
    },
    year=2020,
    reference="Dark Experience Replay, Buzzega et al., NeurIPS 2020",
    cost=138 / 74,
)
class Derpp(ReplayLearner):
    """DER++: keeps each sample's logits, draws replayed rows to their old logits, and others to
    their labels.
    """

    sets = 3

    def build_memory(self) -> ReplayMemory:
        memory = super().build_memory()
        memory.keep("logits", (self.classes,), by_steps=True)
        return memory

    def plan(self, x: Tensor, y: Tensor) -> Rows:
        o = self.config.options
        none = y[:0]
        # A term without weight draws nothing, so that it leaves batch norm's statistics and the
        # other draw alone as well.
        distilled = self.retrieve(x, y) if o.alpha else none
        replayed = self.retrieve(x, y) if o.beta else none
        return self.rows(x, y, distilled, replayed)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        o = self.config.options
        incoming, distilled, replayed = outputs.logits.split(rows.sizes)
        y, _, y_replayed = rows.labels.split(rows.sizes)
        adjustment = self.adjustment((y, 1.0), (y_replayed, o.beta))
        terms = {}
        if len(incoming):
            terms["incoming"] = cross_entropy(incoming, y, adjustment)
        if len(distilled):
            # The mean is over all classes, those not seen yet included (mammoth).
            stored = self.memory.extras["logits"][rows.slots[: len(distilled)]]
            terms["distillation"] = o.alpha * F.mse_loss(distilled.float(), stored)
        if len(replayed):
            terms["replayed"] = o.beta * cross_entropy(replayed, y_replayed, adjustment)
        return terms

    def after_update(self, outputs: Outputs, rows: Inputs) -> None:
        """The logits beside the samples are those of the step before its update.

        A later plan may have overwritten their slots, but its step comes later too.
        """
        if rows.stored is not None:
            self._keep_logits(rows.stored, outputs.logits[: rows.sizes[0]].detach())

    def on_stored(self, x: Tensor, slots: Tensor) -> bool:
        """The logits of a batch that trains nothing are the network's own."""
        self._keep_logits(slots, self.model.outputs(x, self.after_step, student=True)[1][0])
        return True

    def _keep_logits(self, slots: Tensor, logits: Tensor) -> None:
        self.memory.write_extra("logits", slots, logits, unless=self.model.latch.closed)
