"""A classifier by cosines."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def directions(vectors: Tensor, eps: float = 1e-5) -> Tensor:
    """Returns vectors [..., D] divided by their length plus ``eps``, in float32 at least."""
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    return vectors / (vectors.norm(dim=-1, keepdim=True) + eps)


class CosineClassifier(nn.Module):
    """Logits are the cosines between a feature and each class's weight vector ([K, D], a
    parameter), times ``scale``, which is a parameter too if ``learned_scale`` (LUCIR, CCIL), else
    fixed (ER-AML). See docs/specification/baselines.md sections 6 and 15.
    """

    def __init__(self, weight: Tensor, scale: float = 10.0, *, learned_scale: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.learned_scale = learned_scale
        self.scale = nn.Parameter(torch.tensor(float(scale))) if learned_scale else scale

    def forward(self, features: Tensor) -> Tensor:
        """Computes logits [N, K] for ``features`` [N, D], in float32 whatever autocast says."""
        with torch.autocast(features.device.type, enabled=False):
            return self.scale * directions(features) @ directions(self.weight).T
