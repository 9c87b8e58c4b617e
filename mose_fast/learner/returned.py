"""Checks of what a method's own functions return. Each refusal is one line that names the function,
its class, what came and what was wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mose_fast.settings.run import ConfigError, shown


def check_returned(learner: object, hook: str, found: Any, fits: bool, wanted: str) -> None:
    """Refuses what the function ``hook`` of a learner's class returned unless it ``fits``."""
    if not fits:
        raise ConfigError(f"{type(learner).__qualname__}.{hook} returned {_told(found)}; wanted {wanted}")


def are_slots(found: Any, low: int, below: int, count: int | None = None) -> bool:
    """Whether ``found`` is int64 [count], or of any length, in ``low`` ... ``below`` - 1.

    On a GPU its values are not looked at, since the host would wait.
    """
    if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.dim() != 1:
        return False
    if count is not None and len(found) != count:
        return False
    return found.is_cuda or not len(found) or (int(found.min()) >= low and int(found.max()) < below)


def are_views(found: Any) -> bool:
    """Whether ``found`` is float [V, 3, H, W]."""
    return isinstance(found, Tensor) and found.is_floating_point() and found.dim() == 4 and found.shape[1] == 3


def are_plain(found: Any) -> bool:
    """Whether ``found`` is a dictionary with names for tensors, plain values and tuples of them."""
    return _by_name(found) and all(isinstance(leaf, Tensor | int | float | str | None) for leaf in tree_leaves(found))


def are_scalars(found: Any) -> bool:
    """Whether ``found`` is a dictionary with names for floating-point scalars, at least one."""
    return (
        _by_name(found)
        and bool(found)
        and all(
            isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 0 for value in found.values()
        )
    )


def _by_name(found: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(name, str) for name in found)


def _told(found: Any) -> str:
    if isinstance(found, Tensor):
        ends = ""
        if found.device.type == "cpu" and found.numel() and found.dtype == torch.int64:
            ends = f" from {int(found.min())} to {int(found.max())}"
        return f"a tensor of {found.dtype} {list(found.shape)}{ends}"
    if isinstance(found, Mapping):
        return f"{{{', '.join(f'{shown(name)}: {_told(value)}' for name, value in found.items())}}}"
    return shown(found) if isinstance(found, int | float | str | None) else f"a {type(found).__qualname__}"
