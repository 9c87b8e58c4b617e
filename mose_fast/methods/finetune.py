"""Plain fine-tuning: what every method against forgetting must beat."""

from __future__ import annotations

from torch import Tensor

from mose_fast.learner.about import table_preset
from mose_fast.learner.learner import Learner
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, ReplayLearner


@method(
    "finetune",
    options=BaselineOptions,
    presets={"table": table_preset()},
    year=1989,
    reference="Lower bound; the forgetting of McCloskey and Cohen, Psychology of Learning and Motivation 24",
    cost=10 / 74,
)
class Finetune(ReplayLearner):
    """Lower bound: trains on the incoming batch alone.

    Its memory only serves the nearest-class-mean classifier.
    """

    without_boundaries = Learner.without_boundaries

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        return y[:0]
