"""Steps as CUDA graphs: what one step launches is recorded once and replayed for all later steps of
the same shape.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mose_fast.methods import Learner

__all__ = ["CapturedSteps", "capture", "copied_into", "layout_of"]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple
    losses: Tensor


# Graphs whose capture was broken off: PyTorch's allocator of pinned memory may go on asking them
# (see capture).
_BROKEN: list[torch.cuda.CUDAGraph] = []


class CapturedSteps:
    """Takes the steps of a learner on a card in place of its ``train_on``, from graphs where it can
    and may.

    With kernels that know padding, steps are padded to the most rows of their kind, so that two
    graphs serve a run: one for the first task, one for all later ones. Without, there is a graph
    for each shape that comes twice. The first step of a shape is a real eager one, which makes
    everything that outlives a step (the optimiser's moments, the libraries' handles). The second is
    captured, which executes nothing, and then replayed like all later ones. All graphs share one
    pool of memory, and all steps one stream, which must not be the default one: it is current
    wherever this is called.

    A step that cannot be captured, for lack of memory or for whatever reason, is taken eagerly, and
    so are all later ones; a warning tells the reason once, with its traceback. Nothing is lost,
    since a capture changes no tensor, and PyTorch's allocator is left as if there had been no
    capture.

    Args:
        learner: On a card, with steps that can be captured.
        capture: False takes every step eagerly, with the same inputs.

    Attributes:
        graphs: Number of graphs.
        seconds: Time that capturing took.
        obstacle: Why nothing is captured any more, in a line; empty while it is.
        traceback: The errors that caused it with their tracebacks, the first one first;
            empty where nothing failed.
    """

    def __init__(self, learner: Learner, *, capture: bool = True) -> None:
        self.learner = learner
        self.seconds = 0.0
        self.obstacle = "" if capture else "eager steps were asked for"
        self.traceback = ""
        self._graphs: dict[Hashable, _Graph] = {}
        self._met: set[Hashable] = set()
        self._pool: Any = None

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def __call__(self, inputs: tuple) -> Tensor:
        """Takes a step; returns its losses, on the card.

        Args:
            inputs: From the learner's ``inputs``: a tuple of tensors, plain values and such tuples.
        """
        key = layout_of(inputs)
        known = self._graphs.get(key)
        if known is None and key in self._met and not self.obstacle:
            known = self._capture(key, inputs)
        if known is None:
            self._met.add(key)
            return self.learner.train_on(inputs)
        copied_into(known.inputs, inputs)
        known.graph.replay()
        # The next replay of any graph may write where these lie.
        return known.losses.clone()

    def _capture(self, key: Hashable, inputs: tuple) -> _Graph | None:
        start = time.perf_counter()
        stream = torch.cuda.current_stream(self.learner.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Outside the pool: what a replay reads must not be given to another graph.
            static = tree_map_only(Tensor, torch.clone, inputs)
            with capture(stream, self._pool) as graph:
                losses = self.learner.train_on(static)
        except Exception as error:
            self._give_up(error)
            return None
        finally:
            self.seconds += time.perf_counter() - start
        self._graphs[key] = _Graph(graph, static, losses)
        return self._graphs[key]

    def _give_up(self, error: Exception) -> None:
        # They lie in the pool of the graph that came to nothing.
        self.learner.model.optimiser.zero_grad(set_to_none=True)
        # An error inside breaks the capture, whose end then raises another: what matters is the
        # first.
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        self.obstacle = (str(first).strip() or repr(first)).splitlines()[0]
        self.traceback = "".join(traceback.format_exception(error))
        self.learner.stepping = self.learner.stepping._replace(
            name="eager", reason=f"no graph could be captured: {self.obstacle}"
        )
        warnings.warn(
            f"no CUDA graph of a step could be captured ({self.obstacle}); the run goes on with eager"
            f" steps\n{self.traceback}",
            stacklevel=4,
        )


@contextmanager
def capture(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures what is launched inside into a graph, as :class:`torch.cuda.graph` does, and leaves
    nothing open where that fails.

    Up to 2.11, PyTorch returns from a broken capture without telling its allocator
    (pytorch/pytorch#180395): that goes on as if it were capturing, never frees what two streams
    have used, and fails in ``empty_cache``.

    Args:
        stream: Not the default one; what is captured must have run on it before.
        pool: Of :func:`torch.cuda.graph_pool_handle`, for graphs that share their memory; None: one
            of its own.
    """
    # Known before the capture, since a graph tells its pool only after one that went well.
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield graph
    except BaseException:
        try:
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        except RuntimeError:
            pass  # It is closed: the capture came to its end, though an error was raised inside.
        else:
            graph.reset()
            torch._C._cuda_releasePool(stream.device_index, pool)
            # The allocator of pinned memory cannot be told: it keeps a function that asks this very
            # graph whether a stream is its own.
            _BROKEN.append(graph)
        raise


def layout_of(inputs: tuple) -> Hashable:
    """What must be equal for two steps to have one graph: shapes and dtypes of all tensors, and all
    that is no tensor.
    """
    return tuple((tuple(part.shape), part.dtype) if isinstance(part, Tensor) else part for part in tree_leaves(inputs))


def copied_into(static: tuple, inputs: tuple) -> None:
    """Copies all tensors of ``inputs`` into those of ``static``, which has the same layout."""
    for target, source in zip(tree_leaves(static), tree_leaves(inputs), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source)
