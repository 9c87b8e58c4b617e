"""Tensors and modules that a method keeps of its own: their place in the state, what undoes them,
and the search for those that it forgot to keep.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mose_fast.learner.model import first_difference

__all__ = ["WRITTEN", "KeptValues", "survives_json", "undone_if", "unsaved"]

#: When a method writes what it keeps, which says what has to undo it.
WRITTEN = ("steps", "plans", "tasks")

# Of these there may be many in a list.
_PLAIN = (str, bytes, int, float, type(None))


class _Kept(NamedTuple):
    value: Tensor | nn.Module
    written: str
    tensors: list[Tensor]

    def state(self, name: str) -> dict[str, Tensor]:
        """The tensors that a checkpoint holds, by name."""
        if isinstance(self.value, Tensor):
            return {name: self.value}
        return {f"{name}/{part}": tensor for part, tensor in self.value.state_dict().items()}


class KeptValues:
    """What a learner keeps, by name; see :meth:`mose_fast.methods.Learner.keep`."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def values(self) -> dict[str, Tensor | nn.Module]:
        """The values by name."""
        return {name: kept.value for name, kept in self._kept.items()}

    def put(self, name: str, value: Tensor | nn.Module, written: str) -> None:
        """Keeps a value, in place of an earlier one of the name."""
        tensors = [value] if isinstance(value, Tensor) else [*value.parameters(), *value.buffers()]
        self._kept[name] = _Kept(value, written, tensors)

    def same_shapes(self, name: str, value: Tensor | nn.Module) -> bool:
        """Whether a value has the shapes of the one that is kept."""
        kept = self._kept[name].value
        if isinstance(kept, nn.Module) or isinstance(value, nn.Module):
            return type(kept) is type(value) and first_difference(value.state_dict(), kept.state_dict()) is None
        return kept.shape == value.shape

    def written(self, *times: str) -> list[Tensor]:
        """All tensors that are written at some of the times of :data:`WRITTEN`."""
        return [tensor for kept in self._kept.values() if kept.written in times for tensor in kept.tensors]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint must contain; of a module those of its ``state_dict``."""
        found: dict[str, Tensor] = {}
        for name, kept in self._kept.items():
            found |= kept.state(name)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the result of :meth:`tensors`; ValueError if it is of other values."""
        own = self.tensors()
        replaced = {
            name: kept
            for name, kept in self._kept.items()
            if isinstance(kept.value, Tensor) and name in tensors and tensors[name].shape != kept.value.shape
        }
        found, wanted = ({n: t for n, t in part.items() if n not in replaced} for part in (tensors, own))
        if difference := first_difference(found, wanted):
            raise ValueError(f"what the method keeps differs: {difference}")
        for name, kept in self._kept.items():
            if name in replaced:
                self.put(name, tensors[name].to(kept.value.device, copy=True), kept.written)
            elif isinstance(kept.value, Tensor):
                kept.value.copy_(tensors[name])
            else:
                parts = {part: tensors[f"{name}/{part}"] for part in kept.value.state_dict()}
                kept.value.load_state_dict(parts)

    @contextmanager
    def only_plans(self) -> Iterator[None]:
        """A context that may write only what plans write; else RuntimeError."""
        others = {name: kept.tensors for name, kept in self._kept.items() if kept.written != "plans"}
        before = {name: [tensor._version for tensor in tensors] for name, tensors in others.items()}
        yield
        for name, tensors in others.items():
            if [tensor._version for tensor in tensors] != before[name]:
                raise RuntimeError(
                    f"self.{name} is written in plan or store, which run ahead of the steps; wanted"
                    f" self.keep({name!r}, ..., written='plans')"
                )


@contextmanager
def undone_if(closed: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context that restores tensors if ``closed``, a bool scalar on their device, is True at its
    end. The host does not read it, so this can be part of a captured graph.
    """
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(closed, old, tensor))


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
