"""The model of a learner: a network, its optimiser, and the latch that freezes both."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import matmul
from torch.func import functional_call

from mose_fast.augment import ViewMaker
from mose_fast.learner.latch import Latch, undone_if
from mose_fast.learner.momentum_teacher import MomentumTeacher
from mose_fast.nn import Cost, ExpertNetwork, count_cost
from mose_fast.optim import FlatAdam


def padded_size(images: int, batch: int) -> int:
    """The size that images are padded to: ``batch``, or its smallest repeated half that is enough.

    On a GPU, cuDNN searches plans for each new batch size; padding leaves only a few.
    """
    while images <= -(-batch // 2) < batch:
        batch = -(-batch // 2)
    return batch


def first_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """One line on how tensors differ from the wanted ones in name or shape; None if they do not."""
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


def set_precision(precision: str) -> None:
    """Sets the process's switches so that fp32 means fp32, in the sums of products in bf16 too:
    cuDNN's convolutions use TF32 (10 bits of mantissa) on their own, unlike PyTorch's matrix
    products; and cuBLAS may round the partial sums of a product in bf16 to bf16 before it adds
    them. PyTorch passes that on for single products, not for batched ones.
    """
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    splits = matmul.allow_bf16_reduced_precision_reduction_split_k
    matmul.allow_bf16_reduced_precision_reduction = False, splits


class Model:
    """Takes optimiser steps, gives outputs, and is saved and restored. It knows neither memory nor
    tasks.

    Attributes:
        network: The network, on its device, in channels_last.
        optimiser: The optimiser of its parameters.
        latch: Freezes both once a loss is not finite.
        leaves: For each parameter, in order, the tensor that forward passes use and whose ``grad``
            the optimiser reads: the parameter, or its bf16 copy if the optimiser keeps one.
        first_rows: The first values of parameters with a row for each class, [K, ...], as far as
            the learner wants :meth:`renewed` to have them.
        teacher: The moving average of the weights, if one is kept.
    """

    def __init__(
        self,
        network: ExpertNetwork,
        optimiser: torch.optim.Optimizer,
        views: ViewMaker,
        *,
        precision: str,
        evaluation_batch: int,
        reads_losses_late: bool,
        teacher: MomentumTeacher | None = None,
        predict_with: str = "student",
    ) -> None:
        self.network, self.optimiser, self.teacher = network, optimiser, teacher
        self._predict_with = predict_with
        self.latch = Latch(network, optimiser, reads_losses_late=reads_losses_late)
        self._views, self._precision, self._batch = views, precision, evaluation_batch
        self._device = next(network.parameters()).device
        self._weight = 1.0
        self.first_rows: dict[nn.Parameter, Tensor] = {}
        # The loss's own gradient, made once.
        self._one = torch.ones((), device=self._device)
        self.leaves = optimiser.leaves if isinstance(optimiser, FlatAdam) else list(network.parameters())
        self._shadowed = isinstance(optimiser, FlatAdam) and any(shadow is not None for shadow in optimiser.shadows)
        self._built_with = self._numbers()

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Makes fp32 mean fp32 (:func:`set_precision`), and leaves the switches as they were."""
        tf32 = torch.backends.cudnn.allow_tf32
        rounds = matmul.allow_bf16_reduced_precision_reduction
        splits = matmul.allow_bf16_reduced_precision_reduction_split_k
        set_precision(self._precision)
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = tf32
            matmul.allow_bf16_reduced_precision_reduction = rounds, splits

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for the forward passes and :meth:`minimise` of one training step: it sets the
        precision, and restores the running statistics if the step changes nothing.
        """
        with self.precise(), undone_if(self.latch.closed, [self.latch.statistics]):
            yield

    def autocast(self) -> torch.autocast:
        """bf16 autocast if the run's precision is bf16."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16")

    def forward(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The network's forward pass in the run's precision, with bf16 copies of weights if any."""
        names = [name for name, _ in self.network.named_parameters()]
        weights = dict(zip(names, self.leaves, strict=True)) if self._shadowed else {}
        return self._passed(self.network, weights, images, *args, **kwargs)

    @torch.no_grad()
    def teach(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        """:meth:`forward` with the moving average of the weights, without gradients."""
        return self._passed(self.teacher.network, {}, images, *args, **kwargs)

    def _passed(self, network: nn.Module, weights: dict[str, Tensor], images: Tensor, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._shadowed else self.autocast():
            images = images.to(torch.bfloat16) if self._shadowed else images
            return functional_call(network, weights, (images, *args), kwargs)

    @contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """A context in which :meth:`minimise` multiplies losses by ``weight``; Adam undoes it."""
        self._weight = weight
        try:
            yield
        finally:
            self._weight = 1.0

    def minimise(self, loss: Tensor, backward: Callable[[], None] | None = None) -> Tensor:
        """Takes one optimiser step on a scalar loss, unless it or an earlier one is not finite;
        returns the loss that :meth:`Latch.reported` returns. ``backward`` fills the gradients of
        :attr:`leaves` in place of the loss's own backward pass.
        """
        if self.latch.admits(loss):
            self.optimiser.zero_grad(set_to_none=True)
            (partial(self._backward, loss) if backward is None else backward)()
            self.optimiser.step(**({"loss": loss.detach()} if self.latch.by_optimiser else {}))
            if self.teacher is not None:
                self.teacher.follow(self.latch.closed)
        return self.latch.reported(loss)

    def _backward(self, loss: Tensor) -> None:
        (loss if self._weight == 1 else self._weight * loss).backward(self._one)

    @torch.no_grad()
    def predicting(self) -> dict[str, Tensor]:
        """The parameters, float32, and the buffers that predict, by name. Running statistics are
        the student's, but for a teacher that averages its own.
        """
        tensors = self.network.state_dict()
        if self._predict_with == "teacher":
            return tensors | self.teacher.tensors()
        if self._predict_with == "mean":
            averages = zip(self.network.named_parameters(), self.teacher.averages, strict=True)
            return tensors | {name: (weight + average) / 2 for (name, weight), average in averages}
        return tensors

    @torch.no_grad()
    def pull_back(self, share: float) -> None:
        """Moves the weights this share of the way to their moving average, unless the latch is
        closed.
        """
        share = torch.where(self.latch.closed, 0.0, share)
        for weight, average in zip(self.network.parameters(), self.teacher.averages, strict=True):
            weight.lerp_(average, share)
        self.weights_were_set()

    @torch.no_grad()
    def outputs(self, x: Tensor, after_part: Callable[[], None], student: bool = False) -> tuple[Tensor, Tensor]:
        """Features float32 [E, N, D] and logits float32 [E, N, K] of raw images uint8 [N, H, W, 3]
        in evaluation mode, with the weights that predict or the trained ones of the ``student``;
        calls ``after_part`` after each forward pass.
        """
        self.network.eval()
        forward = self.forward
        if self._predict_with != "student" and not student:
            weights = self.predicting()
            if self._shadowed:
                weights = {n: t.to(torch.bfloat16) if t.dim() > 1 else t for n, t in weights.items()}
            forward = partial(self._passed, self.network, weights)
        features, logits = [], []
        for part in x.split(self._batch):
            rows = part.to(self._device)
            padding = rows.new_zeros(padded_size(len(rows), self._batch) - len(rows), *rows.shape[1:])
            rows = torch.cat([rows, padding]) if len(padding) else rows
            images = self._views.normalise(rows).contiguous(memory_format=torch.channels_last)
            with self.precise():
                outputs = forward(images)
            # In evaluation mode images do not influence each other, so padding changes none.
            features.append(outputs.features[:, : len(part)].float())
            logits.append(outputs.logits[:, : len(part)].float())
            after_part()
        return torch.cat(features, 1), torch.cat(logits, 1)

    @contextmanager
    def renewed(self, rows: Tensor, values: Mapping[nn.Parameter, Tensor] | None = None) -> Iterator[None]:
        """A context of one step, before which ``rows``, bool [K], of some parameters start anew
        from ``values`` [K, ...], or :attr:`first_rows`, with zero moments. If the step is not
        taken, all is as before. It can be part of a captured graph.
        """
        new = []
        for parameter, new_values in (self.first_rows if values is None else values).items():
            moments = [m for m in self.optimiser.state.get(parameter, {}).values() if m.shape == parameter.shape]
            new += [(parameter, new_values), *((moment, 0) for moment in moments)]
        with undone_if(self.latch.closed, [tensor for tensor, _ in new]):
            with torch.no_grad():
                for tensor, value in new:
                    mask = rows.reshape(-1, *(1,) * (tensor.dim() - 1))
                    tensor.copy_(torch.where(mask, value, tensor))
                self.weights_were_set()
            yield
        self.weights_were_set()

    def forget_moments(self) -> None:
        """Sets the optimiser's moments and step counts to zero, unless the latch is closed."""
        for moments in self.optimiser.state.values():
            for tensor in moments.values():
                tensor.masked_fill_(~self.latch.closed.to(tensor.device), 0)

    def weights_were_set(self) -> None:
        """Renews the bf16 copies of weights; call it after anything but a step changed them."""
        if isinstance(self.optimiser, FlatAdam):
            self.optimiser.refresh_shadows()

    def costs(self, image_size: tuple[int, int], *, deepest: bool) -> tuple[Cost, Cost]:
        """Parameters and multiply-accumulates an image (H, W) of the network in training, and of
        what is deployed: the ``deepest`` expert's feature alone, or all logits.
        """
        network = copy.deepcopy(self.network)
        # Modules are what is counted, so each must run.
        network.use_kernels("torch")
        deployed = network.deepest_feature if deepest else lambda x: network.classify(network.features(x))
        return count_cost(network, network, image_size), count_cost(network, deployed, image_size)

    # State

    def state(self) -> dict[str, Tensor]:
        tensors = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        for name, parameter in self.network.named_parameters():
            for part, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"adam/{part}/{name}"] = value
        return tensors | {f"average/{name}": tensor for name, tensor in self._averages().items()}

    def _averages(self) -> dict[str, Tensor]:
        return {} if self.teacher is None else self.teacher.tensors()

    def changed_numbers(self) -> list[dict[str, float]]:
        """The optimiser's numbers, such as the learning rate, that the method has changed."""
        pairs = zip(self._numbers(), self._built_with, strict=True)
        return [{name: value for name, value in now.items() if value != before[name]} for now, before in pairs]

    def _numbers(self) -> list[dict[str, float]]:
        # FlatAdam has its learning rate in a tensor.
        return [
            {name: float(value) for name, value in group.items() if name == "lr" or type(value) in (int, float)}
            for group in self.optimiser.param_groups
        ]

    def load(self, tensors: dict[str, Tensor], changed: Sequence[Mapping[str, float]] = ()) -> None:
        """Restores the results of :meth:`state` and :meth:`changed_numbers`, and opens the latch;
        ValueError if they belong to another network.
        """

        def part(owner: str) -> dict[str, Tensor]:
            return {name.removeprefix(owner): t for name, t in tensors.items() if name.startswith(owner)}

        network, averages = part("network/"), part("average/")
        difference = first_difference(network, self.network.state_dict())
        difference = difference or first_difference(averages, self._averages())
        if difference is not None:
            raise ValueError(f"the state belongs to another network: {difference}")
        self.network.load_state_dict(network)
        for name, average in self._averages().items():
            average.copy_(averages[name])
        self.weights_were_set()
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
        groups = self.optimiser.state_dict()["param_groups"]
        all_changed = changed or [{}] * len(groups)
        for group, built_with, numbers in zip(groups, self._built_with, all_changed, strict=True):
            group |= built_with | numbers
        rates = [group["lr"] for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):
                # The same tensor as before, which a captured step reads.
                group["lr"] = rate.fill_(group["lr"])
        self.latch.open()

    def weights_hash(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state().items()):
            if name.startswith("adam/"):
                continue
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
