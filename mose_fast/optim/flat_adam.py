"""Adam over flat buffers of weights, moments, averages and bf16 copies; few launches a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mose_fast.ops.adam import adam_step

_ALIGNMENT = 64  # elements: each parameter's share of each buffer starts at a multiple of 128 bytes
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Options of torch.optim.Adam that this class does not have.
_NOT_SERVED = ("amsgrad", "maximize", "decoupled_weight_decay", "differentiable")


class FlatAdam(torch.optim.Optimizer):
    """``torch.optim.Adam`` (weight decay added to the gradient) over flat buffers, with bf16 copies
    of the weights.

    On construction every parameter's ``data`` becomes a view of one flat float32 buffer, in its own
    memory format: a channels_last weight stays channels_last. Build it after the network has been
    moved to its device and format, and do not move the network later. The network's
    ``load_state_dict`` copies weights into those views; call :meth:`refresh_shadows` afterwards.

    A forward pass uses :attr:`leaves` in place of the parameters. A parameter of more than one
    dimension has a *shadow*, a leaf tensor of ``shadow_dtype`` that every step rewrites, so that no
    weight is cast in the forward pass; norms' weights and biases stay float32 and are their own
    leaves. Gradients accumulate in the leaves' ``grad``.

    With ``average_rate`` r, each weight w has a moving average a, at first a copy of it, and a step
    that updates w then does a <- a + r (w - a). The averages are not part of :meth:`state_dict`:
    whoever uses them keeps :attr:`averages`, and after copying into them calls
    :meth:`refresh_shadows`.

    A step reads the learning rate, the counts of steps and the latch on the device and never waits:
    it can be captured in a CUDA graph. The learning rate is a tensor in ``param_groups[0]["lr"]``,
    which PyTorch's schedulers fill in place, also for a captured step; the next call of
    :meth:`step` (not a replay) takes over a number that is put there instead.

    Args:
        params: Parameters, or pairs of name and parameter: float32, on one device; one group.
        shadow_dtype: bfloat16; None: the parameters are the leaves.
        average_rate: Rate r of the moving averages, above 0 and at most 1; None: there are none.

    Attributes:
        leaves: For each parameter, in order, the tensor that a forward pass uses.
        shadows: The shadow of each parameter, None where it has none.
        averages: The moving average of each parameter, float32, of its shape and memory order;
            empty without ``average_rate``.
        average_leaves: What a forward pass with the averages uses: for each parameter the bf16 copy
            of its average if it has a shadow, else its average; empty without ``average_rate``.
        latch: bool scalar. Once set, by a ``loss`` that is not finite or by the caller, no step
            writes anything until it is cleared.

    Raises:
        TypeError: A parameter is not float32, or ``shadow_dtype`` is another dtype.
        ValueError: There is no parameter, parameters lie on several devices, ``lr`` is negative,
            ``average_rate`` is not above 0 and at most 1, or more than one group is given.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        shadow_dtype: torch.dtype | None = None,
        average_rate: float | None = None,
    ) -> None:
        if shadow_dtype not in (None, torch.bfloat16):
            raise TypeError(f"shadow_dtype is {shadow_dtype}; wanted torch.bfloat16 or None")
        if not lr >= 0:
            raise ValueError(f"lr is {lr!r}; wanted at least 0")
        if average_rate is not None and not 0 < average_rate <= 1:
            raise ValueError(f"average_rate is {average_rate!r}; wanted above 0 and at most 1, or None")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._parameters: list[nn.Parameter] = self.param_groups[0]["params"]
        device = self._parameters[0].device
        for position, parameter in enumerate(self._parameters):
            if parameter.dtype != torch.float32:
                raise TypeError(f"parameter {position} has dtype {parameter.dtype}; wanted float32")
            if parameter.device != device:
                raise ValueError(
                    f"parameter {position} is on {parameter.device}; wanted {device}, where the first one is"
                )
        self._offsets, size = [], 0
        for parameter in self._parameters:
            self._offsets.append(size)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._lr = torch.tensor(float(lr), dtype=torch.float32, device=device)
        self.param_groups[0]["lr"] = self._lr
        self.latch = torch.zeros((), dtype=torch.bool, device=device)
        self._steps = torch.zeros(len(self._parameters), device=device)
        self._master, self._exp_avg, self._exp_avg_sq = (torch.zeros(size, device=device) for _ in range(3))
        self._shadow = None if shadow_dtype is None else torch.zeros(size, dtype=shadow_dtype, device=device)

        self._average_rate = average_rate
        self._average = None if average_rate is None else torch.zeros_like(self._master)
        self._average_shadow = None if average_rate is None or self._shadow is None else torch.zeros_like(self._shadow)

        self._moments = []  # for each parameter, as torch.optim.Adam keeps them
        self.shadows: list[Tensor | None] = []
        self.averages: list[Tensor] = []
        self.average_leaves: list[Tensor] = []
        for position, parameter in enumerate(self._parameters):
            # A dense tensor of the parameter's memory order.
            layout = parameter.shape, torch.empty_like(parameter, device="meta").stride(), self._offsets[position]
            parameter.data = self._master.as_strided(*layout).copy_(parameter.detach())
            moments = (self._exp_avg.as_strided(*layout), self._exp_avg_sq.as_strided(*layout))
            self._moments.append({"step": self._steps[position], **dict(zip(_MOMENTS, moments, strict=True))})
            has_shadow = self._shadow is not None and parameter.dim() > 1
            shadow = self._shadow.as_strided(*layout).detach() if has_shadow else None
            self.shadows.append(shadow if shadow is None else shadow.requires_grad_(parameter.requires_grad))
            if self._average is not None:
                self.averages.append(self._average.as_strided(*layout).copy_(parameter.detach()))
                copied = self._average_shadow.as_strided(*layout) if has_shadow else self.averages[-1]
                self.average_leaves.append(copied)
        self.leaves: list[Tensor] = [p if s is None else s for p, s in zip(self._parameters, self.shadows, strict=True)]
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self.refresh_shadows()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(
                "a second group of parameters was given; wanted one group, whose buffers have a fixed size"
            )
        super().add_param_group(param_group)

    def refresh_shadows(self) -> None:
        """Rounds the weights and their averages into their bf16 copies; for weights or averages
        changed by anything but :meth:`step`.
        """
        for shadow, buffer in ((self._shadow, self._master), (self._average_shadow, self._average)):
            if shadow is not None:
                shadow.copy_(buffer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for shadow in self.shadows:
            if shadow is not None and shadow.grad is not None:
                shadow.grad = None if set_to_none else shadow.grad.zero_()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None] | None = None, loss: Tensor | None = None) -> None:
        """Takes one step; the shadows hold the new weights and averages afterwards.

        Args:
            gradients: One for each parameter, in order, of its shape, float32 or bfloat16; None
                leaves its parameter unchanged. By default each leaf's ``grad``.
            loss: float32, one element: where it is not finite, :attr:`latch` is set and nothing is
                written.

        Raises:
            RuntimeError: A parameter's ``data`` was replaced since construction, for example by
                ``network.to(...)``.
            ValueError: A gradient does not fit its parameter.
        """
        group = self.param_groups[0]
        self._take_over_lr()
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            raise RuntimeError(
                "a parameter's data was replaced after FlatAdam had taken it over; wanted a network that is moved"
                " before, and weights that are copied into it"
            )
        if gradients is None:
            gradients = [leaf.grad for leaf in self.leaves]
        elif len(gradients) != len(self._parameters):
            raise ValueError(
                f"there are {len(gradients)} gradients; wanted {len(self._parameters)}, one for each parameter"
            )
        prepared: list[Tensor | None] = []
        for position, (gradient, leaf) in enumerate(zip(gradients, self.leaves, strict=True)):
            if gradient is not None:
                if gradient.shape != leaf.shape:
                    raise ValueError(
                        f"gradient {position} has shape {tuple(gradient.shape)}; wanted {tuple(leaf.shape)}"
                    )
                strides = zip(leaf.shape, gradient.stride(), leaf.stride(), strict=True)
                if any(size > 1 and ours != wanted for size, ours, wanted in strides):  # another memory order
                    gradient = torch.empty_like(leaf, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
                self._keep_moments(position)
            prepared.append(gradient)
        beta1, beta2 = group["betas"]
        adam_step(
            self._master,
            self._exp_avg,
            self._exp_avg_sq,
            prepared,
            self._offsets,
            self._steps,
            self._lr,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            shadow=self._shadow,
            loss=loss,
            latch=self.latch,
            average=self._average,
            average_shadow=self._average_shadow,
            average_rate=self._average_rate or 0.0,
        )
        # Autograd does not see what native code writes; a backward pass that still needs the old
        # weights must fail, not use the new ones.
        written = [leaf for leaf, gradient in zip(self.leaves, prepared, strict=True) if gradient is not None]
        increment_version([*written, *(x for x in (self._average, self._average_shadow) if x is not None)])

    def _take_over_lr(self) -> None:
        group = self.param_groups[0]
        if group["lr"] is not self._lr:
            self._lr.fill_(float(group["lr"]))
            group["lr"] = self._lr

    def _keep_moments(self, position: int) -> None:
        """Puts a parameter's moments into ``state``, from its first gradient on."""
        parameter = self._parameters[position]
        if parameter not in self.state:
            self.state[parameter] = self._moments[position]

    def state_dict(self) -> dict[str, Any]:
        """A state that ``torch.optim.Adam`` can load; tensors are views of the buffers."""
        self._take_over_lr()
        state = super().state_dict()
        state["param_groups"][0]["lr"] = self._lr.item()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a state of this class or of ``torch.optim.Adam`` into the buffers, so that
        captured graphs use it. Moments of parameters without a state become zero. The shadows are
        rewritten, :attr:`latch` stays. Raises ValueError if the state is of another number of
        parameters or groups, a tensor has another shape, or it wants what this class does not do.
        """
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(self._parameters)]:
            raise ValueError(f"the state has groups of {sizes} parameters; wanted one group of {len(self._parameters)}")
        for switch in _NOT_SERVED:
            if groups[0].get(switch):
                raise ValueError(f"the state has {switch}={groups[0][switch]!r}; FlatAdam has no such switch")
        loaded = [state_dict["state"].get(key) for key in groups[0]["params"]]
        for position, (values, parameter) in enumerate(zip(loaded, self._parameters, strict=True)):
            for name in _MOMENTS if values else ():
                if values[name].shape != parameter.shape:
                    raise ValueError(
                        f"{name} of parameter {position} has shape {tuple(values[name].shape)}; wanted"
                        f" {tuple(parameter.shape)}"
                    )
        self._lr.fill_(float(groups[0]["lr"]))
        group = self.param_groups[0]
        group["lr"] = self._lr
        for name in ("betas", "eps", "weight_decay"):
            group[name] = groups[0][name]
        for position, (values, moments) in enumerate(zip(loaded, self._moments, strict=True)):
            if values:
                self._keep_moments(position)
                moments["step"].fill_(float(values["step"]))
                for name in _MOMENTS:
                    moments[name].copy_(values[name])
            else:
                self.state.pop(self._parameters[position], None)
                for tensor in moments.values():
                    tensor.zero_()
        self.refresh_shadows()
