"""The running statistics of a network in one piece, so that a step can be undone for all of them at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["RunningStatistics"]

# Elements that each statistic's start is a multiple of, for kernels that load 16 bytes at a time.
_ALIGNMENT = 64


class RunningStatistics:
    """All buffers of a network as views of one flat tensor for each dtype.

    Args:
        network: Its buffers are replaced by the views, with equal values. Moving it to another
            device or dtype later breaks the tie.

    Attributes:
        flat: The tensors behind the buffers.
    """

    def __init__(self, network: nn.Module) -> None:
        owners: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                owners.setdefault(buffer.dtype, []).append((module, name, buffer))
        self.flat: list[Tensor] = []
        for dtype, buffers in owners.items():
            sizes = [-(-buffer.numel() // _ALIGNMENT) * _ALIGNMENT for _, _, buffer in buffers]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=buffers[0][2].device)
            for (module, name, buffer), part in zip(buffers, flat.split(sizes), strict=True):
                view = part[: buffer.numel()].view(buffer.shape)
                # As ``data``, each counts its own changes: autograd would otherwise take a change
                # of one for a change of all.
                setattr(module, name, view.copy_(buffer).data)
            self.flat.append(flat)
        self._before = [torch.empty_like(flat) for flat in self.flat]

    @contextmanager
    def undone_if(self, latch: Tensor) -> Iterator[None]:
        """Brings the statistics back to what they were at the start if ``latch``, a bool scalar
        beside them, is set at the end.

        The host does not look at the latch, so that this can be part of a captured graph.
        """
        for before, flat in zip(self._before, self.flat, strict=True):
            before.copy_(flat)
        yield
        for before, flat in zip(self._before, self.flat, strict=True):
            flat.copy_(torch.where(latch, before, flat))
