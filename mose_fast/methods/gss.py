"""GSS (Aljundi et al., NeurIPS 2019; docs/specification/baselines.md section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from mose_fast.learner.about import Search, knob, official_preset, sources_preset, table_preset
from mose_fast.learner.hooks import Planning
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, ReplayLearner, cross_entropy
from mose_fast.memory.gradient import GradientMemory

# Score of the samples that arrive first, which there is nothing to compare with (repository).
_FIRST_SCORE = 0.1


@dataclass(frozen=True)
class GssOptions(BaselineOptions):
    memory_policy: str = knob(
        "gradients", "what the memory keeps", "GSS", choices={"gradients": "samples whose gradients differ"}
    )
    reference_batches: int = knob(
        10, "memory batches whose gradients incoming samples are compared with", "repository", low=1
    )
    reference_batch: int = knob(10, "rows of each of them", "repository: as many as it replays, 10", low=1)
    threshold: float = knob(
        0.0,
        "a full memory takes nothing of a batch whose gradient is at least this similar to one of them",
        "repository",
        low=-1,
        search=Search(-0.5, 0.5, source="choice: around the repository's 0"),
    )
    steps: str = knob(
        "joint",
        "training steps for a batch, in each iteration",
        "choice (docs/specification/baselines.md section 4), as RaptorMai/online-continual-learning;"
        " repository: alternate",
        choices={"joint": "one on incoming and replayed rows", "alternate": "one on each"},
    )


@method(
    "gss",
    options=GssOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "rahafaljundi/Gradient-based-Sample-Selection @ ca4160a: steps alternate, reference_batches 10,"
            " reference_batch 64, as many as are replayed; its 10 iterations are not in the protocol (paper 5.1: one)",
            steps="alternate",
            reference_batch=64,
        ),
        "official": official_preset(
            "rahafaljundi/Gradient-based-Sample-Selection @ ca4160a, its CIFAR-10 settings",
            lr=0.01,
            weight_decay=0.0,
            buffer_batch=10,
            augment="none",
            init="default",
            iterations=10,
            steps="alternate",
        ),
    },
    year=2019,
    reference="Gradient-based Sample Selection, Aljundi et al., NeurIPS 2019",
    # 100 rows of memory for reference, 10 incoming ones as a batch and up to 10 one by one.
    cost=(74 + 100 + 20) / 74,
)
class Gss(ReplayLearner):
    """GSS: ER with a memory that prefers samples whose gradients differ from those it holds."""

    planning = Planning.LOOKS_AT_MODEL
    not_captured = "looks at the network to choose the rows that it stores"
    memory: GradientMemory

    def build_memory(self) -> GradientMemory:
        return GradientMemory(self.config.memory, self.image_size, seed=self.config.seed, device=self.device)

    def train_batch(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        rows = self.plan(x, y)
        if self.config.options.steps == "joint" or not len(rows.slots):
            return self.step(self.inputs(rows))
        incoming = self.step(self.inputs(self.rows(x, y, rows.slots[:0])))
        replayed = self.step(self.inputs(self.rows(x[:0], y[:0], rows.slots)))
        return incoming | replayed | {"loss": incoming["loss"] + replayed["loss"]}

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Scores the batch by the network after its step, and offers it to the memory."""
        o, memory = self.config.options, self.memory
        if not memory.filled:
            return memory.offer(x, y, self.task, index, torch.full((len(y),), _FIRST_SCORE, device=self.device))
        slots = memory.reference(o.reference_batches, o.reference_batch)
        reference = self.gradients(memory.images[slots], memory.labels[slots])
        if memory.filled == memory.capacity:
            whole = self.gradients(x[None], y[None])
            if cosine_similarity(whole, reference).max() >= o.threshold:
                kept = torch.full_like(y, -1)
                memory.write(kept, x, y, self.task, index)
                return kept
        scores = cosine_similarity(self.gradients(x[:, None], y[:, None]), reference).amax(1)
        return memory.offer(x, y, self.task, index, scores)

    def gradients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Gradients of the mean cross-entropy of G batches, images uint8 [G, n, H, W, 3] and labels
        int64 [G, n], in float32 and evaluation mode: [G, ...] for every parameter, by name.

        Ops give way to PyTorch's operations here, whatever the run's kernels: vmap cannot look into
        native code.
        """
        self.network.eval()
        parameters = {name: parameter.detach() for name, parameter in self.network.named_parameters()}

        def loss(parameters: dict[str, Tensor], views: Tensor, labels: Tensor) -> Tensor:
            return cross_entropy(functional_call(self.network, parameters, (views,)).logits[0], labels)

        views = self.views.normalise(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        with self.model.precise():
            return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, views, y)


def cosine_similarity(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    """Cosines float32 [G, H] between gradients [G, ...] and [H, ...] over all parameters by name, 0
    where a gradient is 0; no gradient is copied into one vector.
    """
    products = sum(a[name].flatten(1) @ b[name].flatten(1).T for name in a)
    norms = [torch.stack([part.flatten(1).square().sum(1) for part in g.values()]).sum(0).sqrt() for g in (a, b)]
    tiny = torch.finfo(torch.float32).tiny
    return (products / norms[0].clamp_min(tiny)[:, None] / norms[1].clamp_min(tiny)).clamp(-1, 1)
