"""Co2L (Cha et al., ICCV 2021; docs/specification/baselines.md section 14)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.exemplar_learner import ExemplarLearner, ExemplarOptions
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import Inputs, Outputs, Rows
from mose_fast.nn import ExpertNetwork
from mose_fast.nn.heads import projection_mlp
from mose_fast.nn.probe import fit_probe
from mose_fast.settings.run import ConfigError, RunConfig

_SOURCE = "chaht01/Co2L"
# The temperature that the contrastive loss is scaled against (chaht01/Co2L).
_BASE_TEMPERATURE = 0.07
# The share of the learning rate that a cosine ends at, and the rate that a warm-up starts from
# (chaht01/Co2L).
_LEAST_SHARE, _WARM_UP_FROM = 1e-3, 0.01


@dataclass(frozen=True)
class Co2lOptions(ExemplarOptions):
    # The classes of the task appear in a loss only as those of its rows.
    current_classes: ClassVar[str] = "seen"

    selection: str = ExemplarOptions.again("selection", "random", _SOURCE)
    projection: int = knob(128, "width of the contrastive projection", _SOURCE, low=1)
    temperature: float = knob(
        0.5,
        "temperature of the contrastive loss",
        f"{_SOURCE}'s README",
        above=0,
        search=Search(0.05, 1, log=True, source="choice: from SCR's 0.07 to above the README's 0.5"),
    )
    distillation: float = knob(
        1.0,
        "weight of the relation distillation",
        f"{_SOURCE}'s README",
        low=0,
        search=Search(0.1, 10, log=True, source="choice: a decade around the README's 1"),
    )
    student_temperature: float = knob(0.2, "temperature of the network's relations", f"{_SOURCE}'s README", above=0)
    teacher_temperature: float = knob(0.01, "temperature of the teacher's relations", f"{_SOURCE}'s README", above=0)
    schedule: str = knob(
        "constant",
        "learning rate within a task",
        f"paper 5.1: constant; {_SOURCE}'s README: cosine",
        choices={"constant": "", "cosine": "falls by half a cosine to a thousandth"},
    )
    warm_up: float = knob(
        0.0,
        "share of a task's steps in which the learning rate rises from 0.01 to the schedule's",
        f"paper 5.1: none; {_SOURCE}: 10 of 100 epochs for batches of more than 256",
        low=0,
        below=1,
    )
    probe_passes: int = knob(100, "passes over the memory's features that fit the linear classifier", _SOURCE, low=1)
    probe_lr: float = knob(
        0.1, "its highest learning rate", f"{_SOURCE}: 0.1 by default, 1 in its README; a choice", above=0
    )


@method(
    "co2l",
    options=Co2lOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(f"{_SOURCE} @ 3af7064, its README: probe_lr 1.0", probe_lr=1.0),
        # Its 500 epochs for the first task and 100 for others, and a classifier that also sees all
        # images of the current task, have no place here.
        "official": official_preset(
            f"{_SOURCE} @ 3af7064, the CIFAR-10 settings in its README",
            batch=512,
            lr=0.5,
            momentum=0.9,
            schedule="cosine",
            warm_up=0.1,
            weight_decay=1e-4,
            augment="scr",
            probe_lr=1.0,
        ),
    },
    year=2021,
    reference="Contrastive Continual Learning, Cha et al., ICCV 2021",
    # A second view of each row, and a forward pass of the teacher over all views.
    cost=(148 + 148 / 3) / 74,
)
class Co2l(ExemplarLearner):
    """Co2L: contrasts rows of the current task with all others, keeps the similarities between
    views that the network had before it, and fits a linear classifier to the memory's features.
    """

    not_averaged = "fits its classifier to the memory when it is asked to predict"

    # In training mode also in chaht01/Co2L, where it is copied after training and never switched.
    teacher_mode = "train"

    def __init__(self, config: RunConfig, **stream: object) -> None:
        super().__init__(config, **stream)
        # Steps taken and stream items seen when the classifier was fitted.
        self.data.own["fitted"] = None

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate changes."""
        o = self.config.options
        return o.schedule != "constant" or o.warm_up > 0

    def build_optimiser(self, network: ExpertNetwork) -> torch.optim.Optimizer:
        optimiser = super().build_optimiser(network)
        if self.scheduled:
            # A tensor, so that a captured step can fill it.
            for group in optimiser.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], device=self.device)
        return optimiser

    def projection_head(self, feature_size: int) -> nn.Module:
        return projection_mlp(feature_size, self.config.options.projection)

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [2R, 3, H, W]: every row augmented, then every row augmented once more."""
        return super().make_views(rows._replace(images=torch.cat([rows.images, rows.images])))

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        return len(rows.labels), len(rows.labels)

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the masks ``lr``, a scalar, the learning rate, if it changes."""
        rate = {"lr": self.scalar(self.learning_rate(sizes))} if self.scheduled else {}
        return super().extras(labels, sizes) | rate

    def learning_rate(self, sizes: tuple[int, ...]) -> float:
        """The learning rate of the step that is planned next, on sets of rows of these sizes;
        ConfigError if it needs to know how many batches the task has.
        """
        o, batches = self.config.options, self.data.task_batches
        if not sizes[0]:
            return o.lr
        if batches is None:
            raise ConfigError(
                f"options.schedule is {o.schedule!r} and warm_up {o.warm_up}, but the number of the task's batches is"
                " unknown; wanted learner.data.task_batches set after begin_task, as a run does, or schedule"
                " 'constant' and warm_up 0"
            )
        return learning_rate(self.data.task_step, batches * o.iterations, o)

    def train_on(self, rows: Inputs) -> dict[str, Tensor]:
        if self.scheduled:
            for group in self.model.optimiser.param_groups:
                group["lr"].copy_(rows.extras["lr"])
        return super().train_on(rows)

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        o, z = self.config.options, outputs.projections
        labels = rows.labels.repeat(2)
        anchors = rows.extras["current"][labels]  # those of the current task; of rows of memory alone all
        terms = {"contrastive": asymmetric_contrastive_loss(z, labels, anchors, o.temperature)}
        if rows.extras["distils"]:
            taught = self.teacher.outputs(rows.views).projections
            terms["distillation"] = o.distillation * relation_distillation(
                z, taught, o.student_temperature, o.teacher_temperature
            )
        return terms

    def on_task_end(self) -> None:
        super().on_task_end()
        # The memory has changed.
        self.data.own["fitted"] = None

    def prepare_evaluation(self) -> None:
        """Fits the linear classifier to the memory's features, unless this was done since the last
        change of network or memory. It depends on neither earlier fits nor their number.
        """
        o, state, filled = self.config.options, [self.steps, self.memory.seen], self.memory.filled
        if self.data.own["fitted"] == state or filled == 0:
            return
        features = self.outputs(self.memory.images[:filled])[0][0]
        head = self.network.classifier1
        weight, bias = fit_probe(
            features,
            self.memory.labels[:filled],
            self.classes,
            passes=o.probe_passes,
            lr=o.probe_lr,
            seed=self.config.seed,
            sequence=self.memory.seen << 24,
            after_step=self.after_step,
        )
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        self.model.weights_were_set()
        self.data.own["fitted"] = state


def similarities(projections: Tensor, temperature: float) -> Tensor:
    """Cosine similarities / temperature of projections [V, P], float32 [V, V]; -inf to itself."""
    z = F.normalize(projections.float(), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return (z @ z.T / temperature).masked_fill(itself, -math.inf)


def asymmetric_contrastive_loss(projections: Tensor, labels: Tensor, anchors: Tensor, temperature: float) -> Tensor:
    """The supervised contrastive loss of ``anchors``, bool [V], against all other views, with
    projections float [V, P], not normalised; each anchor's label must be that of another view too.
    tau / 0.07 times the mean over all V views, of which those that are no anchors count 0.
    """
    positive = (labels[:, None] == labels).fill_diagonal_(False)
    each = -torch.where(positive, similarities(projections, temperature).log_softmax(1), 0).sum(1) / positive.sum(1)
    return temperature / _BASE_TEMPERATURE * torch.where(anchors, each, 0).mean()


def relation_distillation(projections: Tensor, taught: Tensor, temperature: float, taught_temperature: float) -> Tensor:
    """Cross-entropy between the teacher's and the network's distribution of each view's
    similarities to all others, both of projections float [V, P]; the mean over views.
    """
    wanted = similarities(taught, taught_temperature).softmax(1)
    found = similarities(projections, temperature).log_softmax(1)
    itself = torch.eye(len(wanted), dtype=torch.bool, device=wanted.device)
    return -torch.where(itself, 0, wanted * found).sum(1).mean()


def learning_rate(step: int, steps: int, options: Co2lOptions) -> float:
    """The learning rate of a task's step, counted from 1, by ``lr``, ``schedule``, ``warm_up``."""

    def scheduled(share: float) -> float:
        if options.schedule == "constant":
            return options.lr
        return options.lr * (_LEAST_SHARE + (1 - _LEAST_SHARE) * (1 + math.cos(math.pi * min(share, 1))) / 2)

    warming = options.warm_up * steps
    if step > warming:
        return scheduled(step / steps)
    return _WARM_UP_FROM + (step - 1) / warming * (scheduled(options.warm_up) - _WARM_UP_FROM)
