"""ASER (Shim et al., AAAI 2021; docs/specification/baselines.md section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.hooks import Planning
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, ReplayLearner
from mose_fast.memory.shapley import ShapleyMemory


@dataclass(frozen=True)
class AserOptions(BaselineOptions):
    replay_loss: ClassVar[str] = "one_mean"

    memory_policy: str = knob(
        "shapley", "what the memory keeps", "ASER", choices={"shapley": "samples of high Shapley value"}
    )
    neighbours: int = knob(3, "k of the nearest neighbours", "repository", low=1)
    per_class: float = knob(
        2.0,
        "samples of each class among candidates and evaluation points, rounded down; exactly for candidates of an"
        " update",
        "the repository's configuration for CIFAR-100 (for the comparison an assumption); its README: 1.5",
        low=1,
        cost=True,
        search=Search(1, 4, source="choice: around the repository's 2 and its README's 1.5"),
    )
    score: str = knob(
        "asvm",
        "score by which memory rows are replayed, from their Shapley values",
        "repository's README",
        choices={
            "asvm": "mean value for the memory minus mean for incoming rows",
            "asv": "maximum minus minimum",
            "neg_sv": "minus the latter's sum",
        },
    )


@method(
    "aser",
    options=AserOptions,
    presets={
        "table": table_preset(
            "once its memory has turned an item away, it replays at most per_class rows of each stored class: 20, 40"
            " and 60 in the first three of ten tasks of CIFAR-100, not 64"
        ),
        "sources": sources_preset(
            "RaptorMai/online-continual-learning @ 6175ca0, the command in its README for CIFAR-100: per_class 1.5,"
            " neighbours 3, score asvm",
            per_class=1.5,
        ),
        # Images are normalised here, which that repository leaves out: its networks see [0, 1].
        "official": official_preset(
            "RaptorMai/online-continual-learning @ 6175ca0, the command in its README for CIFAR-100",
            lr=0.1,
            weight_decay=0.0,
            buffer_batch=10,
            per_class=1.5,
            augment="none",
            init="default",
        ),
    },
    year=2021,
    reference="Adversarial Shapley value Experience Replay, Shim et al., AAAI 2021",
    # With 100 classes: 200 candidates, 200 points and 10 incoming rows forward, for the replay and
    # once more for the update.
    cost=(74 + 2 * 410 / 3) / 74,
)
class Aser(ReplayLearner):
    """ASER: ER that replays and keeps samples by their Shapley value for a nearest-neighbour
    classifier on the network's features.
    """

    planning = Planning.LOOKS_AT_MODEL
    not_captured = "looks at the network to choose the rows that it replays and stores"
    memory: ShapleyMemory

    def build_memory(self) -> ShapleyMemory:
        o = self.config.options
        return ShapleyMemory(
            self.config.memory,
            self.image_size,
            classes=self.classes,
            neighbours=o.neighbours,
            per_class=o.per_class,
            seed=self.config.seed,
            device=self.device,
        )

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        """Uniform while the memory has not turned anything away."""
        o = self.config.options
        if self.memory.seen <= self.memory.capacity:
            return super().retrieve(x, y)
        others = self.task if o.replay_from == "others" else None
        return self.memory.retrieve(x, y, o.buffer_batch, o.score, self.features, self.steps, others=others)

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return self.memory.offer(x, y, self.task, index, self.features)

    def features(self, images: Tensor) -> Tensor:
        """Features float32 [N, D] of raw images, in evaluation mode."""
        return self.outputs(images, student=True)[0][0]
