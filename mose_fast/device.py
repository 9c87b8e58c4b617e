"""Moving tensors to a card without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["upload"]


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device; from the host to a card through pinned memory, so that the host does not wait for what the card is doing."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
