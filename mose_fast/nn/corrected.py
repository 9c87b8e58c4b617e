"""A linear classifier whose logits are corrected class by class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Where the loss falls for ever, as with images that are all told apart, the fit ends here.
_FIT_STEPS = 100


def fit_correction(logits: Tensor, labels: Tensor, newest: Tensor, shift_penalty: float) -> tuple[float, float]:
    """Scale and shift of the newest classes' logits that minimise the mean cross-entropy plus half
    of ``shift_penalty`` (at least 0) times the squared shift, a convex function of both (BiC). They
    are found by L-BFGS in float64. ``logits`` are float [N, K], ``labels`` int64 [N], ``newest``
    bool [K].
    """
    logits, numbers = logits.double(), torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([numbers], max_iter=_FIT_STEPS, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        corrected = torch.where(newest, numbers[0] * logits + numbers[1], logits)
        value = F.cross_entropy(corrected, labels) + shift_penalty / 2 * numbers[1] ** 2
        (numbers.grad,) = torch.autograd.grad(value, [numbers])
        return value

    search.step(loss)
    scale, shift = numbers.tolist()
    return scale, shift


class CorrectedLinear(nn.Linear):
    """Takes over a linear classifier's parameters; in evaluation mode multiplies each class's logit
    by ``scale`` and adds ``shift``, buffers float32 [K] (BiC, docs/specification/baselines.md
    section 17). In training mode it is linear.
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
