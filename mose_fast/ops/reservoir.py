"""The replay memory's two operations: offer a batch (Algorithm R) and draw replay rows.

Counter-based random numbers decide both, so that CPU, CUDA and the reference make the same
decisions, bit for bit. The state is int64[3] = {seed, counter, n_seen} on the memory's device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.ops.checks import check_choice, check_integer, check_tensor
from mose_fast.reference import reservoir as reference
from mose_fast.reference.reservoir import SlotFilter

_BYTES, _INTEGERS = (torch.uint8,), (torch.int64,)
# A constant, since the Dynamo of torch 2.11 cannot trace what lists the members of an enumeration.
_FILTERS = tuple(SlotFilter)


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
    """Offers a batch of the stream to the memory, item by item, by Algorithm R.

    The item at position t of the stream, counted from 0, goes to slot t while t < M; later it
    replaces a uniformly drawn slot with probability M / (t + 1), else it is rejected. If two items
    of one batch go to the same slot, the later one stays.

    Args:
        images: uint8 [M, H, W, 3], the memory's images, changed in place, as are the next four.
        labels: int64 [M].
        tasks: int64 [M].
        indices: int64 [M], positions in the original stream.
        state: int64 [3] = {seed, counter, n_seen}; n_seen advances by B.
        x: uint8 [B, H, W, 3], the batch's images.
        y: int64 [B], their labels.
        task: The task of the whole batch.
        index: int64 [B], their positions in the original stream.

    Returns:
        int64 [B]: the slot where each item lies after the call, -1 if it was rejected or
        overwritten by a later item of the batch.

    Raises:
        TypeError: A dtype is not the one above.
        ValueError: A shape, a device or ``task`` does not fit, or a memory tensor is not
            contiguous.

    Source: Vitter 1985, algorithm R.
    """
    check_tensor("state", state, _INTEGERS, (3,), contiguous=True)
    beside = ("state", state)
    wanted = {"filled": (0,), "because": " with at least one slot", "contiguous": True}
    check_tensor("images", images, _BYTES, ("slots", "H", "W", 3), beside=beside, **wanted)
    for name, slots in (("labels", labels), ("tasks", tasks), ("indices", indices)):
        check_tensor(name, slots, _INTEGERS, (len(images),), beside=beside, contiguous=True)
    check_tensor("x", x, _BYTES, ("images", *images.shape[1:]), beside=beside)
    for name, values in (("y", y), ("index", index)):
        check_tensor(name, values, _INTEGERS, (len(x),), beside=beside)
    check_integer("task", task)
    arguments = (images, labels, tasks, indices, state, x, y, task, index)
    if not _loader.serves("reservoir", state):
        return reference.insert(*arguments)
    return _loader.ops().reservoir_insert(*arguments)


def draw(tasks: Tensor, state: Tensor, k: int, filter: SlotFilter, task: int) -> Tensor:
    """Draws filled slots uniformly without replacement, in random order.

    Every draw advances the counter, so that two draws from one state differ; a draw that returns no
    slot advances it too.

    Args:
        tasks: int64 [F], the task of each filled slot: the memory's first F slots hold samples.
        state: int64 [3] = {seed, counter, n_seen}; counter advances by 1, in place.
        k: Number of slots, at least 0; at most 2,048 in native code on CUDA.
        filter: All slots, only those of ``task``, or those of all other tasks.
        task: The task to filter by; ignored for :attr:`SlotFilter.ALL`.

    Returns:
        int64 [min(k, F)]: the drawn slots, then -1 where fewer than k qualify.

    Raises:
        TypeError: A dtype is not the one above.
        ValueError: A shape, a device, ``k``, ``filter`` or ``task`` does not fit.
    """
    check_tensor("state", state, _INTEGERS, (3,), contiguous=True)
    check_tensor("tasks", tasks, _INTEGERS, ("slots",), beside=("state", state), contiguous=True)
    check_integer("k", k, 0)
    check_integer("task", task)
    check_choice("filter", filter, _FILTERS)
    if not _loader.serves("reservoir", state):
        return reference.draw(tasks, state, k, SlotFilter(filter), task)
    return _loader.ops().reservoir_draw(tasks, state, k, int(filter), task)


if _loader.native is not None:

    @torch.library.register_fake("mose_fast::reservoir_insert")
    def _fake_insert(images, labels, tasks, indices, state, x, y, task, index):
        return state.new_empty(x.shape[0])

    @torch.library.register_fake("mose_fast::reservoir_draw")
    def _fake_draw(tasks, state, k, filter, task):
        return state.new_empty(min(k, tasks.shape[0]))
