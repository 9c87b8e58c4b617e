"""Runs the backward pass on the streams of the forward pass where there is no GPU, as autograd
does on one: for the simulated GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["after_functions", "place"]


def place(results: Any, stream: Any, switch: Callable[[Any], Any]) -> Any:
    """Places the operation that made ``results``, and the weights that it reads, on a stream of the
    backward pass. The waits that autograd adds between streams are left out.

    Args:
        results: A tensor, several, or whatever else a function returns.
        stream: The current stream.
        switch: Makes a stream the current one, and returns the one before.

    Returns:
        The results.
    """
    if not isinstance(results, (Tensor, tuple, list)):
        return results
    with torch._C.DisableTorchFunction():
        # An operation may make several nodes, of which only the last one is seen at its results.
        tensors = (results,) if isinstance(results, Tensor) else results
        nodes = [t.grad_fn for t in tensors if isinstance(t, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and "stream" not in (about := node.metadata):
                about["stream"] = stream
                node.register_prehook(partial(_enter, stream, switch))
                nodes += [before for before, _ in node.next_functions]
    return results


def _enter(stream: Any, switch: Callable[[Any], Any], _: Any) -> None:
    """A node's stream stays the current one until the next node's: autograd sums the gradients of a
    tensor with several readers between the nodes, on the stream of the node that takes them.
    """
    before, task = switch(stream), torch._C._current_graph_task_id()
    if task != _last_task[0]:
        _last_task[0] = task
        torch.autograd.Variable._execution_engine.queue_callback(partial(switch, before))


_last_task = [-1]  # the backward pass at whose end the stream before it becomes the current one again


@contextmanager
def after_functions(place: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which the results of every ``torch.autograd.Function`` pass through ``place``;
    function modes do not see them.
    """
    apply = inspect.getattr_static(torch.autograd.Function, "apply")

    def applied(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return place(apply.__get__(None, function)(*args, **kwargs))

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(applied)):
        yield
