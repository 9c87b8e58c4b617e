"""Runs the backward pass on the streams of the forward pass where there is no card, as autograd
does on one: for the stand-in card of tests/ordering, and for the record of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["after_functions", "place"]


def place(results: Any, stream: Any, switch: Callable[[Any], Any]) -> Any:
    """Places the operation that made ``results``, and the weights that it reads, on a stream of the
    backward pass. The waits that autograd adds between streams are left out.

    Args:
        results: Tensors, in any nest.
        stream: The current stream.
        switch: Makes a stream the current one, and returns the one before.

    Returns:
        The results.
    """
    with torch._C.DisableTorchFunction():
        for node in [t.grad_fn for t in tree_leaves(results) if isinstance(t, Tensor) and t.grad_fn is not None]:
            for one in [node, *(n for n, _ in node.next_functions if n is not None and not n.next_functions)]:
                if "stream" not in one.metadata:
                    one.metadata["stream"] = stream
                    _run_on(one, stream, switch)
    return results


def _run_on(node: Any, stream: Any, switch: Callable[[Any], Any]) -> None:
    before = []
    node.register_prehook(lambda grads: before.append(switch(stream)))

    def leave(*grads: Any) -> None:
        switch(before.pop())

    node.register_hook(leave)


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
