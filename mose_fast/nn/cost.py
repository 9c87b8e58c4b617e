"""Parameters and multiply-accumulates of a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mose_fast.nn.cosine import CosineClassifier

__all__ = ["Cost", "count_cost"]


class Cost(NamedTuple):
    """``parameters``: the number of parameters of the modules that ran; ``macs``: the
    multiply-accumulates per image of their convolutions, linear and cosine layers.
    """

    parameters: int
    macs: int


def count_cost(network: nn.Module, forward: Callable[[Tensor], object], image_size: tuple[int, int]) -> Cost:
    """Counts the parameters and multiply-accumulates that ``forward`` uses for one image [1, 3, H,
    W].

    Norms, of maps or vectors, activations, pooling and up-sampling count no multiply-accumulates.
    The network's state does not change.

    Args:
        network: The network that owns the modules.
        forward: A method of ``network`` that takes a batch of normalised images.
        image_size: (H, W).
    """
    parameters: set[nn.Parameter] = set()
    macs = 0

    def on_forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal macs
        parameters.update(module.parameters(recurse=False))
        if isinstance(module, nn.Conv2d):
            macs += output[0].numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear | CosineClassifier):
            macs += output[0].numel() * module.weight.shape[1]

    was_training = network.training
    network.eval()
    handles = [module.register_forward_hook(on_forward) for module in _leaves(network.modules())]
    try:
        with torch.no_grad():
            forward(torch.zeros(1, 3, *image_size, device=next(network.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
        network.train(was_training)
    return Cost(sum(p.numel() for p in parameters), macs)


def _leaves(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if next(module.parameters(recurse=False), None) is not None]
