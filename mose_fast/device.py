"""Where things are computed: names of cards and processors, and moving tensors to a card without waiting for it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["device_name", "own_stream", "processor", "upload"]


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def device_name(device: torch.device) -> str:
    """Name of the card, or of the processor with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} thread{'' if torch.get_num_threads() == 1 else 's'}"


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream for all steps and evaluations on a card; on the CPU nothing.

    A step that ran on the default stream could not be captured later: its gradients' accumulation stays with the stream it ran on first.
    """
    if device.type != "cuda":
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device; from the host to a card through pinned memory, so that the host does not wait for what the card is doing."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
