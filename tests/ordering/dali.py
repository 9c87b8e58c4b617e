"""A stand-in for DALI's pipeline, with the order that DALI keeps on a card and pixels that mean
nothing.

Input is copied on the stream that is named with it. A run has a stream of its own, after that copy;
two sets of output buffers take turns. The stream that asks for outputs waits for the run; what it
reads must be read before the buffers' next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["StandInPipeline", "build"]


class _Made:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def as_tensor(self) -> Tensor:
        return self.tensor


class StandInPipeline:
    def __init__(self, size: tuple[int, int], views: int) -> None:
        self.size, self.turn = size, 0
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.buffers = [torch.zeros(views, *size, 3, device="cuda") for _ in range(2)]

    def feed_input(self, name: str, packed: Tensor, cuda_stream: Any) -> None:
        with torch.cuda.stream(cuda_stream):
            self.fed = packed.clone()
        self.fed.record_stream(self.stream)
        self.stream.wait_stream(cuda_stream)

    def schedule_run(self) -> None:
        height, width = self.size
        self.turn = 1 - self.turn
        with torch.cuda.stream(self.stream):
            self.made = self.buffers[self.turn][: len(self.fed)]
            self.made.copy_(self.fed[:, : height * width * 3].view(-1, height, width, 3) / 255)

    def outputs(self, cuda_stream: Any) -> tuple[_Made]:
        cuda_stream.wait_stream(self.stream)
        return (_Made(self.made),)


def build(
    device: torch.device, size: tuple[int, int], views: int, mean: Sequence[float], std: Sequence[float]
) -> StandInPipeline:
    """In place of ``mose_fast.augment.dali._build``."""
    return StandInPipeline(size, views)
