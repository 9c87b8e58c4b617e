"""Freezes a model once a loss is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mose_fast.optim import FlatAdam

__all__ = ["Latch", "RunningStatistics"]

# Each statistic starts at a multiple of this many elements, for kernels that load 16 bytes at once.
_ALIGNMENT = 64


class RunningStatistics:
    """All buffers of a network as views of one flat tensor for each dtype, so that a step can be
    undone for all of them at once.

    Args:
        network: The network; views with equal values replace its buffers. Moving it to another
            device or dtype later undoes that.

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
        """A context that restores the statistics of its start if ``closed``, a bool scalar on their
        device, is True at its end.

        The host does not read ``closed``, so this can be part of a captured graph.
        """
        for before, flat in zip(self._before, self.flat, strict=True):
            before.copy_(flat)
        yield
        for before, flat in zip(self._before, self.flat, strict=True):
            torch.where(closed, before, flat, out=flat)


def _remainder(loss: Tensor) -> Tensor:
    """0 if a loss is finite, else NaN: with a comparison two launches, where ``isfinite`` takes
    four.
    """
    return loss.detach() - loss.detach()


class Latch:
    """Closes at the first loss that is not finite. From then on no weight, no moment of the
    optimiser and no running statistic changes, and every loss is reported as not finite.

    Everything happens on the device. If losses are read late, the host does not ask, so that a
    step can be captured in a CUDA graph.

    Args:
        network: The network, on its device.
        optimiser: The optimiser of its parameters.
        reads_losses_late: Whether the host continues without knowing if a step changed anything.

    Attributes:
        closed: bool scalar on the device.
        statistics: The network's running statistics.
        froze: Whether the host saw that the last step changed nothing; False if it does not ask.
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
            # PyTorch's own way to skip a step by a value on the card, made for gradient scaling.
            self._skip = optimiser.found_inf = torch.zeros((), device=device)

    def __bool__(self) -> bool:
        """Whether the latch is closed; on a card this waits for the card."""
        return bool(self.closed)

    def open(self) -> None:
        """Lets steps change the model again; called after another state was loaded."""
        self.closed.fill_(False)
        self.froze = False

    def admits(self, loss: Tensor) -> bool:
        """Closes the latch unless a loss is finite. Returns False if the host knows that it is
        closed; then the step must change nothing.
        """
        self.closed.logical_or_(_remainder(loss) != 0)
        if self._skip is not None:
            self._skip.copy_(self.closed)
        self.froze = not self._late and bool(self)
        return not self.froze

    def reported(self, loss: Tensor) -> Tensor:
        """The loss that the step reports: NaN once the latch is closed, even if the frozen
        network's loss is finite.
        """
        return torch.where(self.closed & (_remainder(loss) == 0), torch.nan, loss.detach())
