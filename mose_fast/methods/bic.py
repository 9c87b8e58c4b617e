"""BiC: Bias Correction (Wu et al., CVPR 2019; docs/specification/baselines.md section 17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mose_fast.device import upload
from mose_fast.learner.about import knob, official_preset, sources_preset, table_preset
from mose_fast.learner.exemplar_learner import (
    REPLAY_LOSS_SOURCE,
    TEMPERATURES,
    ExemplarLearner,
    ExemplarOptions,
    log_softmax_within,
)
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import REPLAY_LOSSES, Inputs, Outputs, Rows
from mose_fast.nn.corrected import CorrectedLinear, fit_correction
from mose_fast.settings.run import ConfigError, RunConfig

_SOURCE = "wuyuebupt/LargeScaleIncrementalLearning"


@dataclass(frozen=True)
class BicOptions(ExemplarOptions):
    temperature: float = knob(2.0, "temperature of the distillation", "BiC", above=0, search=TEMPERATURES)
    replay_loss: str = knob("two_means", "mean of the cross-entropy", REPLAY_LOSS_SOURCE, choices=REPLAY_LOSSES)
    shift_penalty: float = knob(
        0.1,
        "half the weight of the squared shift when the correction is fitted",
        f"{_SOURCE}: 0.1; sairin1202/BIC: 0",
        low=0,
    )


@method(
    "bic",
    options=BicOptions,
    presets={
        "table": table_preset("new and old rows have a mean each, where the repositories have batches mostly new"),
        # Its loss, without lambda on the distillation, and its training on held-out images differ
        # from the paper and are not followed; nor is the end of its fit before the minimum.
        "sources": sources_preset(
            "sairin1202/BIC @ 56a34c4 (not by the paper's authors): passes joint, selection first, temperature 2,"
            " replay_loss one_mean, shift_penalty 0, current_classes task, optimiser_per_task true",
            replay_loss="one_mean",
            shift_penalty=0.0,
            current_classes="task",
            optimiser_per_task=True,
        ),
        # Its weight decay is the tenfold in the first of ten tasks, and falls to this one.
        "official": official_preset(
            f"{_SOURCE} @ 739b628, its ImageNet settings",
            batch=256,
            lr=0.1,
            weight_decay=1e-4,
            optimiser_per_task=True,
            selection="greedy",
            replay_loss="one_mean",
            current_classes="task",
        ),
    },
    year=2019,
    reference="Large Scale Incremental Learning, Wu et al., CVPR 2019",
    cost=(74 + 74 / 3) / 74,
)
class Bic(ExemplarLearner):
    """BiC: distils from the network before the task; two numbers, fitted on held-out images when
    the task ends, correct the logits of its classes.
    """

    validation = 0.1

    def __init__(self, config: RunConfig, **stream: Any) -> None:
        if config.epochs > 1 and config.train_on == "stream":
            raise ConfigError(
                f"epochs is {config.epochs}, but method 'bic' knows which images it holds out only when they come for"
                " the first time; wanted 1"
            )
        super().__init__(config, **stream)

    def classification_head(self, linear: nn.Linear) -> CorrectedLinear:
        return CorrectedLinear(linear)

    # Rows

    def begin_task(self, task: int, classes: Sequence[int] | None = None) -> None:
        super().begin_task(task, classes)
        self.data.own["came"] = [0] * self.classes

    def held_out(self) -> list[bool]:
        """Whether each image of the batch that came last is kept from training, for the fit: the
        first ones of each class in the task, as many as it has slots for.
        """
        came, held = list(self.data.own["came"]), []
        known = {*self.seen, *(self.data.task_classes or [])}
        for label in self.data.incoming:
            _, wanted = self.memory.quota(self.seen.index(label), len(known))
            held.append(came[label] < wanted)
            came[label] += 1
        return held

    def plan(self, x: Tensor, y: Tensor) -> Rows | None:
        kept = [row for row, held in enumerate(self.held_out()) if not held]
        if not kept:
            return None
        if len(kept) < len(y):
            rows = upload(torch.tensor(kept), self.device)
            x, y = x[rows], y[rows]
        return super().plan(x, y)

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        slots, came = super().store(x, y, index), list(self.data.own["came"])
        for label in self.data.incoming:
            came[label] += 1
        self.data.own["came"] = came
        return slots

    # A step

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the masks ``share``, a scalar: the old classes' share of those known."""
        extras = super().extras(labels, sizes)
        if extras["distils"]:
            extras["share"] = self.scalar(len(self.old) / len({*self.old, *self.current()}))
        return extras

    def forward(self, views: Tensor) -> Outputs:
        # The correction was that of the network before this step.
        self.network.classifier1.forget()
        return super().forward(views)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        extras, temperature = rows.extras, self.config.options.temperature
        terms = self.cross_entropies(outputs, rows, extras["known"])
        if not extras["distils"]:
            return terms
        taught = self.teacher.outputs(rows.views).logits
        q, p = (log_softmax_within(logits.float(), extras["old"], temperature) for logits in (taught, outputs.logits))
        distillation = -(q.exp() * p).sum(1).mean()
        terms = {name: (1 - extras["share"]) * term for name, term in terms.items()}
        return {**terms, "distillation": extras["share"] * distillation}

    # The end of a task

    def on_task_end(self) -> None:
        super().on_task_end()
        if self.old and self.memory.held and self.config.train_on == "stream":
            self.correct()
            self.teacher.take(self.network)  # with its correction

    def correct(self) -> None:
        """Fits scale and shift of the newest classes' logits to the held-out images."""
        memory, head = self.memory, self.network.classifier1
        head.forget()
        logits = self.outputs(memory.images[memory.held_slots])[1][-1][:, self.seen].cpu()
        position = {c: number for number, c in enumerate(self.seen)}
        labels = torch.tensor([position[c] for c in memory.labels[memory.held_slots].tolist()])
        newest = torch.arange(len(self.seen)) >= len(self.old)
        scale, shift = fit_correction(logits, labels, newest, self.config.options.shift_penalty)
        head.scale[self.seen[len(self.old) :]], head.shift[self.seen[len(self.old) :]] = scale, shift
