"""The moving average of a network's weights, which teaches the network, predicts, and pulls it back
(docs/specification/baselines.md section 20).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from mose_fast.learner.latch import gathered_statistics, undone_if
from mose_fast.nn import ExpertNetwork
from mose_fast.optim import FlatAdam
from mose_fast.settings.run import MethodOptions


def keeps_average(options: MethodOptions) -> bool:
    """Whether these options need the moving average of the weights."""
    return options.teacher == "momentum" or options.predict_with != "student" or options.pull_back > 0


class MomentumTeacher:
    """The moving average t of the weights s of a network: after each optimiser step
    t <- t + rate (s - t). Its tensors never move, so that a captured step may read them.

    Args:
        network: The network, on its device, with its kernels.
        optimiser: Its optimiser, which updates the averages itself if it keeps them
            (:class:`FlatAdam` with ``average_rate``).
        options: The method's.

    Attributes:
        network: A copy of the network whose parameters are the averages, or their bf16 copies.
        averages: float32, one for each parameter of the network, in order.
        statistics: The averaged running statistics, by name; none where ``teacher_statistics`` is
            ``batch``: then the copy uses each batch's, and its running ones mean nothing.
    """

    def __init__(self, network: ExpertNetwork, optimiser: torch.optim.Optimizer, options: MethodOptions) -> None:
        running = options.teacher_statistics == "running"
        self._student, self._rate = network, options.teacher_rate
        self.network = copy.deepcopy(network).requires_grad_(False).train(not running)
        self._memory = gathered_statistics(self.network)
        names = [n for n, _ in network.named_buffers() if n.endswith(("running_mean", "running_var"))]
        self.statistics = {name: self.network.get_buffer(name) for name in names if running}
        self._by_optimiser = isinstance(optimiser, FlatAdam) and bool(optimiser.averages)
        if self._by_optimiser:
            self.averages = optimiser.averages
            for parameter, leaf in zip(self.network.parameters(), optimiser.average_leaves, strict=True):
                parameter.data = leaf
        else:
            self.averages = [parameter.data for parameter in self.network.parameters()]
        if options.teacher_start == "scaled":
            torch._foreach_mul_(self.averages, self._rate)

    @torch.no_grad()
    def follow(self, closed: Tensor) -> None:
        """Moves the averages after a step of the optimiser, unless ``closed``, a bool scalar on the
        device, which the host does not read.
        """
        rate = torch.where(closed, 0.0, self._rate)
        if not self._by_optimiser:
            weights = [parameter.detach() for parameter in self._student.parameters()]
            torch._foreach_lerp_(self.averages, weights, [rate] * len(weights))
        if self.statistics:
            # Those of the network may not be finite where the latch is closed.
            with undone_if(closed, [self._memory]):
                for name, average in self.statistics.items():
                    average.lerp_(self._student.get_buffer(name), rate)

    def tensors(self) -> dict[str, Tensor]:
        """The averages and averaged statistics, by the names of parameters and buffers."""
        names = [name for name, _ in self._student.named_parameters()]
        return dict(zip(names, self.averages, strict=True)) | self.statistics
