"""Freezes a model once a loss is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mose_fast.optim import FlatAdam

# Each statistic starts at a multiple of this many bytes, for kernels that load 16 at once.
_ALIGNMENT = 256


def gathered_statistics(network: nn.Module) -> Tensor:
    """Makes all buffers of a network views of one piece of memory, which is returned, int64, so
    that a step can be undone for all of them by one copy before it and one after it. Moving the
    network to another device or dtype later undoes that.
    """
    buffers = [(module, name, b) for module in network.modules() for name, b in module.named_buffers(recurse=False)]
    sizes = [-(-b.numel() * b.element_size() // _ALIGNMENT) * _ALIGNMENT for _, _, b in buffers]
    device = next((b.device for _, _, b in buffers), None)
    memory = torch.zeros(sum(sizes) // 8, dtype=torch.int64, device=device)
    parts = memory.split([size // 8 for size in sizes])
    for (module, name, buffer), part in zip(buffers, parts, strict=True):
        view = part.view(buffer.dtype)[: buffer.numel()].view(buffer.shape)
        # Through DLPack, each is a tensor with a storage of its own. Otherwise, autograd would
        # take a change of one for a change of all, and torch.compile and torch.save would
        # refuse two dtypes in one storage.
        setattr(module, name, torch.from_dlpack(view.copy_(buffer)))
    return memory


@contextmanager
def undone_if(closed: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context that restores tensors if ``closed``, a bool scalar on their device, is True at its
    end. The host does not read it, so this can be part of a captured graph.
    """
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            torch.where(closed, old, tensor, out=tensor)


class Latch:
    """Closes at the first loss that is not finite. From then on no weight, no moment of the
    optimiser and no running statistic changes, and every loss is reported as not finite.

    Everything happens on the device. If losses are read late, the host does not ask whether a step
    changed anything, so that it can be captured in a CUDA graph.

    Attributes:
        closed: bool scalar on the device.
        statistics: The network's running statistics, as :func:`gathered_statistics` returns them.
        froze: Whether the host saw that the last step changed nothing; False if it does not ask.
        by_optimiser: Whether the optimiser closes the latch, in the launch of its step.
    """

    def __init__(self, network: nn.Module, optimiser: torch.optim.Optimizer, *, reads_losses_late: bool) -> None:
        self._late = reads_losses_late
        self.statistics = gathered_statistics(network)
        self.froze = False
        self._skip: Tensor | None = None
        self.by_optimiser = reads_losses_late and isinstance(optimiser, FlatAdam)
        if isinstance(optimiser, FlatAdam):
            self.closed = optimiser.latch
            return
        device = next(network.parameters()).device
        self.closed = torch.zeros((), dtype=torch.bool, device=device)
        if reads_losses_late:
            # PyTorch's own way to skip a step by a value on the GPU, made for gradient scaling.
            self._skip = optimiser.found_inf = torch.zeros((), device=device)

    def __bool__(self) -> bool:
        """Whether the latch is closed; on a GPU this waits for the GPU."""
        return bool(self.closed)

    def open(self) -> None:
        """Lets steps change the model again; called after another state was loaded."""
        self.closed.fill_(False)
        self.froze = False

    def admits(self, loss: Tensor) -> bool:
        """Closes the latch unless a loss is finite or the optimiser will ask. Returns False if the
        host knows that it is closed; then the step must change nothing.
        """
        if not self.by_optimiser:
            # NaN where the loss is not finite: with the comparison two launches, where ``isfinite``
            # takes four.
            self.closed.logical_or_(loss.detach() - loss.detach() != 0)
        if self._skip is not None:
            self._skip.copy_(self.closed)
        self.froze = not self._late and bool(self)
        return not self.froze

    def reported(self, loss: Tensor) -> Tensor:
        """The loss that the step reports: NaN once the latch is closed."""
        return torch.where(self.closed, torch.nan, loss.detach())
