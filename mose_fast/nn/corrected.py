"""A linear classifier whose logits are corrected class by class."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["CorrectedLinear"]


class CorrectedLinear(nn.Linear):
    """A linear classifier that, in evaluation mode, multiplies each class's logit by a scale and
    adds a shift (BiC, docs/specification/baselines.md section 17). In training mode it is linear.

    Args:
        linear: The classifier whose parameters it takes over.

    Attributes:
        scale, shift: Buffers float32 [K]; at first 1 and 0.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("scale", torch.ones_like(linear.bias, requires_grad=False))
        self.register_buffer("shift", torch.zeros_like(linear.bias, requires_grad=False))

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features)
        return logits if self.training else logits * self.scale + self.shift

    def forget(self) -> None:
        """Removes the correction, in place."""
        self.scale.fill_(1)
        self.shift.fill_(0)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain classifier with the logits of evaluation mode."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        linear.weight = nn.Parameter(self.weight * self.scale[:, None])
        linear.bias = nn.Parameter(self.bias * self.scale + self.shift)
        return linear
