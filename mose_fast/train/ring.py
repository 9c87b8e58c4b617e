"""A ring of planned batches that wait for their step, and the thread that makes their views."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mose_fast.methods import Learner, Prepared, ViewsToCome, WholeBatch

#: Largest number of batches that are planned ahead. A plan takes a fraction of a step's time, so a
#: few are enough to hide it.
DEPTH = 4


class Views(NamedTuple):
    """Views, and on a GPU an event recorded after the work that makes them; None on the CPU."""

    tensor: Tensor
    made: torch.cuda.Event | None


class Feeder:
    """Calls functions that make views, in order, on one thread; on a GPU also on one stream, which
    waits for each function's input.

    Each function makes the views of one step, independently of earlier calls, so that requests can
    be dropped. The thread starts with the first function.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # PyTorch has a number of threads for each thread; this one uses its creator's.
        self._thread = ThreadPoolExecutor(1, "mose-fast views", torch.set_num_threads, (torch.get_num_threads(),))
        self._stream: torch.cuda.Stream | None = None

    def put(self, make: Callable[[], Tensor], reads: Iterable[Tensor]) -> Future[Views]:
        """Requests views from ``make``, after everything launched on the current stream so far.
        ``reads``: all tensors on a GPU that it reads, written on the current stream.
        """
        if self._device.type != "cuda":
            return self._thread.submit(self._make, make, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        for tensor in reads:
            # Its memory must not be reused while the feeder still reads it.
            tensor.record_stream(self._stream)
        return self._thread.submit(self._make, make, torch.cuda.current_stream(self._device).record_event())

    def take(self, views: Future[Views]) -> Tensor:
        """The views, ready for use on the current stream; raises what went wrong. The host waits
        until the work that makes them is launched; on the CPU, until they are made.
        """
        tensor, made = views.result()
        if made is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(made)
            tensor.record_stream(stream)
        return tensor

    def close(self) -> None:
        """Drops waiting requests, finishes the current one and ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, make: Callable[[], Tensor], ready: torch.cuda.Event | None) -> Views:
        if ready is None:
            return Views(make(), None)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            return Views(make(), self._stream.record_event())


class _Planned(NamedTuple):
    prepared: Prepared
    ready: torch.cuda.Event | None
    views: list[Future[Views] | None]


class Ring:
    """Prepares batches in order, up to ``depth`` ahead (one at a time if the learner does not plan
    ahead), and hands them out in the same order.

    On a GPU, a learner that plans ahead does so on a stream of its own. :meth:`take` makes the
    current stream wait for the batch through an event outside any graph; the host does not wait.
    The replay memory and the class masks belong to the plans' stream: call :meth:`synchronise`
    before reading or writing them elsewhere.

    A :class:`Feeder` makes the views that a step does not make itself (those of DALI), as far ahead
    as the plans.
    """

    def __init__(self, learner: Learner, depth: int = DEPTH) -> None:
        self.learner = learner
        self.depth = depth
        self._waiting: deque[_Planned] = deque()
        self._feeder = Feeder(learner.device)
        self._stream = torch.cuda.Stream(learner.device) if learner.reads_losses_late else None
        # Whether the stream runs independently, or first waits for what the current stream has
        # launched.
        self._apart = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        waiting = self._waiting
        return len(waiting) >= self.depth or (bool(waiting) and isinstance(waiting[-1].prepared, WholeBatch))

    def put(self, batch: Callable[[], dict[str, Any] | None] | Tensor) -> None:
        """Prepares a batch: the result of a function, called on the ring's stream, of the arguments
        of :meth:`mose_fast.methods.Learner.prepare`, or None for a batch without images; or slots
        to rehearse, int64 [n].
        """
        with self._on_stream():
            if isinstance(batch, Tensor):
                prepared = self.learner.prepare_rehearsal(batch)
            elif (arguments := batch()) is not None:
                prepared = self.learner.prepare(**arguments)
            else:
                with self.learner.data.record() as before:
                    prepared = Prepared(self.learner, before)
            ready = None if self._stream is None else self._stream.record_event()
            views = [
                self._feeder.put(step.inputs.make, _tensors(step.plan))
                if isinstance(step.inputs, ViewsToCome)
                else None
                for step in prepared.steps
            ]
        self._waiting.append(_Planned(prepared, ready, views))

    def take(self) -> Prepared:
        """Removes and returns the oldest batch, ready for use on the current stream."""
        prepared, ready, views = self._waiting.popleft()
        if ready is not None:
            stream = torch.cuda.current_stream(self.learner.device)
            stream.wait_event(ready)
            for tensor in _tensors(prepared.reads):
                # Its memory must not be reused while the steps still read it.
                tensor.record_stream(stream)
        for step, coming in zip(prepared.steps, views, strict=True):
            if coming is not None:
                step.views = self._feeder.take(coming)
        return prepared

    def roll_back(self) -> None:
        """Undoes all batches that were not taken."""
        with self._on_stream():
            while self._waiting:
                prepared, _, views = self._waiting.pop()
                for coming in filter(None, views):
                    coming.cancel()
                prepared.undo()

    def undo(self, taken: Prepared) -> bool:
        """Undoes a batch whose step was taken (:meth:`mose_fast.methods.Prepared.undo`). Undo the
        newest first, after all batches that were not taken.
        """
        # It asks the model whether the step changed anything, and later steps may still run.
        self.synchronise()
        with self._on_stream():
            return taken.undo()

    def synchronise(self) -> None:
        """Orders the current stream after all preparations so far, and later ones after it."""
        if self._stream is not None:
            torch.cuda.current_stream(self.learner.device).wait_stream(self._stream)
            self._apart = False

    def close(self) -> None:
        self._feeder.close()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        if not self._apart:
            self._stream.wait_stream(torch.cuda.current_stream(self.learner.device))
            self._apart = True
        with torch.cuda.stream(self._stream):
            yield


def _tensors(value: Any) -> list[Tensor]:
    """The tensors on a GPU in a tuple of tuples."""
    return [part for part in tree_leaves(value) if isinstance(part, Tensor) and part.is_cuda]
