"""Tensors and modules that a method keeps of its own, and the search for those that it forgot."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mose_fast.learner.model import first_difference

#: When a method writes what it keeps, which says what has to undo it.
WRITTEN = ("steps", "plans", "tasks")

# Of these there may be many in a list.
_PLAIN = (str, bytes, int, float, type(None))


class _Kept(NamedTuple):
    value: Tensor | nn.Module
    written: str
    tensors: list[Tensor]


def _state(name: str, value: Tensor | nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds, by name; of a module those of its ``state_dict``."""
    if isinstance(value, Tensor):
        return {name: value}
    return {f"{name}/{part}": tensor for part, tensor in value.state_dict().items()}


class KeptValues(dict[str, _Kept]):
    """What a learner keeps, by name; see :meth:`mose_fast.methods.Learner.keep`."""

    def put(self, name: str, value: Tensor | nn.Module, written: str) -> None:
        """Keeps a value, in place of an earlier one of the name."""
        tensors = [value] if isinstance(value, Tensor) else [*value.parameters(), *value.buffers()]
        self[name] = _Kept(value, written, tensors)

    def same_shapes(self, name: str, value: Tensor | nn.Module) -> bool:
        """Whether a value has the shapes of the one that is kept."""
        return first_difference(_state(name, value), _state(name, self[name].value)) is None

    def written(self, *times: str) -> list[Tensor]:
        """All tensors that are written at some of the times of :data:`WRITTEN`."""
        return [tensor for kept in self.values() if kept.written in times for tensor in kept.tensors]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint must contain."""
        return {part: tensor for name, kept in self.items() for part, tensor in _state(name, kept.value).items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the result of :meth:`tensors`; ValueError if it is of other values. A tensor of
        another shape is replaced.
        """
        for name, kept in self.items():
            if isinstance(kept.value, Tensor) and name in tensors and tensors[name].shape != kept.value.shape:
                self.put(name, torch.empty_like(tensors[name], device=kept.value.device), kept.written)
        if difference := first_difference(tensors, self.tensors()):
            raise ValueError(f"what the method keeps differs: {difference}")
        for name, kept in self.items():
            if isinstance(kept.value, Tensor):
                kept.value.copy_(tensors[name])
            else:
                kept.value.load_state_dict({part: tensors[f"{name}/{part}"] for part in kept.value.state_dict()})

    @contextmanager
    def only_plans(self) -> Iterator[None]:
        """A context that may write only what plans write; else RuntimeError."""

        def versions() -> dict[str, list[int]]:
            others = {name: kept.tensors for name, kept in self.items() if kept.written != "plans"}
            return {name: [tensor._version for tensor in tensors] for name, tensors in others.items()}

        before = versions()
        yield
        for name, now in versions().items():
            if now != before[name]:
                raise RuntimeError(
                    f"self.{name} is written in plan or store, which run ahead of the steps; wanted"
                    f" self.keep({name!r}, ..., written='plans')"
                )


def survives_json(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON and read."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError, RuntimeError):
        return False


def unsaved(
    attributes: Mapping[str, Any], saved: Collection[Tensor], known: Iterable[Any] = ()
) -> tuple[str, str] | None:
    """The first of some attributes that holds numbers of its own which are not in ``saved``: where,
    for example ``history[2]``, and what; None: there is none. Looked into are modules, containers
    and objects of classes that are not the standard library's, but for those ``known``.
    """
    memory = {tensor.untyped_storage().data_ptr() for tensor in saved}
    waiting, met = [*attributes.items()][::-1], set(map(id, known))
    while waiting:
        path, value = waiting.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if isinstance(value, Tensor):
            if value.numel() and value.untyped_storage().data_ptr() not in memory:
                return path, f"tensor of shape {list(value.shape)}"
        elif isinstance(value, np.ndarray | torch.Generator | np.random.Generator):
            return path, f"{type(value).__module__}.{type(value).__qualname__}"
        else:
            waiting += [(path + step, part) for step, part in _inside(value) if not isinstance(part, _PLAIN)][::-1]
    return None


def _inside(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        return [(f".{name}", tensor) for name, tensor in (*value.named_parameters(), *value.named_buffers())]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]" if isinstance(key, _PLAIN) else "[...]", part) for key, part in value.items()]
    if isinstance(value, Collection) and not isinstance(value, _PLAIN):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return []
    return [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
