"""The replay memory's two operations: offer a batch (Algorithm R) and draw replay rows.

Both are decided by counter-based randomness, so that CPU, CUDA and the reference make identical
decisions bit for bit. The state is int64[3] = {seed, counter, n_seen} and lives where the memory
lives; a memory of M slots has filled the first min(n_seen, M).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.reference import reservoir as reference
from mose_fast.reference.reservoir import SlotFilter

__all__ = ["SlotFilter", "draw", "insert"]

# A constant, since the Dynamo of torch 2.11 cannot trace what lists the members of an enumeration.
_FILTERS = tuple(SlotFilter)


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {tensor!r}; wanted a torch.Tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; wanted {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; wanted {device}, where state is")


def _check_slots(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    _check(name, tensor, dtype, shape, device)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has strides {tensor.stride()}; wanted contiguous memory, since it is changed in place"
        )


def _check_int(name: str, value: int, low: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        raise ValueError(f"{name} is {value!r}; wanted an integer{'' if low is None else f' of at least {low}'}")


def insert(
    images: Tensor,
    labels: Tensor,
    tasks: Tensor,
    indices: Tensor,
    state: Tensor,
    x: Tensor,
    y: Tensor,
    task: int,
    index: Tensor,
) -> Tensor:
    """Offers a batch of the stream to the memory, item by item, by Algorithm R (Vitter 1985).

    The item at position t of the stream, counted from 0, goes to slot t while t < M; later it
    replaces a uniformly drawn slot with probability M / (t + 1), else it is rejected. Of two items
    of one batch in one slot the later one stays.

    Args:
        images: uint8 [M, H, W, 3], changed in place, as are the next four.
        labels: int64 [M].
        tasks: int64 [M].
        indices: int64 [M], positions in the original stream.
        state: int64 [3] = {seed, counter, n_seen}; n_seen advances by B.
        x: uint8 [B, H, W, 3].
        y: int64 [B].
        task: Task of the whole batch.
        index: int64 [B].

    Returns:
        int64 [B]: the slot where each item lies after the call, -1 if it was rejected or
        overwritten by a later item of the batch.

    Raises:
        TypeError: A dtype is not the one above.
        ValueError: A shape, a device or ``task`` does not fit, or a memory tensor is not
            contiguous.
    """
    _check_slots("state", state, torch.int64, (3,), state.device if isinstance(state, Tensor) else torch.device("cpu"))
    if not isinstance(images, Tensor) or images.dim() != 4 or len(images) < 1:
        raise ValueError(
            f"images has shape {tuple(getattr(images, 'shape', ()))}; wanted [slots, H, W, 3] with at least one slot"
        )
    capacity, *image = images.shape
    if not isinstance(x, Tensor) or x.dim() != 4:
        raise ValueError(f"x has shape {tuple(getattr(x, 'shape', ()))}; wanted [images, {', '.join(map(str, image))}]")
    count = len(x)
    _check_slots("images", images, torch.uint8, (capacity, *image), state.device)
    for name, slots in (("labels", labels), ("tasks", tasks), ("indices", indices)):
        _check_slots(name, slots, torch.int64, (capacity,), state.device)
    _check("x", x, torch.uint8, (count, *image), state.device)
    _check("y", y, torch.int64, (count,), state.device)
    _check("index", index, torch.int64, (count,), state.device)
    _check_int("task", task)
    arguments = (images, labels, tasks, indices, state, x, y, task, index)
    if not _loader.serves(state):
        return reference.insert(*arguments)
    if torch.compiler.is_compiling():
        return torch.ops.mose_fast.reservoir_insert(*arguments)
    return _loader.native.reservoir_insert(*arguments)


def draw(tasks: Tensor, state: Tensor, k: int, filter: SlotFilter, task: int) -> Tensor:
    """Draws filled slots uniformly without replacement, in random order.

    Every draw advances the counter, so that two draws of one state differ; a draw of nothing or
    from nothing advances it too.

    Args:
        tasks: int64 [M], the task of each slot.
        state: int64 [3] = {seed, counter, n_seen}; counter advances by 1, in place.
        k: Slots wanted, at least 0; at most 2,048 on CUDA with native code.
        filter: All slots, only those of ``task``, or those of all others.
        task: The task to filter by; without meaning for :attr:`SlotFilter.ALL`.

    Returns:
        int64 [min(k, M)]: the drawn slots, then -1 where fewer than k qualify.

    Raises:
        TypeError: A dtype is not the one above.
        ValueError: A shape, a device, ``k``, ``filter`` or ``task`` does not fit.
    """
    _check_slots("state", state, torch.int64, (3,), state.device if isinstance(state, Tensor) else torch.device("cpu"))
    if not isinstance(tasks, Tensor) or tasks.dim() != 1 or len(tasks) < 1:
        raise ValueError(f"tasks has shape {tuple(getattr(tasks, 'shape', ()))}; wanted [slots] with at least one slot")
    _check_slots("tasks", tasks, torch.int64, (len(tasks),), state.device)
    _check_int("k", k, 0)
    _check_int("task", task)
    if filter not in _FILTERS:
        raise ValueError(f"filter is {filter!r}; wanted one of {', '.join(f.name for f in SlotFilter)}")
    if not _loader.serves(state):
        return reference.draw(tasks, state, k, SlotFilter(filter), task)
    if torch.compiler.is_compiling():
        return torch.ops.mose_fast.reservoir_draw(tasks, state, k, int(filter), task)
    return _loader.native.reservoir_draw(tasks, state, k, int(filter), task)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::reservoir_insert")
    def _fake_insert(images, labels, tasks, indices, state, x, y, task, index):
        return state.new_empty(x.shape[0])

    @torch.library.register_fake("mose_fast::reservoir_draw")
    def _fake_draw(tasks, state, k, filter, task):
        return state.new_empty(min(k, tasks.shape[0]))
