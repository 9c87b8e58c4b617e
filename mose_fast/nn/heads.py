"""The experts' linear heads as one batched product each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["batched_linear", "linears", "projection_mlp"]


def batched_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Computes one linear map per expert, x_e W_e^T + b_e, as a single batched product.

    Equal to ``F.linear`` of each expert within rounding. Weights and biases of another dtype than
    ``x`` are cast to it; their gradients have their own dtypes. Under autocast the product runs in
    autocast's dtype, as ``F.linear`` would.

    Args:
        x: [E, N, D].
        weights: E tensors [K, D].
        biases: E tensors [K].

    Returns:
        [E, N, K].

    Raises:
        ValueError: There are not as many weights and biases as experts.
    """
    if not len(x) == len(weights) == len(biases):
        raise ValueError(
            f"there are {len(x)} experts, {len(weights)} weights and {len(biases)} biases; wanted as many of each"
        )
    weight = torch.stack([w.to(x.dtype) for w in weights])
    bias = torch.stack(list(biases)).to(x.dtype)  # biases have no bf16 copies: one cast for all of them
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def linears(modules: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Applies :func:`batched_linear` with the parameters of E modules of one size, each with a
    bias: [E, N, D] to [E, N, K].
    """
    return batched_linear(x, [m.weight for m in modules], [m.bias for m in modules])


def projection_mlp(size: int, projection: int) -> nn.Sequential:
    """Two layers from features of ``size`` to a contrastive projection, with a ReLU between."""
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, projection))
