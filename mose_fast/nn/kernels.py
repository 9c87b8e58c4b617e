"""The choice of code for a network's norms, alignment and heads."""

from __future__ import annotations

import torch

from mose_fast import _loader

#: ``torch``: PyTorch's own modules, one by one. ``fused``: the ops of :mod:`mose_fast.ops`, native
#: where there is a library.
KERNELS = ("torch", "fused")


def check_kernels(kernels: str) -> str:
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; wanted one of {', '.join(KERNELS)}")
    return kernels


def choose_kernels(wanted: str, device: torch.device) -> str:
    """The kernels that the setting ``kernels`` means on a network's device: ``auto`` is ``fused``
    where CUDA kernels run and the self-check has not switched off all of them.
    """
    if wanted != "auto":
        return wanted
    return "fused" if device.type == _loader.gpu() and "step" not in _loader.off else "torch"
