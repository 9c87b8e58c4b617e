"""GDumb (Prabhu et al., ECCV 2020; docs/specification/baselines.md section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from mose_fast.augment.cutmix import cutmix
from mose_fast.learner.about import Preset, Search, knob, sources_preset, table_preset
from mose_fast.learner.hooks import Planning
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import Inputs, ReplayLearner, Rows, cross_entropy
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.draws import Purpose, permutation
from mose_fast.settings.run import RECIPES, MethodOptions, RunConfig

# Of SGD, and the gradient's largest norm (drimpossible/GDumb).
_MOMENTUM = 0.9
_LARGEST_NORM = 10.0


@dataclass(frozen=True)
class GdumbOptions(MethodOptions):
    """Switches of GDumb, which has its own SGD: momentum 0.9, gradients of at most norm 10."""

    memory_policy: ClassVar[str] = "balanced"

    augment: str = MethodOptions.again(
        "augment", "simclr", "paper 5.1: the shared one; official: pad_crop", choices=RECIPES
    )
    buffer_batch: int = knob(
        16, "images a step of the training on the memory", "drimpossible/GDumb; for table a choice", low=1
    )
    lr: float = knob(
        0.05,
        "highest learning rate",
        "drimpossible/GDumb; for table a choice",
        above=0,
        search=Search(0.005, 0.5, log=True, source="choice: a decade around the repository's 0.05"),
    )
    lr_low: float = knob(
        5e-4, "learning rate towards which each cycle falls", "drimpossible/GDumb; for table a choice", above=0
    )
    weight_decay: float = knob(
        1e-6, "weight decay, added to the gradient", "drimpossible/GDumb; for table a choice", low=0
    )
    cutmix: float = knob(
        0.5,
        "probability with which a step mixes its images by CutMix",
        "drimpossible/GDumb; for table a choice",
        low=0,
        search=Search(0, 1, source="all that there are"),
    )
    passes: int = knob(
        64,
        "passes over the memory for an evaluation once all classes were seen",
        "official: 256; table: a choice, a quarter of it, which understates GDumb",
        low=1,
    )
    passes_before: int = knob(
        16,
        "passes for an evaluation while classes are still to come",
        "official: 256; table: a choice, a sixteenth of it, which understates GDumb",
        low=1,
    )
    classifier: str = MethodOptions.again("classifier", "linear", "GDumb")


@method(
    "gdumb",
    options=GdumbOptions,
    presets={
        "table": table_preset(
            "64 passes once all classes were seen and 16 before (a choice) are a quarter and a sixteenth of the"
            " repository's 256, so this preset understates GDumb; for a fair comparison set passes to 256 and"
            " passes_before to 64 or 256"
        ),
        "sources": sources_preset(
            "drimpossible/GDumb @ 4f412d7: passes 256, passes_before 256 (hours on a CPU), and its optimiser, which is"
            " part of it",
            passes=256,
            passes_before=256,
        ),
        "official": Preset(
            "drimpossible/GDumb @ 4f412d7, its CIFAR settings (256 passes at every evaluation: hours on a CPU)",
            {"augment": "pad_crop", "passes": 256, "passes_before": 256},
        ),
    },
    year=2020,
    reference="GDumb, Prabhu et al., ECCV 2020",
    # Of a whole run, since its steps train nothing: (9 * 16 + 64) passes over 1,000 slots against
    # ER's 5,000 * 74 images (CIFAR-100).
    cost=0.56,
)
class Gdumb(ReplayLearner):
    """GDumb: keeps a class-balanced memory; trains a new network on it for each evaluation."""

    planning = Planning.BATCH_BY_BATCH
    not_captured = "trains a new network for each evaluation, outside the loop"
    without_boundaries = MappingProxyType({})

    def __init__(self, config: RunConfig, **stream: object) -> None:
        super().__init__(config, **stream)
        # Stream items seen when the network was trained, -1 before.
        self.data.own["fitted"] = -1

    def build_optimiser(self, network: ExpertNetwork) -> torch.optim.Optimizer:
        o = self.config.options
        return torch.optim.SGD(network.parameters(), lr=o.lr, momentum=_MOMENTUM, weight_decay=o.weight_decay)

    def plan(self, x: Tensor, y: Tensor) -> None:
        """Incoming batches train nothing."""

    def prepare_evaluation(self) -> None:
        """Trains a new network on the memory, unless this was done since the last batch. It
        depends on the seed and on what was seen, not on the number of earlier evaluations.
        """
        o = self.config.options
        if self.data.own["fitted"] == self.memory.seen or self.memory.filled == 0:
            return
        self.model = self.build_model()
        passes = o.passes if len(self.seen) == self.classes else o.passes_before
        sequence = self.memory.seen << 24
        for number in range(passes):
            for group in self.model.optimiser.param_groups:
                group["lr"] = learning_rate(number, o.lr_low, o.lr)
            order = permutation(self.config.seed, sequence, self.memory.filled, Purpose.FIT, self.device)
            for slots in order.split(o.buffer_batch):
                self.step(self.inputs(self._memory_rows(slots, sequence)))
                self.after_step()
                sequence += 1
        self.data.own["fitted"] = self.memory.seen

    def rehearsal(self, slots: Tensor) -> Rows:
        """Memory slots as the rows of a step, at the highest learning rate."""
        self.data.own["fitted"] = self.memory.seen
        return self._memory_rows(slots, self.steps)

    def _memory_rows(self, slots: Tensor, sequence: int) -> Rows:
        images, labels = self.memory.images[slots], self.memory.labels[slots]
        return Rows(images, labels, (0, len(slots)), slots, sequence, {"sequence": sequence})

    def train_on(self, rows: Inputs) -> dict[str, Tensor]:
        config = self.config
        views, partners, share = cutmix(rows.views, config.options.cutmix, config.seed, rows.extras["sequence"])
        with self.model.step():
            logits = self.forward(views).logits
            whole, mixed_in = cross_entropy(logits, rows.labels), cross_entropy(logits, rows.labels[partners])
            loss = share * whole + (1 - share) * mixed_in

            def backward() -> None:
                loss.backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), _LARGEST_NORM)

            return {"loss": self.model.minimise(loss, backward)}


def learning_rate(number: int, low: float, high: float) -> float:
    """A pass's learning rate, from 0: a tenth of the highest, this, cosines of 2, 4, 8 passes."""
    if number < 2:
        return high * (0.1, 1.0)[number]
    length = 1 << (number.bit_length() - 1)
    return low + (high - low) * (1 + math.cos(math.pi * (number - length) / length)) / 2
