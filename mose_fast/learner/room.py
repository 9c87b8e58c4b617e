"""Checks whether a learner fits into the memory of its machine, before anything is allocated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mose_fast.device import available_bytes, choose_precision, resolve_device
from mose_fast.learner.registry import find_method
from mose_fast.nn.backbone import backbone_activations, backbone_parameters
from mose_fast.settings.run import ConfigError, RunConfig

# Every machine has at least this much.
_ALWAYS = 2**30

# float32: the weight, its gradient and two moments.
_BYTES_A_PARAMETER = 16

# int64: label, task and index in the stream.
_BYTES_BESIDE_AN_IMAGE = 24


class LeastBytes(NamedTuple):
    """The bytes that a learner needs at least: for its replay memory, its network with gradients
    and moments, what a step keeps of its views for gradients, and statistics of classes.
    """

    memory: int
    network: int
    views: int
    statistics: int


def least_bytes(config: RunConfig, image_size: tuple[int, int], classes: int) -> LeastBytes:
    """The bytes that a learner needs at least, without other data of the method."""
    height, width = image_size
    projections = config.options.experts * getattr(config.options, "projection", 0) * 8 * config.width
    learner = find_method(config.method)
    views = learner.views_at_once(config)
    # The device is asked only where the answer counts, since that starts CUDA.
    half = views and choose_precision(config.precision, resolve_device(config.device)).name == "bf16"
    return LeastBytes(
        config.memory * (3 * height * width + _BYTES_BESIDE_AN_IMAGE),
        (backbone_parameters(config.width) + projections) * _BYTES_A_PARAMETER,
        views * backbone_activations(config.width, image_size) * (2 if half else 4),
        learner.statistics_bytes(config, classes),
    )


def check_room(config: RunConfig, image_size: tuple[int, int], classes: int) -> None:
    """Raises ConfigError for a learner that cannot fit into the free memory of its device."""
    least = least_bytes(config, image_size, classes)
    if sum(least) <= _ALWAYS:
        return
    device = resolve_device(config.device)
    # Memory that PyTorch has reserved but does not use is available, too.
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    free = torch.cuda.mem_get_info(device)[0] + held if device.type == "cuda" else available_bytes()
    if sum(least) <= free:
        return
    name, value = max(
        (least.memory, "memory", config.memory),
        (least.network + least.statistics, "width", config.width),
        (least.views, "options.buffer_batch", config.options.buffer_batch),
    )[1:]

    def gigabytes(count: int) -> str:
        return f"{count / 1e9:,.1f} GB"

    views = f", the views of a step at least {gigabytes(least.views)}" if least.views else ""
    kept = f", the statistics of {classes} classes {gigabytes(least.statistics)}" if least.statistics else ""
    raise ConfigError(
        f"{name} is {value}, which does not fit: the replay memory of {config.memory} images takes"
        f" {gigabytes(least.memory)}, the network of width {config.width} at least {gigabytes(least.network)}{views}"
        f"{kept}, and {gigabytes(free)} are free on {'the GPU' if device.type == 'cuda' else 'this machine'}; wanted a"
        f" smaller {name}"
    )
