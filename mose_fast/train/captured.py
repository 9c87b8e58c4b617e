"""Steps as CUDA graphs: the launches of one step are recorded once and replayed for all later steps
of the same shape.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from mose_fast.device import CAPTURING
from mose_fast.methods import Learner


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: tuple
    names: tuple[str, ...]
    losses: Tensor


# How often a step is captured before steps are taken eagerly. A single failure may be an accident:
# memory was cached elsewhere, or a thread of another library waited for the GPU.
_ATTEMPTS = 2

# Graphs whose capture failed. They are kept, because PyTorch's allocator of pinned memory may still
# ask them (see capture).
_BROKEN: list[torch.cuda.CUDAGraph] = []


class CapturedSteps:
    """Takes the steps of a learner on a GPU in place of its ``take_step``, with CUDA graphs if
    ``capture`` allows it; all of them on the current stream, which must not be the default one.

    There is a graph for each layout of inputs that occurs twice. MOSE pads its steps to their
    largest number of rows if the kernels support it, so that a run needs two graphs: one for the
    first task and one for all later tasks. The first step of a layout runs eagerly and creates
    everything that outlives a step (the optimiser's moments, the libraries' handles). The second
    step is captured, which executes nothing, and then replayed like all later ones. All graphs
    share one memory pool.

    A capture that fails is tried once more. If that fails, too, the step and all later ones are
    taken eagerly, and one warning shows the traceback. Nothing is lost: a capture changes no
    tensor, and PyTorch's allocator is left as if there had been no capture.

    Attributes:
        replays: Number of steps that were replayed; the others were taken eagerly.
        retries: Number of captures that were tried once more.
        seconds: Time spent on capturing.
        obstacle: One line that says why steps are no longer captured; empty while they are.
        traceback: The tracebacks of the errors that caused it; empty if nothing failed.
    """

    def __init__(self, learner: Learner, *, capture: bool = True) -> None:
        self.learner = learner
        self.replays = self.retries = 0
        self.seconds = 0.0
        self.obstacle = "" if capture else "eager steps were asked for"
        self.traceback = ""
        self._graphs: dict[Hashable, _Graph] = {}
        self._met: set[Hashable] = set()
        self._pool: Any = None

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def __call__(self, inputs: tuple) -> dict[str, Tensor]:
        """Takes the step of these inputs; returns its losses by name, on the GPU."""
        key = layout_of(inputs)
        known = self._graphs.get(key)
        if known is None and key in self._met and not self.obstacle:
            known = self._capture(key, inputs)
        if known is None:
            self._met.add(key)
            return self.learner.take_step(inputs)
        copied_into(known.inputs, inputs)
        known.graph.replay()
        self.replays += 1
        # The next replay of any graph may overwrite these.
        return dict(zip(known.names, known.losses.clone().unbind(), strict=True))

    def _capture(self, key: Hashable, inputs: tuple) -> _Graph | None:
        start = time.perf_counter()
        stream = torch.cuda.current_stream(self.learner.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # What earlier runs left. Not before each of up to 25 captures: it takes 0.2 s.
            gc.collect()
        for attempt in range(_ATTEMPTS):
            try:
                if attempt:
                    self.retries += 1
                    gc.collect()
                    # A graph's pool cannot use memory that is cached for eager steps.
                    torch.cuda.empty_cache()
                # Outside the pool, so that no other graph can use the memory of a replay's inputs.
                static = tree_map_only(Tensor, torch.clone, inputs)
                with capture(stream, self._pool) as graph:
                    losses = self.learner.take_step(static)
                    together = torch.stack(list(losses.values()))
                self._graphs[key] = _Graph(graph, static, tuple(losses), together)
                break
            except Exception as error:
                # They are in the pool of the graph whose capture failed.
                self.learner.model.optimiser.zero_grad(set_to_none=True)
                if attempt == _ATTEMPTS - 1:
                    self._give_up(error)
        self.seconds += time.perf_counter() - start
        return self._graphs.get(key)

    def _give_up(self, error: Exception) -> None:
        # An error inside makes the end of the capture raise another one. The first one matters.
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        self.obstacle = (str(first).strip() or repr(first)).splitlines()[0]
        self.traceback = "".join(traceback.format_exception(error))
        self.learner.stepping = self.learner.stepping._replace(
            name="eager", reason=f"no graph could be captured: {self.obstacle}"
        )
        warnings.warn(
            f"no CUDA graph of a step could be captured ({self.obstacle}); the run continues with eager"
            f" steps\n{self.traceback}",
            stacklevel=4,
        )


@contextmanager
def capture(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures the launches inside into a graph, and closes the capture properly if it fails.

    Unlike :class:`torch.cuda.graph`, it neither waits for the GPU nor empties the allocator's
    caches, which would make the next steps allocate anew. Python's garbage collector is off during
    the capture, since what it frees may wait for the GPU.

    Up to 2.11, PyTorch does not tell its allocator that a capture has failed
    (pytorch/pytorch#180395), which then never frees memory that two streams have used.

    Args:
        stream: A stream that is not the default one; the captured work must have run on it before.
        pool: A handle of :func:`torch.cuda.graph_pool_handle`, for graphs that share memory; None:
            a pool of its own.
    """
    # Chosen before the capture, since a graph tells its pool only after a successful capture.
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graph = torch.cuda.CUDAGraph()
    with CAPTURING, _without_collector(), torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
        except BaseException:
            try:
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            except RuntimeError:
                pass  # It is closed already: the capture ended, although an error was raised inside.
            else:
                graph.reset()
                torch._C._cuda_releasePool(stream.device_index, pool)
                # The allocator of pinned memory cannot be informed: it keeps a function that asks
                # this graph whether a stream belongs to it.
                _BROKEN.append(graph)
            raise


@contextmanager
def _without_collector() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def layout_of(inputs: tuple) -> Hashable:
    """What must be equal for two steps to share a graph: the structure, shapes and dtypes of
    tensors, and all other values.
    """
    parts, structure = tree_flatten(inputs)
    return structure, *((tuple(part.shape), part.dtype) if isinstance(part, Tensor) else part for part in parts)


def copied_into(static: tuple, inputs: tuple) -> None:
    """Copies all tensors of ``inputs`` into those of ``static``, which has the same layout."""
    for target, source in zip(tree_leaves(static), tree_leaves(inputs), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source)
