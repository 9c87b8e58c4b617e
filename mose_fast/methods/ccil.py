"""CCIL (Mittal et al., CVPR 2021 workshops; docs/specification/baselines.md section 16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.exemplar_learner import TEMPERATURES, ExemplarLearner, ExemplarOptions, log_softmax_within
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import Inputs, Outputs
from mose_fast.nn.cosine import CosineClassifier

_SOURCE = "sud0301/essentials_for_CIL"


@dataclass(frozen=True)
class CcilOptions(ExemplarOptions):
    selection: str = ExemplarOptions.again("selection", "random", _SOURCE)
    replay_from: str = ExemplarOptions.again("replay_from", "all", f"{_SOURCE}: all")
    scale: float = knob(
        10.0,
        "initial scale of the cosines, which is learned",
        f"choice: Adam cannot leave 1 in one pass; {_SOURCE}: 1",
        above=0,
    )
    temperature: float = knob(2.0, "temperature of the distillation", _SOURCE, above=0, search=TEMPERATURES)
    distillation: float = knob(
        5.0,
        "weight of the distillation, times the next",
        _SOURCE,
        low=0,
        search=Search(0.5, 50, log=True, source="choice: a decade around the repository's 5"),
    )
    power: float = knob(0.66, "power of the ratio of classes seen to new ones", _SOURCE, low=0)


@method(
    "ccil",
    options=CcilOptions,
    presets={
        "table": table_preset("the scale of the cosines starts at 10, the repository's at 1"),
        "sources": sources_preset(
            f"{_SOURCE} @ 50f7af3: passes separate, selection random, replay_from all, scale 1, temperature 2,"
            " distillation 5, power 0.66, current_classes task, optimiser_per_task true",
            passes="separate",
            scale=1.0,
            current_classes="task",
            optimiser_per_task=True,
        ),
        # Its learning rate of 0.01 after the first task and 120 epochs have no place here.
        "official": official_preset(
            f"{_SOURCE} @ 50f7af3, its CIFAR-100 settings",
            batch=100,
            lr=0.1,
            weight_decay=5e-4,
            optimiser_per_task=True,
            buffer_batch=100,
            augment="pad_crop",
            passes="separate",
            scale=1.0,
            current_classes="task",
        ),
    },
    year=2021,
    reference="Essentials for Class Incremental Learning, Mittal et al., CVPR 2021 workshops",
    # A forward pass of the teacher over all rows.
    cost=(74 + 74 / 3) / 74,
)
class Ccil(ExemplarLearner):
    """CCIL: incoming rows are told apart from their own task only, exemplars from all classes seen;
    both distil from the network before the task. Classification is by cosines.
    """

    # Its cosines are computed in float32 from float32 weights.
    uses_shadows = False

    def classification_head(self, linear: nn.Linear) -> CosineClassifier:
        return CosineClassifier(linear.weight, self.config.options.scale, learned_scale=True)

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the masks ``weight``, a scalar, of the distillation."""
        extras, o = super().extras(labels, sizes), self.config.options
        if extras["distils"]:
            current = self.current()
            extras["weight"] = self.scalar(o.distillation * (len({*self.old, *current}) / len(current)) ** o.power)
        return extras

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        extras, temperature = rows.extras, self.config.options.temperature
        terms = self.cross_entropies(outputs, rows, extras["current"], extras["known"])
        if extras["distils"]:
            taught = self.teacher.outputs(rows.views).logits
            pairs = zip(outputs.logits.split(rows.sizes), taught.split(rows.sizes), strict=True)
            kept = [mean_distillation(s.float(), t.float(), extras["old"], temperature) for s, t in pairs if len(t)]
            terms["distillation"] = extras["weight"] * torch.stack(kept).sum()
        return terms


def mean_distillation(student: Tensor, teacher: Tensor, old: Tensor, temperature: float) -> Tensor:
    """T^2 times the mean of q log(q / p) over rows *and old classes*, with the softmaxes q and p
    over old classes, bool [K], of the teacher's and the student's logits [N, K] divided by T: KL(q
    || p) divided by the number of old classes.
    """
    q, p = (log_softmax_within(logits, old, temperature) for logits in (teacher, student))
    return temperature**2 * (q.exp() * (q - p)).sum(1).mean() / old.sum()
