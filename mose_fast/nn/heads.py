"""The experts' linear heads as one batched product each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LinearMaps(NamedTuple):
    """Linear maps of one size: weights n x [K, D] and biases n x [K], of the features of the
    experts from ``first`` on, which receive no gradient if ``detached``.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    first: int = 0
    detached: bool = False

    @staticmethod
    def of(modules: Sequence[nn.Linear], first: int = 0, detached: bool = False) -> LinearMaps:
        return LinearMaps([m.weight for m in modules], [m.bias for m in modules], first, detached)


def linear_maps(x: Tensor, groups: Sequence[LinearMaps]) -> tuple[Tensor, ...]:
    """Computes x_e W_e^T + b_e of ``x`` [E, N, D] for groups of maps, each group as a single
    batched product [n, N, K].

    Equal to ``F.linear`` of each expert within rounding, under autocast too. Weights and biases of
    another dtype than ``x`` are cast to it; their gradients have their own dtypes. The groups share
    what they launch beside their products; the result can be differentiated once.
    """
    layout = tuple((len(group.weights), group.first, group.detached) for group in groups)
    weights, biases = (tuple(t for group in groups for t in group[part]) for part in (0, 1))
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, (x, *weights))):
        return _products(layout, x, (*weights, *biases))[0]
    return _LinearMaps.apply(layout, x, *weights, *biases)


class _LinearMaps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layout: tuple[tuple[int, int, bool], ...], x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.types = layout, [x.dtype, *(p.dtype for p in parameters)]
        results, x, weights = _products(layout, x, parameters)
        ctx.save_for_backward(x, *weights)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        to_x, to_weights, to_biases = None, [], []
        with torch.autocast(x.device.type, enabled=False):
            for grad, weight, (count, first, detached) in zip(grads, weights, ctx.layout, strict=True):
                if grad is None:
                    to_weights += [None] * count
                    to_biases += [None] * count
                    continue
                if ctx.needs_input_grad[1] and not detached:
                    if to_x is None and count == len(x):
                        to_x = torch.bmm(grad, weight)
                    else:
                        to_x = torch.zeros_like(x) if to_x is None else to_x
                        to_x[first : first + count].baddbmm_(grad, weight)
                # Contiguous, so that autograd keeps them as they are.
                to_weights += torch.bmm(grad.transpose(1, 2), x[first : first + count]).unbind()
                to_biases += grad.sum(1, dtype=ctx.types[-1]).unbind()
        results = [to_x, *to_weights, *to_biases]
        return None, *(g if g is None else g.to(t) for g, t in zip(results, ctx.types, strict=True))


def _products(
    layout: Sequence[tuple[int, int, bool]], x: Tensor, parameters: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Tensor, list[Tensor]]:
    """The products, the ``x`` in their dtype and each group's weights."""
    place, counts = x.device.type, [count for count, _, _ in layout]
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else x.dtype
    with torch.autocast(place, enabled=False):
        x = x.to(dtype)
        weights = _together([w.to(dtype) for w in parameters[: sum(counts)]], counts, dtype)
        biases = _together(parameters[sum(counts) :], counts, dtype)
        results = []
        for weight, bias, (count, first, detached) in zip(weights, biases, layout, strict=True):
            part = x[first : first + count]
            part = part.detach() if detached else part
            results.append(torch.baddbmm(bias.unsqueeze(1), part, weight.transpose(1, 2)))
    return tuple(results), x, weights


def _together(tensors: Sequence[Tensor], counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Groups of tensors of one size, each as one tensor of ``dtype``: one copy and cast for all."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    groups = [tensors[end - count : end] for count, end in zip(counts, ends, strict=True)]
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(dtype)
    parts = flat.split([len(group) * group[0].numel() for group in groups])
    return [part.view(len(group), *group[0].shape) for part, group in zip(parts, groups, strict=True)]


def projection_mlp(size: int, projection: int) -> nn.Sequential:
    """Two layers from features of ``size`` to a contrastive projection, with a ReLU between."""
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, projection))
