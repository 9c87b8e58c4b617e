"""Template op: an identity that copies. docs/adding_an_op.md walks through it.

``mose_fast/ops/<stem>.py`` is the public face of a native op: it checks what the user gave, chooses
native code or the reference, and makes the op known to autograd and to ``torch.compile``.
"""

from __future__ import annotations

import torch

from mose_fast import _loader
from mose_fast.reference.null import null as reference


def null(x: torch.Tensor) -> torch.Tensor:
    """Copies ``x``: ``x.clone(memory_format=torch.contiguous_format)``.

    Args:
        x: A tensor of any shape, dtype, strides and device; it is not changed.

    Returns:
        A new contiguous tensor with the shape, dtype, device and values of ``x``; differentiable
        any number of times.

    Raises:
        TypeError: ``x`` is not a tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {x!r}; wanted a torch.Tensor")
    if not _loader.serves("null", x):
        return reference(x)
    if torch.compiler.is_compiling():
        return torch.ops.mose_fast.null(x)  # the compiler needs an op that it can see into
    return _Null.apply(x)  # pybind11 directly: a fifth of the dispatcher's cost in eager mode


class _Null(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return _loader.native.null(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return null(grad)  # the public function again, so that it may be differentiated twice


def _backward(ctx, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.mose_fast.null(grad)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::null")
    def _fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    torch.library.register_autograd("mose_fast::null", _backward)
