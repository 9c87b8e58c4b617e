"""A-GEM (Chaudhry et al., ICLR 2019; docs/specification/baselines.md section 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mose_fast.learner.about import official_preset, sources_preset, table_preset
from mose_fast.learner.registry import method
from mose_fast.learner.replay_learner import BaselineOptions, Inputs, ReplayLearner, cross_entropy


@dataclass(frozen=True)
class AgemOptions(BaselineOptions):
    """Switches of A-GEM; the reference batch of ``buffer_batch`` passes the network by itself."""

    replay_from: str = BaselineOptions.again(
        "replay_from",
        "others",
        "facebookresearch/agem: finished tasks; the port in RaptorMai/online-continual-learning: all",
        doc="tasks that the reference batch comes from",
    )


@method(
    "agem",
    options=AgemOptions,
    presets={
        "table": table_preset(),
        "sources": sources_preset(
            "facebookresearch/agem @ 4542149: replay_from others, as table; its ring memory for each class and its head"
            " for each task have no place in the protocol"
        ),
        "official": official_preset(
            "facebookresearch/agem @ 4542149, its CIFAR settings",
            lr=0.03,
            weight_decay=0.0,
            buffer_batch=256,
            augment="none",
        ),
    },
    year=2019,
    reference="Averaged GEM, Chaudhry et al., ICLR 2019",
    cost=1.0,
)
class Agem(ReplayLearner):
    """A-GEM: fine-tuning, but without the part of each gradient that would increase the loss on a
    batch from memory.
    """

    not_taught = "projects one gradient on another, of one loss each"
    without_boundaries = ReplayLearner.without_boundaries | {
        ("replay_from", "others"): "has no reference batch and is plain fine-tuning"
    }

    def train_on(self, rows: Inputs) -> dict[str, Tensor]:
        if 0 in rows.sizes:  # no finished task yet, or rehearsal: one loss, nothing that it could oppose
            return super().train_on(rows)
        leaves, parts = self.model.leaves, zip(rows.views.split(rows.sizes), rows.labels.split(rows.sizes), strict=True)
        with self.model.step():
            losses = [cross_entropy(self.forward(views).logits, labels) for views, labels in parts]

            def backward() -> None:
                gradient, reference = (flat_gradient(loss, leaves) for loss in losses)
                write_gradient(leaves, project(gradient, reference))

            self.model.minimise(losses[0] + losses[1], backward)
        return {"loss": self.model.latch.reported(losses[0]), "reference": losses[1].detach()}


def flat_gradient(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradient of a loss as one vector, float32 [n], 0 where the loss does not depend on a
    parameter; the parameters' ``grad`` stays as it is.
    """
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.float().reshape(-1) for gradient in gradients])


def write_gradient(parameters: Sequence[nn.Parameter], gradient: Tensor) -> None:
    """Sets the parameters' ``grad`` from one vector [n], each in its parameter's memory format, as
    PyTorch's fused optimisers demand.
    """
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))


def project(gradient: Tensor, reference: Tensor) -> Tensor:
    """g - (<g, r> / <r, r>) r where <g, r> is negative, so that their inner product becomes 0; else
    g itself (A-GEM, eq. for the projection). Both are float32 [n].
    """
    opposed = torch.dot(gradient, reference).clamp_max(0)
    # A reference gradient of zero opposes nothing: 0 / tiny is 0.
    return gradient - opposed / torch.dot(reference, reference).clamp_min(torch.finfo(torch.float32).tiny) * reference
