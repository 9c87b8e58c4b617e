"""MIR (Aljundi et al., NeurIPS 2019; docs/specification/baselines.md section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.hooks import Planning
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, ReplayLearner, cross_entropy
from mose_fast.memory import highest
from mose_fast.settings.run import ConfigError


@dataclass(frozen=True)
class MirOptions(BaselineOptions):
    candidates: int = knob(
        200,
        "rows drawn uniformly, of which buffer_batch are replayed",
        "choice (docs/specification/baselines.md section 3), since the repository's 50 are fewer than the comparison's"
        " 64 replayed rows; repository: 50",
        low=1,
    )
    virtual_lr: float | None = knob(
        0.1,
        "learning rate of the virtual step, which is plain SGD",
        "choice (docs/specification/baselines.md section 3), since the comparison's Adam has 1e-3; repository: the"
        " optimiser's, which is 0.1",
        above=0,
        none="the optimiser's",
        search=Search(1e-3, 1, log=True, source="choice: from Adam's 1e-3 to a decade above the repository's 0.1"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.candidates < self.buffer_batch:
            raise ConfigError(
                f"options.candidates is {self.candidates}; wanted at least options.buffer_batch, {self.buffer_batch}, "
                "and more for a choice among them"
            )


@method(
    "mir",
    options=MirOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "optimass/Maximally_Interfered_Retrieval @ 35eda78: passes separate, replay_from others, virtual_lr null;"
            " candidates 320 are as many for each replayed row as its 50 for 10, since 50 are fewer than 64 (a choice)",
            passes="separate",
            replay_from="others",
            virtual_lr=None,
            candidates=320,
        ),
        "official": official_preset(
            "optimass/Maximally_Interfered_Retrieval @ 35eda78, its CIFAR-10 settings",
            lr=0.1,
            weight_decay=0.0,
            buffer_batch=10,
            candidates=50,
            virtual_lr=None,
            augment="none",
            init="default",
            passes="separate",
            replay_from="others",
        ),
    },
    year=2019,
    reference="Maximally Interfered Retrieval, Aljundi et al., NeurIPS 2019",
    # The virtual step's 10 rows and two forward passes of 200 candidates.
    cost=(74 + 10 + 2 * 200 / 3) / 74,
)
class Mir(ReplayLearner):
    """MIR: ER, but of many rows drawn from memory it replays those whose loss a step on the
    incoming batch alone would raise most.
    """

    planning = Planning.LOOKS_AT_MODEL
    not_captured = "looks at the network to choose the rows that it replays"

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        o = self.config.options
        candidates = self.draw(o.candidates)
        if len(candidates) <= o.buffer_batch:
            return candidates
        return highest(candidates, self.interference(x, y, candidates), o.buffer_batch)

    def interference(self, x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
        """How much a virtual SGD step on the incoming batch alone raises the loss of each candidate
        in ``slots``, int64 [S]: float32 [S].

        The incoming batch is seen in the views that the step itself will use, candidates as they
        are stored. Batch norm uses the statistics of each pass and leaves its running ones alone;
        the network's weights are not touched or copied.
        """
        o = self.config.options
        virtual_lr = o.lr if o.virtual_lr is None else o.virtual_lr
        names, parameters = zip(*self.network.named_parameters(), strict=True)
        incoming = self.make_views(self.rows(x, y, y[:0]))[: len(y)]
        images = self.views.normalise(self.memory.images[slots]).contiguous(memory_format=torch.channels_last)
        labels = self.memory.labels[slots]
        with self.model.precise(), batch_statistics(self.network):
            gradients = torch.autograd.grad(cross_entropy(self.forward(incoming).logits, y), self.model.leaves)
            with torch.no_grad():
                stepped = [p - virtual_lr * g for p, g in zip(parameters, gradients, strict=True)]
                # In float32 whatever the run's precision: the differences are small beside the
                # losses.
                before = self.network(images).logits[0]
                after = functional_call(self.network, dict(zip(names, stepped, strict=True)), (images,)).logits[0]
        return F.cross_entropy(after, labels, reduction="none") - F.cross_entropy(before, labels, reduction="none")


@contextmanager
def batch_statistics(network: nn.Module) -> Iterator[None]:
    """Batch norm in training mode uses each batch's statistics, but keeps none of them."""
    tracking = [
        module for module in network.modules() if isinstance(module, nn.BatchNorm2d) and module.track_running_stats
    ]
    for norm in tracking:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True
