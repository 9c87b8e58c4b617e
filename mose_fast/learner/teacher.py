"""A frozen copy of a network that a method distils from, and what networks give a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mose_fast.learner.latch import gathered_statistics, undone_if
from mose_fast.nn import ExpertNetwork


class Outputs(NamedTuple):
    """Outputs for V views: ``logits`` [V, K], ``features`` [V, D], ``projections`` [V, P]."""

    logits: Tensor
    features: Tensor
    projections: Tensor


def outputs_of(forward: Callable[[Tensor], Any], views: Tensor) -> Outputs:
    """The outputs of a network of one expert for views float [V, 3, H, W]."""
    # Batch norm in training refuses a single value a channel, which one 8x8 image leaves in the
    # last stage.
    given = torch.cat([views, views]) if len(views) == 1 else views
    found = forward(given.contiguous(memory_format=torch.channels_last))
    return Outputs(*(part[0, : len(views)] for part in (found.logits, found.features, found.projections)))


class Teacher(nn.Module):
    """A frozen copy of a learner's network. Its tensors never move, so that a captured step may
    read them.

    Args:
        network: The learner's network, on its device, in channels_last, with its kernels.
        training: Whether batch norm uses the statistics of the batch, as in training. The copy's
            running statistics stay as they are.
        half: Whether it runs under bf16 autocast.
        shadowed: Whether weights of more than one dimension are kept in bf16, as the learner's
            optimiser keeps copies of them.

    Attributes:
        network: The copy.
        present: Whether a network was taken; until then the copy means nothing.
    """

    def __init__(
        self, network: ExpertNetwork, *, training: bool = False, half: bool = False, shadowed: bool = False
    ) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False).train(training)
        self._half = half
        self._statistics = gathered_statistics(self.network)
        self._undone = torch.ones((), dtype=torch.bool, device=next(network.parameters()).device)
        self.present = False
        if shadowed:
            for parameter in self.network.parameters():
                if parameter.dim() > 1:
                    parameter.data = parameter.data.to(torch.bfloat16)

    @torch.no_grad()
    def take(self, network: ExpertNetwork) -> None:
        """Copies the parameters and buffers of a network of the same kind, in place."""
        for own, given in zip(self.network.state_dict().values(), network.state_dict().values(), strict=True):
            own.copy_(given)
        self.present = True

    @torch.no_grad()
    def outputs(self, views: Tensor) -> Outputs:
        """The copy's outputs for normalised views float [V, 3, H, W], without gradients."""
        autocast = torch.autocast(views.device.type, torch.bfloat16, enabled=self._half)
        # Nothing reads them, but they are state, which a step that is refused must not change.
        unchanged = undone_if(self._undone, [self._statistics]) if self.network.training else nullcontext()
        with autocast, unchanged:
            return outputs_of(self.network, views)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.present)

    def set_extra_state(self, state: Tensor) -> None:
        self.present = bool(state)
