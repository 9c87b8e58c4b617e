"""Parameters and multiply-accumulates of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mose_fast.nn.cosine import CosineClassifier


class Cost(NamedTuple):
    """``parameters``: the number of parameters of the modules that ran; ``macs``: the
    multiply-accumulates per image of their convolutions, linear and cosine layers.
    """

    parameters: int
    macs: int


def count_cost(network: nn.Module, forward: Callable[[Tensor], object], image_size: tuple[int, int]) -> Cost:
    """Counts the parameters and multiply-accumulates that ``forward``, a method of ``network``,
    uses for one normalised image of ``image_size`` (H, W).

    Norms, activations, pooling and up-sampling count no multiply-accumulates. The network's state
    does not change.
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
    own = [module for module in network.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [module.register_forward_hook(on_forward) for module in own]
    try:
        with torch.no_grad():
            forward(torch.zeros(1, 3, *image_size, device=next(network.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
        network.train(was_training)
    return Cost(sum(p.numel() for p in parameters), macs)
