"""Checks whether a learner fits into the memory of its machine, before anything is allocated."""

from __future__ import annotations

import torch

from mose_fast.config import ConfigError, RunConfig
from mose_fast.device import available_bytes
from mose_fast.methods.base import resolve_device
from mose_fast.nn.backbone import backbone_parameters

__all__ = ["check_room", "least_bytes"]

# Every machine has at least this much.
_ALWAYS = 2**30

# float32: the weight, its gradient and two moments.
_BYTES_A_PARAMETER = 16

# int64: label, task and index in the stream.
_BYTES_BESIDE_AN_IMAGE = 24


def least_bytes(config: RunConfig, image_size: tuple[int, int]) -> tuple[int, int]:
    """The bytes that a learner needs at least: for its replay memory, and for its network with
    gradients and moments.

    Activations and other data of the method are not counted.
    """
    height, width = image_size
    projections = config.options.experts * getattr(config.options, "projection", 0) * 8 * config.width
    return (
        config.memory * (3 * height * width + _BYTES_BESIDE_AN_IMAGE),
        (backbone_parameters(config.width) + projections) * _BYTES_A_PARAMETER,
    )


def check_room(config: RunConfig, image_size: tuple[int, int]) -> None:
    """Refuses a learner that cannot fit into the free memory of its device.

    Args:
        config: The run's settings.
        image_size: (H, W) of the images.

    Raises:
        ConfigError: It needs more; the message says how much is needed and how much is free.
    """
    memory, network = least_bytes(config, image_size)
    if memory + network <= _ALWAYS:
        return
    device = resolve_device(config.device)
    # Memory that PyTorch has reserved but does not use is available, too.
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    free = torch.cuda.mem_get_info(device)[0] + held if device.type == "cuda" else available_bytes()
    if memory + network <= free:
        return
    name = "memory" if memory >= network else "width"

    def gigabytes(count: int) -> str:
        return f"{count / 1e9:,.1f} GB"

    raise ConfigError(
        f"{name} is {getattr(config, name)}, which does not fit: the replay memory of {config.memory} images takes"
        f" {gigabytes(memory)}, the network of width {config.width} at least {gigabytes(network)}, and"
        f" {gigabytes(free)} are free on {'the card' if device.type == 'cuda' else 'this machine'}; wanted a smaller"
        f" {name}"
    )
