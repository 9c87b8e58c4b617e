"""SS-IL (Ahn et al., ICCV 2021; docs/specification/baselines.md section 18)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mose_fast.device import upload
from mose_fast.learner.about import knob, official_preset, sources_preset, table_preset
from mose_fast.learner.exemplar_learner import TEMPERATURES, ExemplarLearner, ExemplarOptions
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import REPLAY_LOSSES, Inputs, Outputs


@dataclass(frozen=True)
class SsilOptions(ExemplarOptions):
    temperature: float = knob(2.0, "temperature of the distillation", "SS-IL", above=0, search=TEMPERATURES)
    replay_loss: str = knob(
        "two_means",
        "mean of the cross-entropies",
        "pclucas14/AML, its port for streams: two_means; SS-IL: one_mean, of 128 new and 32 old rows",
        choices=REPLAY_LOSSES,
    )


@method(
    "ssil",
    options=SsilOptions,
    presets={
        "table": table_preset("new and old rows have a mean each, as in pclucas14/AML's port for streams"),
        "sources": sources_preset(
            "hongjoon0805/SS-IL-Official @ 8c32381: passes joint, selection first, temperature 2, replay_loss one_mean,"
            " current_classes task",
            replay_loss="one_mean",
            current_classes="task",
        ),
        # Its division of the learning rate by the number of tasks is left out.
        "official": official_preset(
            "hongjoon0805/SS-IL-Official @ 8c32381, its ImageNet settings",
            batch=128,
            lr=0.1,
            weight_decay=1e-4,
            buffer_batch=32,
            replay_loss="one_mean",
            current_classes="task",
        ),
    },
    year=2021,
    reference="SS-IL: Separated Softmax for Incremental Learning, Ahn et al., ICCV 2021",
    cost=(74 + 74 / 3) / 74,
)
class Ssil(ExemplarLearner):
    """SS-IL: old and new classes never compete in one softmax; a teacher's softmax within each old
    task is kept on all rows.
    """

    needs_boundaries = "has a softmax for each task"

    def on_task_end(self) -> None:
        self.data.own["tasks"] = [*self.data.own.get("tasks", []), list(self.current())]
        super().on_task_end()

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the masks ``tasks``, int64 [K], the task of each old class and a task of its own
        for every other.
        """
        tasks = torch.arange(self.classes, 2 * self.classes)
        for number, classes in enumerate(self.data.own.get("tasks", [])):
            tasks[classes] = number
        return super().extras(labels, sizes) | {"tasks": upload(tasks, self.device)}

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        extras, temperature = rows.extras, self.config.options.temperature
        terms = self.cross_entropies(outputs, rows, extras["current"], extras["old"])
        if extras["distils"]:
            logits, taught = outputs.logits.float(), self.teacher.outputs(rows.views).logits.float()
            terms["distillation"] = task_wise_distillation(logits, taught, extras["tasks"], temperature)
        return terms


def task_wise_distillation(student: Tensor, teacher: Tensor, tasks: Tensor, temperature: float) -> Tensor:
    """The divergence of the student's softmax from the teacher's within each task, summed over
    tasks: T^2 times the mean over rows of KL(teacher || student), of logits [N, K] / T. ``tasks``
    are int64 [K], by class. A class that is alone in its task adds nothing.
    """
    other = tasks[:, None] != tasks

    def log_softmax(logits: Tensor) -> Tensor:
        logits = logits / temperature
        return logits - logits[:, None].masked_fill(other, -torch.inf).logsumexp(2)

    q, p = log_softmax(teacher), log_softmax(student)
    return temperature**2 * (q.exp() * (q - p)).sum() / len(student)
