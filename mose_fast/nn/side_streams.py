"""CUDA streams for the branches of a network, so that their kernels run beside those of the stages
that follow.

A kernel of a branch is often shorter than the pause between two kernels of one stream; on two
streams the pauses of one are filled by the other. docs/captured_step.md names what keeps the
streams in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SideStreams:
    """A stream for each branch in training on a GPU, unless ``on`` is False; made when it is first
    used, and a copy of a network makes its own.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple:
        return SideStreams, (self.on,)

    def of(self, branch: int, x: Tensor) -> torch.cuda.Stream | None:
        """The stream of a branch that reads ``x``; None: that of the network."""
        if not (self.on and x.is_cuda and torch.is_grad_enabled()):
            return None
        key = x.device, branch
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(x.device)
        return self._streams[key]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """A context in which ``stream`` is the current one; None changes nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def fork(stream: torch.cuda.Stream | None, maps: Sequence[Tensor], valid_rows: int | Tensor | None) -> Sequence[Tensor]:
    """Gives maps and ``valid_rows`` of the current stream to a branch on ``stream``, which waits
    for them; in the backward pass the current stream waits for the branch's gradients.
    """
    return maps if stream is None else _Fork.apply(stream, valid_rows, *maps)


def join(stream: torch.cuda.Stream | None, result: Tensor) -> Tensor:
    """Gives the result of a branch to the current stream, and its gradient back; each waits."""
    return result if stream is None else _Join.apply(stream, result)


def _hand_over(arguments: Sequence[Any], source: torch.cuda.Stream, target: torch.cuda.Stream) -> None:
    """``target`` waits for all that was launched on ``source``, and the allocator learns that it
    reads the tensors among the arguments: their memory is not given away before.
    """
    target.wait_stream(source)
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument.record_stream(target)


# Both are called on the network's stream, on which autograd then also calls their backward passes.
# A branch's backward pass ends with the backward pass of its fork: autograd calls what is ready in
# the reverse order of the forward pass, so that the gradients of the branch's weights are launched
# before, and who reads them on the network's stream comes after them.


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: torch.cuda.Stream, valid_rows: int | Tensor | None, *maps: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stream = stream
        _hand_over([*maps, valid_rows], torch.cuda.current_stream(stream.device), stream)
        return tuple(h.detach() for h in maps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _hand_over(grads, ctx.stream, torch.cuda.current_stream(ctx.stream.device))
        return None, None, *grads


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: torch.cuda.Stream, result: Tensor) -> Tensor:
        ctx.stream = stream
        _hand_over([result], stream, torch.cuda.current_stream(stream.device))
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        _hand_over([grad], torch.cuda.current_stream(ctx.stream.device), ctx.stream)
        return None, grad
