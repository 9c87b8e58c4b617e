"""BiC: Bias Correction (Wu et al., "Large Scale Incremental Learning", CVPR 2019;
docs/specification/baselines.md section 17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.config import ConfigError, RunConfig, knob
from mose_fast.device import upload
from mose_fast.knobs import Search
from mose_fast.methods.exemplars import TEMPERATURES, ExemplarLearner, ExemplarOptions, log_softmax_within
from mose_fast.methods.registry import Preset, method
from mose_fast.methods.replay import Inputs, Outputs, Rows, sources_preset, table_preset
from mose_fast.nn.corrected import CorrectedLinear
from mose_fast.ops.expert_losses import masked_cross_entropy

__all__ = ["Bic", "BicOptions"]


@dataclass(frozen=True)
class BicOptions(ExemplarOptions):
    """Switches of BiC."""

    temperature: float = knob(2.0, "temperature of the distillation", "BiC", above=0, search=TEMPERATURES)
    bias_lr: float = knob(
        0.01,
        "learning rate of the two numbers that correct the newest logits",
        "a choice; sairin1202: 1e-3",
        above=0,
        search=Search(1e-3, 0.1, log=True, source="choice: sairin1202's 1e-3 and a decade above ours"),
    )
    bias_steps: int = knob(
        250, "steps of Adam on all held-out images that fit them", "a choice; sairin1202: 250 epochs", low=1
    )


@method(
    "bic",
    options=BicOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "hongjoon0805/SS-IL-Official @ 8c32381, its BiC: passes joint, selection first, temperature 2,"
            " current_classes task; it fits the correction by SGD, which is not followed",
            current_classes="task",
        ),
        # Its loss, without lambda on the distillation, and its training on held-out images differ
        # from the paper and are not followed.
        "official": Preset(
            "sairin1202/BIC @ 56a34c4 (not by the paper's authors)",
            {"optimiser": "sgd", "lr": 0.1, "weight_decay": 2e-4, "bias_lr": 1e-3, "current_classes": "task"},
            batch=128,
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

    validation: ClassVar[float] = 0.1

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
        held, came = upload(torch.tensor(self.held_out()), self.device), list(self.data.own["came"])
        for label in self.data.incoming:
            came[label] += 1
        self.data.own["came"] = came
        return self.memory.insert(x, y, self.task, index, held)

    # A step

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """``seen``, ``old``: bool [K]; ``share``: the old classes' share of those seen, a scalar;
        ``distils``: whether there is a teacher to follow.
        """
        old = self.old if sizes[0] else []  # none in rehearsal
        seen = {*old, *self.current()} if sizes[0] else self.seen
        share = upload(torch.tensor(len(old) / len(seen)), self.device)
        return {"seen": self.mask(seen), "old": self.mask(old), "share": share, "distils": bool(old)}

    def forward(self, views: Tensor) -> Outputs:
        # The correction was that of the network before this step.
        self.network.classifier1.forget()
        return super().forward(views)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        extras, temperature = rows.extras, self.config.options.temperature
        loss = masked_cross_entropy(outputs.logits, rows.labels, extras["seen"])
        if not extras["distils"]:
            return {"cross_entropy": loss}
        taught = self.teacher.outputs(rows.views).logits
        q, p = (log_softmax_within(logits.float(), extras["old"], temperature) for logits in (taught, outputs.logits))
        distillation = -(q.exp() * p).sum(1).mean()
        return {"cross_entropy": (1 - extras["share"]) * loss, "distillation": extras["share"] * distillation}

    # The end of a task

    def on_task_end(self) -> None:
        super().on_task_end()
        if self.old and self.memory.held and self.config.train_on == "stream":
            self.correct()
            self.teacher.take(self.network)  # with its correction

    def correct(self) -> None:
        """Fits scale and shift of the newest classes' logits to the held-out images."""
        o, memory, head = self.config.options, self.memory, self.network.classifier1
        head.forget()
        logits = self.outputs(memory.images[memory.held_slots])[1][-1][:, self.seen].cpu()
        position = {c: number for number, c in enumerate(self.seen)}
        labels = torch.tensor([position[c] for c in memory.labels[memory.held_slots].tolist()])
        newest = torch.arange(len(self.seen)) >= len(self.old)
        numbers = torch.tensor([1.0, 0.0], requires_grad=True)
        adam = torch.optim.Adam([numbers], o.bias_lr)
        for _ in range(o.bias_steps):
            loss = F.cross_entropy(torch.where(newest, numbers[0] * logits + numbers[1], logits), labels)
            (numbers.grad,) = torch.autograd.grad(loss, [numbers])
            adam.step()
            self.after_step()
        head.scale[self.seen[len(self.old) :]], head.shift[self.seen[len(self.old) :]] = numbers.detach().to(
            self.device
        )
