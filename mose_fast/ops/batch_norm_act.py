"""Batch norm with its surroundings in a residual network: the residual add and ReLU after it, the
norm and ReLU of another layer before it.

Everything is computed in float32 (float64 for float64 maps), whatever autocast says. On a GPU
kernels serve maps of float32 and bfloat16 with a multiple of 8 channels, in channels_last
memory (others are copied into it). PyTorch's operations serve everything else and the CPU. The
kernels sum in a fixed order, so that two runs agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mose_fast import _loader
from mose_fast.ops.checks import (
    FLOATS,
    MAP,
    check_integer,
    check_norm,
    check_rows,
    check_statistics,
    check_tensor,
    wide_dtype,
)
from mose_fast.ops.maps import aligned, aligned_row, say_once, split_rows
from mose_fast.reference import batch_norm as reference_norm
from mose_fast.reference import batch_norm_act as reference
from mose_fast.reference.batch_norm import Norm

#: The largest number of gradients that one backward pass adds up.
MOST_CONSUMERS = 8


def check_norms(x: Tensor, norms: dict[str, Norm], valid_rows: int | Tensor | None) -> None:
    """Raises unless a map and the norms over it fit, as :func:`batch_norm_act` says."""
    check_tensor("x", x, FLOATS, MAP)
    if valid_rows is not None:
        check_rows("valid_rows", valid_rows, len(x), ("x", x))
    for name, norm in norms.items():
        check_norm(name, norm, x.shape[1], x)
        check_statistics(norm, x.shape, valid_rows)


def serves(op: str, x: Tensor, *norms: Norm) -> bool:
    """Whether the op's kernels take this; warns once if they do not, though ``x`` is on a GPU."""
    if not _loader.on_gpu(op, x) or x.numel() == 0:
        return False
    obstacle = None
    if x.dtype == torch.float64:
        obstacle = "a map is float64; kernels take float32 and bfloat16"
    elif x.shape[1] % 8 != 0:
        obstacle = f"a map has {x.shape[1]} channels; kernels take multiples of 8"
    for norm in norms:
        for name in ("running_mean", "running_var"):
            running = getattr(norm, name)
            if running is not None and (running.dtype != torch.float32 or not running.is_contiguous()):
                obstacle = f"{name} is {running.dtype} with strides {running.stride()}; kernels take contiguous float32"
    if obstacle is not None:
        say_once(f"batch norm runs as PyTorch's operations, which is slower: {obstacle}")
    return obstacle is None


def input_map(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` as the kernels read it; warns once if the memory has to be copied."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        say_once(
            "a map is copied into channels_last memory at every call; keep the network and its input in channels_last"
        )
    return aligned(x.to(dtype))


def with_floats(norm: Norm) -> Norm:
    """The norm with weight and bias in contiguous float32; a copy passes its gradient on."""
    vectors = [None if v is None else v.to(torch.float32).contiguous() for v in (norm.weight, norm.bias)]
    return norm._replace(weight=vectors[0], bias=vectors[1])


def batch_norm_act(
    x: Tensor,
    norm: Norm,
    *,
    relu: bool = True,
    residual: Tensor | None = None,
    residual_norm: Norm | None = None,
    prologue: Tensor | None = None,
    consumers: int = 1,
    valid_rows: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Computes y = relu(norm(x) + residual): batch norm, residual add and ReLU in one op.

    The same in PyTorch, for a ``BatchNorm2d`` and without the terms whose argument is None::

        x = F.relu(scale * (x - mean) + shift)  # of the prologue's rows
        y = F.relu(norm(x) + residual_norm(residual))

    Args:
        x: [N, C, H, W], float32 or bfloat16; float64 is computed by the reference.
        norm: Parameters and running statistics; in training the latter are updated in place.
        relu: Whether to rectify; False: y = norm(x) + residual.
        residual: A map of the shape of ``x``; another dtype is cast to that of ``x``.
        residual_norm: The norm of ``residual``, for a block that changes the shape: both norms in
            one pass.
        prologue: float32 [4, C], the state of the norm over ``x``, which with its ReLU is still to
            be applied: computed while ``x`` is read and never rounded to its dtype. Not together
            with ``residual``.
        consumers: How many results are wanted, 1 to 8. They are the same values in the same memory;
            autograd sends each its own gradient, and the backward pass adds them up while it loads
            them. Do not change one in place.
        valid_rows: The number of valid images; the images after them are padding: never read, not
            counted, zero in the result and in every gradient. An int, or an int32 scalar on the
            device of ``x``, read there at each call (and replay) and cut to [0, N]. None: every
            image is valid.

    Returns:
        y, of the shape and dtype of ``x``; a tuple of them if ``consumers`` is not 1.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or a number does not fit; one element a channel in training,
            PyTorch's own error.

    Source: Ioffe and Szegedy 2015, running statistics as PyTorch's;
    mose_fast/reference/batch_norm_act.py.
    """
    norms = {"norm": norm} if residual_norm is None else {"norm": norm, "residual_norm": residual_norm}
    check_norms(x, norms, valid_rows)
    if residual is not None:
        check_tensor("residual", residual, FLOATS, x.shape, beside=("x", x))
    elif residual_norm is not None:
        raise ValueError("residual is None with a residual_norm; wanted the map that it normalises")
    if prologue is not None:
        check_tensor("prologue", prologue, (wide_dtype(x),), (4, x.shape[1]), beside=("x", x))
        if residual is not None:
            raise ValueError("prologue and residual are both given; wanted at most one of them")
    check_integer("consumers", consumers, 1, MOST_CONSUMERS)
    if not serves("batch_norm_act", x, *norms.values()):
        around = {"relu": relu, "residual": residual, "residual_norm": residual_norm, "prologue": prologue}
        return reference.batch_norm_act(x, norm, **around, consumers=consumers, valid_rows=valid_rows)
    x = input_map(x, x.dtype)
    norm = with_floats(norm)
    residual = None if residual is None else input_map(residual, x.dtype)
    residual_norm = None if residual_norm is None else with_floats(residual_norm)
    second = (None, None) if residual_norm is None else residual_norm[:2]
    prologue = None if prologue is None else aligned_row(prologue)
    tensors = (x, norm.weight, norm.bias, residual, *second, prologue)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    results = _BatchNormAct.apply(*tensors, norm, residual_norm, relu, consumers, *split_rows(valid_rows), trains)
    return results[0] if consumers == 1 else results


def norm_state(x: Tensor, norm: Norm, valid_rows: int | Tensor | None = None) -> Tensor:
    """Takes the statistics of a norm over ``x``: the state that :func:`batch_norm_act`,
    ``align_conv`` and ``norm_pool`` apply.

    The same in PyTorch::

        var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)  # in evaluation the running ones
        inverse = (var + eps).rsqrt()
        torch.stack([mean, inverse, weight * inverse, bias])

    Args:
        x: The map, as for :func:`batch_norm_act`; so are the other arguments.
        norm: Parameters and running statistics.
        valid_rows: The number of valid images.

    Returns:
        float32 (float64) [4, C]: mean, inverse deviation, scale (weight x inverse deviation), shift
        (bias). Differentiable.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or a number does not fit; one element a channel in training.
    """
    check_norms(x, {"norm": norm}, valid_rows)
    if not serves("batch_norm_act", x, norm):
        return reference_norm.norm_state(x, norm, valid_rows)
    norm = with_floats(norm)
    return _NormState.apply(input_map(x, x.dtype), norm.weight, norm.bias, norm, *split_rows(valid_rows))


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        second_weight: Tensor | None,
        second_bias: Tensor | None,
        prologue: Tensor | None,
        norm: Norm,
        residual_norm: Norm | None,
        relu: bool,
        consumers: int,
        valid_rows_tensor: Tensor | None,
        valid_rows: int | None,
        trains: bool,
    ) -> tuple[Tensor, ...]:
        second = Norm(None, None, None, None) if residual_norm is None else residual_norm
        added = (residual, residual_norm is not None, *second)
        rest = (prologue, valid_rows_tensor, valid_rows, relu and trains)
        y, mask, states = _loader.ops().batch_norm_act(x, *norm, relu, *added, *rest)
        ctx.set_materialize_grads(False)
        other = (None if residual_norm is None else residual, second_weight)
        ctx.save_for_backward(x, weight, *other, prologue, valid_rows_tensor, mask if relu else None, states)
        ctx.training, ctx.valid_rows = (norm.training, second.training), valid_rows
        # Tensors of their own, so that each receives its own gradient; autograd would tie views to
        # one another.
        return (y, *(y.detach() for _ in range(consumers - 1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, residual, second_weight, prologue, valid_rows_tensor, mask, states = ctx.saved_tensors
        given = [aligned(g.to(x.dtype)) for g in grads if g is not None]
        if not given:
            return (None,) * 14
        needs = ctx.needs_input_grad
        norms = (weight, ctx.training[0], residual, second_weight, ctx.training[1])
        rest = (states, prologue, valid_rows_tensor, ctx.valid_rows, (needs[0], needs[3], needs[6]))
        to_x, to_residual, to_prologue, to_norms = _loader.ops().batch_norm_act_backward(given, mask, x, *norms, *rest)
        second = (to_norms[1, 0], to_norms[1, 1]) if residual is not None else (None, None)
        results = (to_x, to_norms[0, 0], to_norms[0, 1], to_residual, *second, to_prologue)
        return (*(r if n else None for r, n in zip(results, needs, strict=False)), *(None,) * 7)


class _NormState(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        valid_rows_tensor: Tensor | None,
        valid_rows: int | None,
    ) -> Tensor:
        state, mean_rest = _loader.ops().norm_state(x, *norm, valid_rows_tensor, valid_rows)
        ctx.save_for_backward(x, weight, valid_rows_tensor, state, mean_rest)
        ctx.training, ctx.valid_rows = norm.training, valid_rows
        return state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, valid_rows_tensor, state, mean_rest = ctx.saved_tensors
        needs = ctx.needs_input_grad
        # Running statistics do not depend on x.
        wants_x = needs[0] and ctx.training
        to_x, to_norm = _loader.ops().norm_state_backward(
            grad.contiguous(), x, weight, ctx.training, state, mean_rest, valid_rows_tensor, ctx.valid_rows, wants_x
        )
        return to_x, to_norm[0] if needs[1] else None, to_norm[1] if needs[2] else None, None, None, None


if _loader.gpu() is not None:

    def _rows(x: Tensor, *sizes: int) -> Tensor:
        return x.new_empty(*sizes, x.shape[1], dtype=torch.float32)

    @torch.library.register_fake("mose_fast::batch_norm_act")
    def _fake(x, *arguments):
        normed_residual, wants_mask = arguments[10], arguments[-1]
        mask = x.new_empty(x.numel() // 8 if wants_mask else 0, dtype=torch.uint8)
        return torch.empty_like(x), mask, _rows(x, 2 if normed_residual else 1, 4)

    @torch.library.register_fake("mose_fast::batch_norm_act_backward")
    def _fake_backward(grads, mask, x, weight, training, residual, *arguments):
        prologue, wants = arguments[3], arguments[-1]
        wants_x, wants_residual, wants_prologue = wants
        second = wants_residual and residual is not None
        applies = wants_x or second or wants_prologue
        return (
            torch.empty_like(x) if applies else None,
            torch.empty_like(x) if wants_residual else None,
            _rows(x, 4) if applies and prologue is not None else None,
            _rows(x, 1 if residual is None else 2, 4),
        )

    @torch.library.register_fake("mose_fast::norm_state")
    def _fake_state(x, *arguments):
        return _rows(x, 4), _rows(x)

    @torch.library.register_fake("mose_fast::norm_state_backward")
    def _fake_state_backward(grad, x, *arguments):
        return torch.empty_like(x) if arguments[-1] else None, _rows(x, 4)
