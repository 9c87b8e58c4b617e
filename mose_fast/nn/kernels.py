"""Which code runs a network's norms, alignment and heads."""

from __future__ import annotations

__all__ = ["KERNELS", "check_kernels"]

#: ``torch``: PyTorch's own modules, one by one. ``fused``: the ops of :mod:`mose_fast.ops`, native where there is a library.
KERNELS = ("torch", "fused")


def check_kernels(kernels: str) -> str:
    """Raises ValueError unless it is one of :data:`KERNELS`."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; wanted one of {', '.join(KERNELS)}")
    return kernels
