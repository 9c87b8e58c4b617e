"""Makes the views of planned steps on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor


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
