"""What learners with one network and one optimiser share."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from mose_fast.augment import RECIPES, ViewMaker, choose_feed
from mose_fast.config import RunConfig
from mose_fast.device import Choice
from mose_fast.methods.base import Learner
from mose_fast.methods.statistics import RunningStatistics
from mose_fast.nn import Cost, ExpertNetwork, count_cost
from mose_fast.nn.kernels import choose_kernels
from mose_fast.optim import FlatAdam

__all__ = ["NetworkLearner", "first_difference", "padded_size"]

# The random state is the process's; runs in several threads must not draw from each other's.
_PYTORCH_RANDOM_STATE = threading.Lock()


def padded_size(images: int, batch: int) -> int:
    """The size that so many images are padded to for a forward pass: ``batch``, or the smallest of
    its halves that holds them.

    On a card, cuDNN looks for plans of all convolutions whenever it meets a batch size for the
    first time. The last parts of evaluations have another size each time; padded they have one of a
    few.
    """
    while images <= -(-batch // 2) < batch:
        batch = -(-batch // 2)
    return batch


def first_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """How tensors differ from wanted ones in name or shape, in a line; None where they do not."""
    missing, foreign = [name for name in wanted if name not in found], [name for name in found if name not in wanted]
    shapes = [name for name in wanted if name in found and found[name].shape != wanted[name].shape]
    if shapes:
        first = shapes[0]
        text = f"{first} has shape {list(found[first].shape)}; wanted {list(wanted[first].shape)}"
    elif missing:
        text = f"{missing[0]} is missing"
    elif foreign:
        text = f"{foreign[0]} is not in this network"
    else:
        return None
    more = len(shapes) + len(missing) + len(foreign) - 1
    return text + (f" (and {more} more tensors differ)" if more else "")


class NetworkLearner(Learner):
    """A learner with one :class:`ExpertNetwork`, trained by one optimiser for the whole stream.

    Attributes:
        network: The network, channels_last, on the learner's device.
        optimiser: Its optimiser.
        views: Makes views of raw images.
        statistics: The network's running statistics.
        latch: bool scalar on the device, set by the first loss that is not finite: from then on no
            weight and no statistic changes.
    """

    #: True where every forward pass in training goes through :meth:`run_network`, so that the
    #: weights may have shadows in bf16.
    uses_shadows: ClassVar[bool] = False

    def __init__(self, config: RunConfig, **stream: Any) -> None:
        super().__init__(config, **stream)
        self.kernels = choose_kernels(config.kernels, self.device)
        self.start_afresh()
        self.views = self.build_views(config.options.augment)

    def start_afresh(self) -> None:
        """Gives the learner an untrained network, the same for the same seed, and an optimiser for
        it.
        """
        # The weights depend on their seed alone, not on the device or on what the program drew
        # before.
        seed = self.config.seed if self.config.init_seed is None else self.config.init_seed
        with _PYTORCH_RANDOM_STATE, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self.build_network()
        network.use_kernels(self.kernels)
        self.network = network.to(self.device, memory_format=torch.channels_last)
        self.statistics = RunningStatistics(self.network)
        self.optimiser = self.build_optimiser()
        if isinstance(self.optimiser, FlatAdam):
            self.latch = self.optimiser.latch
        else:
            self.latch = torch.zeros((), dtype=torch.bool, device=self.device)
        # PyTorch's own way to skip a step by what the card finds, made for gradient scaling.
        self._skip = torch.zeros((), device=self.device)
        if self.reads_losses_late and not isinstance(self.optimiser, FlatAdam):
            self.optimiser.found_inf = self._skip

    def change_precision(self, precision: Choice) -> None:
        super().change_precision(precision)
        # The optimiser may keep copies of the weights in that precision.
        self.start_afresh()

    @abstractmethod
    def build_network(self) -> ExpertNetwork:
        """The untrained network; PyTorch's random state is set by the seed of the weights."""

    def build_optimiser(self) -> torch.optim.Optimizer:
        """The optimiser of all parameters of the network."""
        o = self.config.options
        if self.kernels == "fused":
            return FlatAdam(
                self.network.parameters(),
                lr=o.lr,
                betas=(o.beta1, o.beta2),
                eps=o.eps,
                weight_decay=o.weight_decay,
                shadow_dtype=torch.bfloat16 if self.shadowed else None,
            )
        # PyTorch's fused Adam can skip a step without the host knowing.
        how = {"fused": True, "capturable": True} if self.reads_losses_late else {}
        return torch.optim.Adam(
            self.network.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, **how
        )

    @property
    def shadowed(self) -> bool:
        """Whether forward passes run on copies of the weights in bf16, which the optimiser
        keeps.
        """
        return self.uses_shadows and self.kernels == "fused" and self.precision.name == "bf16"

    def build_views(self, recipe: str) -> ViewMaker:
        """What makes views of raw images by a recipe of :data:`mose_fast.augment.views.RECIPES`;
        sets :attr:`feed`.
        """
        self.feed = choose_feed(self.config.feed, self.device, RECIPES[recipe])
        return ViewMaker(
            recipe,
            self.inner_views(),
            mirror=self.mirrored,
            mean=self.mean,
            std=self.std,
            jitter_normalised=self.config.options.jitter_domain == "normalised",
            feed=self.feed.name,
        )

    def inner_views(self) -> int:
        """Fixed copies of every row: 1, 2, 4 or 16."""
        return 1

    @contextmanager
    def forward_precision(self) -> Iterator[None]:
        """The precision of the network's forward pass: bf16 autocast where the run asks for it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision.name == "bf16"):
            yield

    @property
    def diverged(self) -> bool:
        return bool(self.latch)

    def run_network(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The network's forward pass in the run's precision: on the bf16 shadows of its weights
        where the optimiser keeps some.
        """
        if self.shadowed:
            names = [name for name, _ in self.network.named_parameters()]
            weights = dict(zip(names, self.optimiser.leaves, strict=True))
            return functional_call(self.network, weights, (images.to(torch.bfloat16), *args), kwargs)
        with self.forward_precision():
            return self.network(images, *args, **kwargs)

    def update(self, loss: Tensor) -> None:
        """One optimiser step on a loss, unless it or an earlier one is not finite."""
        if self.minimise(loss):
            self.steps += 1

    def minimise(self, loss: Tensor) -> bool:
        """:meth:`update` without counting the step: in a captured step, this is what is captured.

        Returns:
            Whether the step was taken, as far as the host knows: a learner whose losses are read
            late always says so.
        """
        if not self.accepts(loss):
            return False
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()
        return True

    def accepts(self, loss: Tensor) -> bool:
        """Sets the latch unless the loss is finite; False where the host knows that it is set, and
        nothing must be changed by the step.
        """
        self.latch.logical_or_(loss.detach().isfinite().logical_not_())
        if self.reads_losses_late:
            self._skip.copy_(self.latch)
            return True
        return not self.diverged

    def reported(self, loss: Tensor) -> Tensor:
        """A step's loss as it is told: not finite once the run has diverged, though the frozen
        network's loss may be.
        """
        return torch.where(self.latch & loss.detach().isfinite(), torch.nan, loss.detach())

    @torch.no_grad()
    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.network.eval()
        features, logits = [], []
        for part in x.split(self.evaluation_batch):
            rows = part.to(self.device)
            padding = rows.new_zeros(padded_size(len(rows), self.evaluation_batch) - len(rows), *rows.shape[1:])
            rows = torch.cat([rows, padding]) if len(padding) else rows
            images = self.views.normalise(rows).contiguous(memory_format=torch.channels_last)
            with self.precise():
                outputs = self.run_network(images)
            # In evaluation mode no image sees another, so that padding changes none.
            features.append(outputs.features[:, : len(part)].float())
            logits.append(outputs.logits[:, : len(part)].float())
            self.after_step()
        if not features:
            e = self.network.experts
            return torch.empty(e, 0, self.network.feature_size, device=self.device), torch.empty(
                e, 0, self.classes, device=self.device
            )
        return torch.cat(features, 1), torch.cat(logits, 1)

    def costs(self) -> tuple[Cost, Cost]:
        network, last = copy.deepcopy(self.network), str(self.network.experts)
        # Modules are what is counted, so each must run.
        network.use_kernels("torch")
        deployed = (
            network.deepest_feature
            if self.resolve_expert() == ("ncm", last)
            else lambda x: network.classify(network.features(x))
        )
        return count_cost(network, network, self.image_size), count_cost(network, deployed, self.image_size)

    def network_state(self) -> dict[str, Tensor]:
        tensors = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            for part, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"adam/{part}/{name}"] = value
        return tensors

    def load_network_state(self, tensors: dict[str, Tensor]) -> None:
        network = {name.removeprefix("network/"): t for name, t in tensors.items() if name.startswith("network/")}
        difference = first_difference(network, self.network.state_dict())
        if difference is not None:
            raise ValueError(f"the state belongs to another network: {difference}")
        self.network.load_state_dict(network)
        if isinstance(self.optimiser, FlatAdam):
            self.optimiser.refresh_shadows()
        moments: dict[int, dict[str, Tensor]] = {}
        for position, (name, parameter) in enumerate(self.network.named_parameters()):
            names = {part: f"adam/{part}/{name}" for part in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")}
            # Copies, since the optimiser counts steps in place.
            parts = {part: tensors[key].clone() for part, key in names.items() if key in tensors}
            for part in parts.keys() - {"step"}:
                # In the parameter's own memory format, as the optimiser made them.
                parts[part] = torch.empty_like(parameter).copy_(parts[part])
            for part, value in parts.items():
                if part != "step" and value.shape != parameter.shape:
                    raise ValueError(f"{names[part]} has shape {list(value.shape)}; wanted {list(parameter.shape)}")
            if parts:
                moments[position] = parts
        self.optimiser.load_state_dict({"state": moments, "param_groups": self.optimiser.state_dict()["param_groups"]})
        self.latch.fill_(False)
