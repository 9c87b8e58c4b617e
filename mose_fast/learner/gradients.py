"""Gradients of all parameters as one vector (docs/specification/baselines.md section 0.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["flat_gradient", "flatten", "project", "write_gradient"]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """The elements of all tensors, one after the other: float32 [n], whatever their dtype."""
    return torch.cat([tensor.float().reshape(-1) for tensor in tensors])


def flat_gradient(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The gradient of a loss as one vector, float32 [n], 0 where the loss does not depend on a
    parameter; the parameters' ``grad`` stays as it is.
    """
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return flatten(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True))


def write_gradient(parameters: Sequence[nn.Parameter], gradient: Tensor) -> None:
    """Sets the parameters' ``grad`` from one vector [n], each in its parameter's memory format, as
    PyTorch's fused optimisers demand.
    """
    for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))


def project(gradient: Tensor, reference: Tensor) -> Tensor:
    """Removes from a gradient the component that opposes a reference gradient (A-GEM, eq. for the
    projection).

    Args:
        gradient: float32 [n].
        reference: float32 [n].

    Returns:
        g - (<g, r> / <r, r>) r where <g, r> is negative, so that their inner product becomes 0;
        else g itself.
    """
    opposed = torch.dot(gradient, reference).clamp_max(0)
    # A reference gradient of zero opposes nothing: 0 / tiny is 0.
    return gradient - opposed / torch.dot(reference, reference).clamp_min(torch.finfo(torch.float32).tiny) * reference
