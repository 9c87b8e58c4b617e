"""A simulation of DALI's pipeline, with the order that DALI keeps on a GPU and pixels that mean
nothing.

Input is copied on the stream that is named with it. A run has a stream of its own, after that copy.
The stream that asks for outputs waits for the run. Memory of an output whose last reference has
gone may be another run's at once. Building and ending a pipeline and freeing an output may wait for
the whole GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.races.simulated_gpu import SimulatedGpu


class _Made:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.gpu = tensor, SimulatedGpu.current

    def __del__(self) -> None:
        self.gpu.may_wait("an output of DALI's that is freed")

    def as_tensor(self) -> _Made:
        return self

    def copy_to_external(self, target: ctypes.c_void_p, stream: ctypes.c_void_p, *, non_blocking: bool) -> None:
        assert non_blocking
        with torch.cuda.stream(self.gpu.streams_by_address[stream.value]):
            self.gpu.tensors_by_address[target.value].copy_(self.tensor)


class SimulatedPipeline:
    def __init__(self, size: tuple[int, int]) -> None:
        self.gpu, self.size = SimulatedGpu.current, size
        self.gpu.may_wait("a pipeline of DALI's that is built")
        self.stream = torch.cuda.Stream()

    def __del__(self) -> None:
        self.gpu.may_wait("a pipeline of DALI's that ends")

    def feed_input(self, name: str, packed: Tensor, cuda_stream: Any) -> None:
        with torch.cuda.stream(self.stream):
            self.made = torch.empty(len(packed), *self.size, 3, device="cuda")
        with torch.cuda.stream(cuda_stream):
            self.fed = packed.clone()
        self.fed.record_stream(self.stream)
        self.stream.wait_stream(cuda_stream)

    def schedule_run(self) -> None:
        height, width = self.size
        with torch.cuda.stream(self.stream):
            self.made.copy_(self.fed[:, : height * width * 3].view(-1, height, width, 3) / 255)

    def outputs(self, cuda_stream: Any) -> tuple[_Made]:
        cuda_stream.wait_stream(self.stream)
        made, self.made = _Made(self.made), None
        return (made,)


def build(
    device: torch.device, size: tuple[int, int], views: int, mean: Sequence[float], std: Sequence[float]
) -> SimulatedPipeline:
    """In place of ``mose_fast.augment.dali._build``."""
    return SimulatedPipeline(size)
