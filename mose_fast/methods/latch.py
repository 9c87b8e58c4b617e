"""What freezes a model once a loss is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mose_fast.optim import FlatAdam

__all__ = ["Latch", "RunningStatistics"]

# Elements that each statistic's start is a multiple of, for kernels that load 16 bytes at a time.
_ALIGNMENT = 64


class RunningStatistics:
    """All buffers of a network as views of one flat tensor for each dtype, so that a step can be
    undone for all of them at once.

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
    def undone_if(self, closed: Tensor) -> Iterator[None]:
        """Brings the statistics back to what they were at the start if ``closed``, a bool scalar
        beside them, is set at the end.

        The host does not look at it, so that this can be part of a captured graph.
        """
        for before, flat in zip(self._before, self.flat, strict=True):
            before.copy_(flat)
        yield
        for before, flat in zip(self._before, self.flat, strict=True):
            flat.copy_(torch.where(closed, before, flat))


class Latch:
    """Closes at the first loss that is not finite. From then on no weight, no moment of the
    optimiser and no running statistic changes, and every loss is reported as not finite.

    All of it happens on the device. Where losses are read late the host does not ask, so that a
    step can be captured in a CUDA graph.

    Args:
        network: On its device.
        optimiser: Of the network's parameters.
        reads_losses_late: Whether the host goes on without knowing if a step changed anything.

    Attributes:
        closed: bool scalar on the device.
        statistics: The network's running statistics.
        froze: Whether the host saw that the last step changed nothing; False where it does not ask.
    """

    def __init__(self, network: nn.Module, optimiser: torch.optim.Optimizer, *, reads_losses_late: bool) -> None:
        self._late = reads_losses_late
        self.statistics = RunningStatistics(network)
        device = next(network.parameters()).device
        self.froze = False
        self._skip: Tensor | None = None
        if isinstance(optimiser, FlatAdam):
            self.closed = optimiser.latch
            return
        self.closed = torch.zeros((), dtype=torch.bool, device=device)
        if reads_losses_late:
            # PyTorch's own way to skip a step by what the card finds, made for gradient scaling.
            self._skip = optimiser.found_inf = torch.zeros((), device=device)

    def __bool__(self) -> bool:
        """Whether it is closed; on a card this waits for it."""
        return bool(self.closed)

    def open(self) -> None:
        """Lets steps change the model again, after another state was loaded."""
        self.closed.fill_(False)
        self.froze = False

    def admits(self, loss: Tensor) -> bool:
        """Closes unless a loss is finite. False where the host knows that it is closed, and nothing
        must be changed by the step.
        """
        self.closed.logical_or_(loss.detach().isfinite().logical_not_())
        if self._skip is not None:
            self._skip.copy_(self.closed)
        self.froze = not self._late and bool(self)
        return not self.froze

    def reported(self, loss: Tensor) -> Tensor:
        """A loss as the step reports it: NaN once the latch is closed, though the frozen network's
        loss may be finite.
        """
        return torch.where(self.closed & loss.detach().isfinite(), torch.nan, loss.detach())
