"""IL2A (Zhu et al., NeurIPS 2021; docs/specification/baselines.md section 13)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mose_fast.augment.class_mixing import Mixes, draw_mixes
from mose_fast.device import upload
from mose_fast.learner.about import Preset, Search, knob, sources_preset, table_preset
from mose_fast.learner.exemplar_learner import ExemplarLearner, ExemplarOptions
from mose_fast.learner.model import Model
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import Inputs, Outputs, Rows
from mose_fast.losses.semantic_augmentation import class_statistics, semantic_augmentation
from mose_fast.ops.draws import Purpose, random_words, uniform_below32
from mose_fast.ops.expert_losses import masked_cross_entropy
from mose_fast.settings.run import ConfigError, RunConfig

_SOURCE = "Impression2805/IL2A"
_RANGE = Search(0.1, 10, log=True, source="choice: a decade around ours, up to the repository's 10")
_WEIGHT = f"choice: a tenth of {_SOURCE}'s 10, which holds a network of one pass to what it was"


@dataclass(frozen=True)
class Il2aOptions(ExemplarOptions):
    selection: str = ExemplarOptions.again("selection", "random", f"choice; {_SOURCE}: none")
    replay_from: str = ExemplarOptions.again(
        "replay_from", "all", f"choice: else nothing lets a new class win against an old one; {_SOURCE}: no replay"
    )
    temperature: float = knob(0.1, "what logits are divided by", _SOURCE, above=0)
    mixes: int = knob(4, "rounds of mixing incoming rows with others", _SOURCE, low=0)
    least_share: float = knob(
        0.4, "least share of an image in a mixed row, else half", f"{_SOURCE}: 0.3 on Tiny-ImageNet", low=0, below=0.5
    )
    largest_task: int = knob(
        10, "classes of the largest task, which size the head of mixed classes", "10 classes a task, paper 5.1", low=2
    )
    distillation: float = knob(1.0, "weight of the feature distillation", _WEIGHT, low=0, search=_RANGE)
    semantic: float = knob(1.0, "weight of the augmented class means", _WEIGHT, low=0, search=_RANGE)
    ratio: float = knob(2.5, "how far class means are augmented by covariances", _SOURCE, low=0)
    replay: float = knob(
        1.0,
        "weight of the cross-entropy on replayed rows; with 0 none are drawn",
        f"choice; {_SOURCE}: 0, since it keeps no images",
        low=0,
    )
    brightness: float = knob(
        0.0,
        "largest change of a view's brightness, as a share; only with augment pad_crop",
        f"{_SOURCE}: 63 / 255",
        low=0,
        below=1,
    )
    prototypes: int = knob(64, "class means drawn in a step", f"{_SOURCE}: its batch size, 64", low=1)


@method(
    "il2a",
    options=Il2aOptions,
    presets={
        "table": table_preset(
            "the paper does not say how replay was added to a method without exemplars; the weights of its"
            " distillation and of its class means are a tenth of the repository's"
        ),
        "sources": sources_preset(
            f"{_SOURCE} @ 0f849f1: distillation 10, semantic 10, current_classes task, optimiser_per_task true",
            distillation=10.0,
            semantic=10.0,
            current_classes="task",
            optimiser_per_task=True,
        ),
        # Its 101 epochs and a first task of 50 classes have no place here.
        "official": Preset(
            f"{_SOURCE} @ 0f849f1, its CIFAR-100 settings",
            {
                "weight_decay": 2e-4,
                "optimiser_per_task": True,
                "augment": "pad_crop",
                "brightness": 63 / 255,
                "current_classes": "task",
                "distillation": 10.0,
                "semantic": 10.0,
                "replay": 0.0,
            },
            batch=64,
        ),
    },
    year=2021,
    reference="Class-Incremental Learning via Dual Augmentation, Zhu et al., NeurIPS 2021",
    # 10 incoming, about 36 mixed and 64 replayed rows, and a forward pass of the teacher over all.
    cost=(110 + 110 / 3) / 74,
)
class Il2a(ExemplarLearner):
    """IL2A: mixes pairs of new classes into further classes, keeps features, and augments the means
    of old classes by their covariances; here with replayed rows.
    """

    not_taught = "classifies mixed views, whose raw rows are two"
    needs_task = True

    # The augmented means need the classifier's float32 weights.
    uses_shadows = False

    @classmethod
    def statistics_bytes(cls, config: RunConfig, classes: int) -> int:
        size = 8 * config.width
        return 4 * classes * size * (size + 1)

    def build_model(self) -> Model:
        model = super().build_model()
        size = model.network.feature_size
        self.keep("means", torch.zeros(self.classes, size), written="tasks")
        self.keep("covariances", torch.zeros(self.classes, size, size), written="tasks")
        return model

    def projection_head(self, feature_size: int) -> nn.Module:
        """The head of mixed classes: an output for each pair of classes of a task."""
        m = self.config.options.largest_task
        head = nn.Linear(feature_size, m * (m - 1) // 2)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return head

    def plan(self, x: Tensor, y: Tensor) -> Rows:
        rows, current, o = super().plan(x, y), self.data.current, self.config.options
        if len(current) > o.largest_task:
            raise ConfigError(
                f"options.largest_task is {o.largest_task}, but task {self.task} has {len(current)} classes or more;"
                " wanted at least as many"
            )
        places = [current.index(label) for label in self.data.incoming]
        mixes = draw_mixes(places, self.config.seed, rows.sequence, rounds=o.mixes, least=o.least_share)
        return rows._replace(extras={**rows.extras, "mixes": Mixes(*(upload(part, self.device) for part in mixes))})

    def retrieve(self, x: Tensor, y: Tensor) -> Tensor:
        return super().retrieve(x, y) if self.config.options.replay else y[:0]

    def extras(self, labels: Tensor, sizes: tuple[int, ...]) -> dict[str, Any]:
        """Beside the masks ``mixes``, none yet; ``outputs``, bool [K + P], the known classes and
        the task's pairs of classes; ``drawn``, int64, old classes whose means are used.
        """
        extras, o = super().extras(labels, sizes), self.config.options
        extras["mixes"] = Mixes(labels[:0], labels[:0], labels[:0].float(), labels[:0])
        if sizes[0]:
            pairs = torch.arange(o.largest_task * (o.largest_task - 1) // 2)
            m = min(len(self.current()), o.largest_task)
            extras["outputs"] = torch.cat([extras["known"], upload(pairs < m * (m - 1) // 2, self.device)])
        if extras["distils"]:
            word = random_words(self.config.seed, self.data.sequence, o.prototypes, Purpose.RETRIEVAL)[0]
            drawn = torch.tensor(self.old)[uniform_below32(word, torch.full_like(word, len(self.old)))]
            extras["drawn"] = upload(drawn, self.device)
        return extras

    def make_views(self, rows: Rows) -> Tensor:
        """float32 [V, 3, H, W]: a view of each incoming row, mixed rows, then replayed ones."""
        incoming, replayed = super().make_views(rows).split(rows.sizes)
        return torch.cat([incoming, rows.extras["mixes"].mix(incoming), replayed])

    def view_sizes(self, rows: Inputs) -> tuple[int, ...]:
        incoming, replayed = rows.sizes
        return incoming + len(rows.extras["mixes"].pairs), replayed

    def losses(self, outputs: Outputs, rows: Inputs) -> dict[str, Tensor]:
        o, extras, terms = self.config.options, rows.extras, {}
        known, given, (new, replayed) = extras["known"], rows.sizes[0], self.view_sizes(rows)
        logits = outputs.logits.float() / o.temperature
        if new:
            wide = torch.cat([logits, outputs.projections.float() / o.temperature], 1)[:new]
            labels = torch.cat([rows.labels[:given], self.classes + extras["mixes"].pairs])
            terms["incoming"] = masked_cross_entropy(wide, labels, extras["outputs"])
        if replayed:
            weight = o.replay if new else 1.0
            terms["replayed"] = weight * masked_cross_entropy(logits[new:], rows.labels[given:], known)
        if extras["distils"]:
            taught, head = self.teacher.outputs(rows.views).features.float(), self.network.classifier1
            # One norm of all rows' differences, which grows with their number.
            terms["distillation"] = o.distillation * torch.linalg.vector_norm(outputs.features.float() - taught)
            stored = head.weight, head.bias, self.means, self.covariances, extras["drawn"], known
            terms["semantic"] = o.semantic * semantic_augmentation(*stored, ratio=o.ratio, temperature=o.temperature)
        return terms

    def on_task_end(self) -> None:
        """Notes each class's mean and covariance; resets the head for mixed classes."""
        for label, *statistics in class_statistics(self.features_of_task(), self.memory.buffer.labels):
            self.means[label], self.covariances[label] = statistics
        super().on_task_end()
        for parameter in self.network.projection1.parameters():
            for tensor in (parameter.data, *self.model.optimiser.state.get(parameter, {}).values()):
                tensor.zero_()

    def features_of_task(self) -> Tensor:
        """Features float32 [N, D] of one view of each image of the task, in evaluation mode."""
        images, sequence, found = self.memory.buffer.images, self.memory.seen << 24, []
        self.network.eval()
        for part in images.split(self.evaluation_batch):
            labels = torch.zeros(len(part), dtype=torch.int64, device=self.device)
            rows = Rows(part, labels, (0, len(part)), labels, sequence + len(found), self.extras(labels, (0, 0)))
            with torch.no_grad(), self.model.precise():
                found.append(self.model.forward(self.make_views(rows)).features[0].float())
            self.after_step()
        return torch.cat(found)
