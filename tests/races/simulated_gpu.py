"""A simulated GPU: CPU tensors that say they are on ``cuda``, streams, events and graphs, and
a checker that hears of all of it.

Every operation is carried out at once, in the order of the program; what a GPU would do later is
left to the :class:`Checker`, which knows the order that streams, events and waits promise and
nothing else. So results are those of a run on the CPU, and each access that a GPU might bring
forward or put off is reported.

Two modes of PyTorch see all that the program does: a function mode, in which tensors are asked for
their device and moved, and a dispatch mode, which sees each operator with what it reads and writes
by its schema. Native functions without a schema are called on copy-on-write copies: those that a
function took a mutable pointer of are what it writes.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mose_fast import _loader
from mose_fast.ops import align_conv, batch_norm_act, batch_norm_pool
from tests.races.checker import Checker, Memory, Race

_CUDA = torch.device("cuda", 0)

# Where memory lies.
_DEVICE, _PINNED, _HOST = "device memory", "pinned memory", "host"

# The host waits for their results on a GPU, whose size or value it needs.
_WAITS = {"nonzero", "masked_select", "_local_scalar_dense", "equal", "bincount", "_unique2"}
# They do if they are indexed by a mask.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}

# In training they change ``running_mean`` and ``running_var``, which their schema does not say.
_WRITES_RUNNING_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}

# They look at no element of their arguments.
_READS_NO_ARGUMENT = {f"{name}_like" for name in ("zeros", "ones", "full", "rand", "randn", "empty")}
_READS_NO_ARGUMENT |= {f"new_{name}" for name in ("zeros", "ones", "full", "empty", "empty_strided")}


class _Block(Memory):
    """An allocation on the GPU, or pinned memory of the host."""

    def __init__(self, gpu: SimulatedGpu, kind: str, storage: torch.UntypedStorage, made_by: str) -> None:
        super().__init__(storage.nbytes(), made_by)
        self.address = storage.data_ptr()
        self.gpu, self.kind, self.on_gpu, self.stream = gpu, kind, kind == _DEVICE, gpu.stream
        #: Streams that the allocator was told of.
        self.recorded: set[Stream] = set()
        #: The graph whose pool it lies in.
        self.graph = gpu.recording if self.on_gpu else None

    def __str__(self) -> str:
        return f"{self.kind} of {self.size} bytes made by {self.name}"


# A tensor, and the block in which it lies; None for other memory of the host.
_Placed = tuple[Tensor, _Block | None]
# Bytes of a block, from one to another.
_Range = tuple[_Block, int, int]


class _Hold:
    """Hangs on the storage of a block, and so ends with the last tensor that refers to it."""

    def __init__(self, block: _Block) -> None:
        self.block = block

    def __del__(self) -> None:
        # Only noted: the garbage collector may call this in the middle of anything. Memory of a
        # graph stays the graph's.
        block, gpu = self.block, self.block.gpu
        if gpu.active and block.on_gpu and block.graph is None:
            gpu.freed[block.stream].append((block, gpu.checker.known()))


class Stream:
    """In place of ``torch.cuda.Stream``."""

    _numbers = count(1)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.name = f"stream {next(Stream._numbers)}"
        self.device, self.device_index = _CUDA, 0
        self.cuda_stream = id(self)
        SimulatedGpu.current.streams_by_address[self.cuda_stream] = self

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        gpu = SimulatedGpu.current
        with gpu.lock:
            (gpu.checker if gpu.recording is None else gpu.recording.checker).wait_for_stream(self, other)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        SimulatedGpu.current.wait_for(self)

    def is_capturing(self) -> bool:  # which PyTorch's optimisers ask
        return SimulatedGpu.current.recording is not None


class Event:
    """In place of ``torch.cuda.Event``.

    Whether it is done when the host asks is drawn, where the host cannot know.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        gpu = SimulatedGpu.current
        gpu.not_while_capturing("an event that is recorded")
        with gpu.lock:
            gpu.checker.record(self, stream or gpu.stream)
        self.recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        gpu = SimulatedGpu.current
        with gpu.lock:
            gpu.checker.wait(stream or gpu.stream, self)

    def query(self) -> bool:
        gpu = SimulatedGpu.current
        gpu.not_while_capturing("an event that is asked")
        with gpu.lock:
            if not self.recorded or gpu.checker.knows(self):
                return True
            if gpu.random.random() < gpu.done:
                gpu.take_over(self)
                return True
            return False

    def synchronize(self) -> None:
        gpu = SimulatedGpu.current
        gpu.not_while_capturing("an event that the host waits for")
        gpu.take_over(self)


class _Recording:
    """What was launched while a graph was captured on a stream, and the streams forked from it.

    A checker of its own hears of the launches: their order in a replay is that of the waits inside
    the capture. Each of them also reads ``everything``, which the stream writes first and last: so
    a launch on a stream that was not forked, or that is not joined again, is a race.
    """

    def __init__(self, stream: Stream, *, stop: bool) -> None:
        self.stream, self.checker = stream, Checker(stop=stop)
        self.everything = [(Memory(1, "what a graph captures"), 0, 1)]
        self.memory: dict[_Block, Memory] = {}
        self.checker.access(stream, [], self.everything, "begin of a capture")
        self.launches: list[Callable[[], None]] = []
        # As sets that keep their order.
        self.reads: dict[_Range, None] = {}
        self.writes: dict[_Range, None] = {}
        # Contents from before the capture, which executes nothing.
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        #: What made the capture invalid; empty if nothing did.
        self.broken = ""
        #: What lies outside the graph's pool, and our references to it, which must not be the last.
        #: By storage, of which several may share a block.
        self.outside: dict[int, list[Tensor]] = {}

    def kept(self, tensor: Any) -> Any:
        """A tensor for a replay, told apart from the program's own references to its memory."""
        block = SimulatedGpu.current.block(tensor) if isinstance(tensor, Tensor) else None
        if block is None or block.graph is self:
            return tensor
        alias = tensor.detach()
        self.outside.setdefault(alias.untyped_storage()._cdata, []).append(alias)
        return alias

    def check_references(self) -> None:
        for aliases in self.outside.values():
            storage = aliases[0].untyped_storage()
            # One is Python's.
            if torch._C._storage_Use_Count(storage._cdata) <= len(aliases) + 1:
                block = SimulatedGpu.current.block(aliases[0])
                block.gpu.checker.report(f"a graph is replayed that uses {block}, whose last reference has gone")

    def save(self, writes: list[_Placed]) -> None:
        for tensor, block in writes:
            storage = tensor.untyped_storage()
            if block is not None and block.graph is not self and storage._cdata not in self.before:
                self.before[storage._cdata] = storage, storage.clone()

    def end(self) -> list[Race | str]:
        self.checker.access(self.stream, [], self.everything, "end of a capture")
        return self.checker.races

    def note(self, stream: Stream, reads: list[_Range], writes: list[_Range], what: str) -> None:
        def inside(accesses: list[_Range]) -> list[tuple[Memory, int, int]]:
            return [(self.memory.setdefault(b, Memory(b.size, b)), start, end) for b, start, end in accesses]

        self.checker.access(stream, [*inside(reads), *self.everything], inside(writes), what)
        self.reads.update(dict.fromkeys(reads))
        self.writes.update(dict.fromkeys(writes))


class Graph:
    """In place of ``torch.cuda.CUDAGraph``: a replay carries out once more what was launched, on
    the same memory.
    """

    recording: _Recording | None = None

    def __init__(self, keep_graph: bool = False) -> None: ...

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = SimulatedGpu.current
        gpu.local.recording = _Recording(gpu.stream, stop=gpu.checker.stop)
        gpu.begin_capture(gpu.local.recording)

    def capture_end(self) -> None:
        gpu = SimulatedGpu.current
        recording, gpu.local.recording = gpu.local.recording, None
        gpu.recordings.remove(recording)
        # The last first: storages may share memory, and the oldest copy is from before the capture.
        for storage, before in reversed(recording.before.values()):
            storage.copy_(before)
        if recording.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.recording = recording
        for race in recording.end():
            gpu.checker.report(race)

    def replay(self) -> None:
        gpu, recording = SimulatedGpu.current, self.recording
        with gpu.lock, gpu.quiet(), torch.no_grad():
            gpu.reuse_freed()
            gpu.replays += 1
            recording.check_references()
            for launch in recording.launches:
                launch()
            gpu.checker.access(gpu.stream, list(recording.reads), list(recording.writes), "replay")

    def reset(self) -> None:
        self.recording = None


@contextmanager
def _captured(
    graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global", **_: Any
) -> Iterator[None]:
    """In place of ``torch.cuda.graph``, which waits for the GPU before it captures."""
    SimulatedGpu.current.wait_for_all()
    with _on_stream(stream or Stream()):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    """In place of ``torch.cuda.stream``."""
    local, before = SimulatedGpu.current.local, SimulatedGpu.current.stream
    local.stream = before if stream is None else stream
    try:
        yield
    finally:
        local.stream = before


class _Native:
    """In place of the native module: its functions, called so that what they read and write is
    seen.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: SimulatedGpu.current.native(name, found, args, kwargs)


class SimulatedGpu:
    """A context in which ``cuda`` is the simulated GPU.

    Args:
        seed: Of the draws whether an event is done when the host asks.
        done: How probable that is.
        stop: Raise at the first race.

    Attributes:
        races: What the checker found.
        broken: What broke each capture that was broken.
        replays: Of graphs, how many.
        streams: On which there was any work on the GPU or in pinned memory.
    """

    current: SimulatedGpu

    def __init__(self, seed: int = 0, done: float = 0.3, *, stop: bool = False) -> None:
        self.checker = Checker(stop=stop)
        self.races = self.checker.races
        self.random, self.done = random.Random(seed), done
        self.lock = threading.RLock()
        self.local = threading.local()
        SimulatedGpu.current = self
        self.streams_by_address: dict[int, Stream] = {}
        self.default = Stream()
        self.default.name = "the default stream"
        self.freed: defaultdict[Stream, list[tuple[_Block, dict]]] = defaultdict(list)
        self.active = False
        #: Captures under way, on all threads, and what will wait for the GPU at some time.
        self.recordings: list[_Recording] = []
        self.to_wait: list[str] = []
        self.broken: list[str] = []
        self.tensors_by_address: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        #: At whose end the stream before it becomes the current one again.
        self.backward_pass = -1
        self.replays = 0
        self.streams: set[Any] = set()

    @property
    def stream(self) -> Stream:
        return getattr(self.local, "stream", self.default)

    @property
    def recording(self) -> _Recording | None:
        return getattr(self.local, "recording", None)

    # The context

    def __enter__(self) -> SimulatedGpu:
        SimulatedGpu.current = self
        self._stack = ExitStack()
        for owner, name, replacement in self._replacements():
            self._stack.enter_context(mock.patch.object(owner, name, replacement))
        # A capture of the simulated GPU always comes to its end.
        ended = mock.Mock(side_effect=RuntimeError)
        self._stack.enter_context(mock.patch.object(torch._C, "_cuda_endAllocateToPool", ended, create=True))
        if _loader.native is not None:
            self._stack.enter_context(mock.patch.object(_loader, "native", _Native(_loader.native)))
            before = _loader.record["backend"]
            self._stack.enter_context(mock.patch.dict(_loader.record, {"backend": "cuda"}))
            if before != "emulated":
                # Without code for the CPU, where what they mean stands in.
                questions = (batch_norm_act, "serves"), (batch_norm_pool, "serves"), (align_conv, "_has_kernels")
                for module, question in questions:
                    self._stack.enter_context(mock.patch.object(module, question, lambda *_: False))
        self.active = True
        self._stack.enter_context(self._modes())
        return self

    def __exit__(self, *error: object) -> None:
        self.active = False
        self._stack.close()

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What of PyTorch and of Python's threads is replaced, and by what."""
        facts = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "simulated"}
        facts |= {"get_device_capability": (9, 0), "mem_get_info": (2**33, 2**33)}
        facts |= {"max_memory_allocated": 0, "memory_allocated": 0, "reset_peak_memory_stats": None}
        for name, value in facts.items():
            yield torch.cuda, name, lambda device=None, value=value: value
        for name, replacement in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": _captured,
            "stream": _on_stream,
            "current_stream": lambda device=None: self.stream,
            "synchronize": lambda device=None: self.wait_for_all(),
            "is_current_stream_capturing": lambda: self.recording is not None,
            "device": lambda device=None: contextlib.nullcontext(),
            "empty_cache": lambda: self.may_wait("caches of the allocator that are emptied"),
        }.items():
            yield torch.cuda, name, replacement
        # Its own check of arguments comes before any mode.
        yield torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream)
        by_dlpack, autocast = torch.from_dlpack, torch.autocast

        def shared_by_dlpack(source: Any) -> Tensor:
            tensor = by_dlpack(source)
            if isinstance(source, Tensor):
                self.share(tensor, source)
            return tensor

        yield torch, "from_dlpack", shared_by_dlpack
        yield torch, "autocast", lambda where, *args, **how: autocast(_on_host(where), *args, **how)
        # What PyTorch's optimisers ask beside the tensors themselves.
        yield torch.accelerator, "current_stream", lambda device=None: self.stream
        grouped = Optimizer._group_tensors_by_device_and_dtype

        def grouped_where_they_are(tensors: list[list[Tensor]], with_indices: bool = False) -> dict:
            found = grouped(tensors, with_indices)
            return {(group[0][0][0].device, dtype): group for (_, dtype), group in found.items()}

        yield Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(grouped_where_they_are)
        # ``backward`` is a function of PyTorch, in which the function mode is off; but a backward
        # pass runs code of the program.
        backward = torch.autograd._engine_run_backward

        def backward_in_mode(*args: Any, **kwargs: Any) -> Any:
            # Zeros that autograd makes itself, in place of gradients that are missing, lie beside
            # the others.
            with torch._C.DisableTorchFunction():
                place = _DEVICE if any(map(self.on_gpu, _tensors(args))) else None
            with _Functions(self), self.placing(place):
                return backward(*args, **kwargs)

        yield torch.autograd, "_engine_run_backward", backward_in_mode

        # Function modes do not see these.
        apply = inspect.getattr_static(torch.autograd.Function, "apply")

        def applied(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            return self.placed_in_backward(apply.__get__(None, function)(*args, **kwargs))

        yield torch.autograd.Function, "apply", classmethod(applied)

        # Threads work under the modes too; a task comes after what its thread did before it was
        # handed over, a result after the task.
        run, submit, result = threading.Thread.run, ThreadPoolExecutor.submit, Future.result

        def run_in_modes(thread: threading.Thread) -> None:
            with self._modes():
                run(thread)

        def submit_with_order(pool: ThreadPoolExecutor, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
            begun, done = object(), object()
            self.hand_over(begun)

            def task() -> Any:
                self.take_over(begun)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.hand_over(done)

            future = submit(pool, task)
            future.done_at = done
            return future

        def result_with_order(future: Future, timeout: float | None = None) -> Any:
            try:
                return result(future, timeout)
            finally:
                if hasattr(future, "done_at") and future.done():
                    self.take_over(future.done_at)

        yield threading.Thread, "run", run_in_modes
        yield ThreadPoolExecutor, "submit", submit_with_order
        yield Future, "result", result_with_order

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with _Functions(self), _Operators(self):
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """The simulation's own work on tensors."""
        with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
            yield

    def hand_over(self, event: object) -> None:
        """The event is what the current host thread did and knows, for another one."""
        with self.lock:
            self.checker.record(event, self.checker.host())

    def take_over(self, event: object) -> None:
        """What the current host thread does next comes after the event."""
        with self.lock:
            self.checker.wait(self.checker.host(), event)

    def placed_in_backward(self, results: Any) -> Any:
        """Places the operation that made ``results``, and the weights that it reads, on its stream
        in the backward pass too, as autograd does on a GPU. The waits that autograd adds between
        streams are left out. Returns the results.
        """
        if not isinstance(results, (Tensor, tuple, list)):
            return results
        with torch._C.DisableTorchFunction():
            # Of the nodes that an operation makes, only the last one is seen at its results.
            nodes = [t.grad_fn for t in ((results,) if isinstance(results, Tensor) else results) if torch.is_tensor(t)]
            while nodes:
                node = nodes.pop()
                if node is not None and "stream" not in (about := node.metadata):
                    about["stream"] = self.stream
                    node.register_prehook(partial(self._enter, self.stream))
                    nodes += [before for before, _ in node.next_functions]
        return results

    def _enter(self, stream: Stream, _: Any) -> None:
        """A node's stream stays the current one until the next node's: autograd sums the gradients
        of a tensor with several readers between the nodes, on the stream of the node that takes
        them.
        """
        before, self.local.stream = self.stream, stream
        if self.backward_pass != (task := torch._C._current_graph_task_id()):
            self.backward_pass = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(setattr, self.local, "stream", before))

    # What the host waits for

    def wait_for(self, stream: Stream) -> None:
        self.not_while_capturing("a stream that the host waits for")
        with self.lock:
            self.checker.wait_for_stream(self.checker.host(), stream)

    def wait_for_all(self) -> None:
        self.not_while_capturing("a GPU that the host waits for")
        self.may_wait("another thread, which waits for the GPU")
        with self.lock:
            self.checker.wait_for_all()

    def not_while_capturing(self, what: str) -> None:
        if self.recording is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    # What waits for the GPU without being asked to

    def may_wait(self, what: str) -> None:
        """What happens now may wait for the whole GPU, which breaks every capture under way."""
        with self.lock:
            for recording in self.recordings:
                recording.broken = what
                self.broken.append(what)

    def will_wait(self, what: str) -> None:
        """A thread that the program does not know will wait for the GPU, at the worst time."""
        with self.lock:
            self.to_wait.append(what)
            if self.recordings:
                self.may_wait(self.to_wait.pop())

    def begin_capture(self, recording: _Recording) -> None:
        with self.lock:
            self.recordings.append(recording)
            if self.to_wait:
                self.may_wait(self.to_wait[0])
                self.to_wait.clear()

    # Memory

    def block(self, tensor: Tensor) -> _Block | None:
        """The block of a tensor on the GPU or in pinned memory; None for other memory of the
        host.
        """
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        hold = getattr(tensor.untyped_storage(), "hold", None)
        if hold is None:
            return None
        if hold.block.gpu is not self:
            # Of another simulation, which has ended: kept by a cache of the program. All that was
            # done to it is long past.
            return self.place(tensor, hold.block.kind, "an earlier run")
        return hold.block

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        with torch._C.DisableTorchFunction():
            self.block(tensor).recorded.add(stream)

    def on_gpu(self, tensor: Tensor) -> bool:
        block = self.block(tensor)
        return block is not None and block.on_gpu

    def place(self, tensor: Tensor, kind: str, made_by: str) -> _Block:
        """Makes the memory of a tensor a block. The caller reports an access: whoever had this
        memory before had it in the order of the current stream.
        """
        storage = tensor.untyped_storage()
        block = _Block(self, kind, storage, made_by)
        storage.hold = _Hold(block)
        if block.on_gpu and block.graph is None:
            self.reuse_freed()
        return block

    def share(self, tensor: Tensor, source: Tensor) -> None:
        """Says that ``tensor``, with a storage of its own, lies in the memory of ``source``."""
        with torch._C.DisableTorchFunction():
            if self.block(source) is not None:
                tensor.untyped_storage().hold = source.untyped_storage().hold

    def reuse_freed(self) -> None:
        """The next allocation on a stream may get any block that was freed there, unless the
        allocator knows of another reader.
        """
        freed = self.freed[self.stream]
        while freed:
            block, known = freed.pop()
            self.checker.reuse(self.stream, block, block.recorded, known)

    # Work

    def native(self, name: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A native function without a schema."""
        with self.lock, self.quiet():
            given = [(t, self.block(t)) for t in _tensors((args, kwargs)) if t.is_cpu]
            if not any(block is not None for _, block in given) and not any(map(_is_cuda, (*args, *kwargs.values()))):
                return function(*args, **kwargs)
            args, kwargs = _map(_on_host, args), _map(_on_host, kwargs)
            copies = {id(t): torch._lazy_clone(_copy(t)) for t, _ in given}
            swapped = _map(lambda part: copies.get(id(part), part), (args, kwargs))
            results = function(*swapped[0], **swapped[1])
            written = {id(t) for t, _ in given if not torch._C._is_cow_tensor(copies[id(t)])}
            reads = [pair for pair in given if id(pair[0]) not in written]
            writes = [pair for pair in given if id(pair[0]) in written]
            if self.recording is not None:
                self.recording.save(writes)
            with torch.no_grad():
                for t, _ in writes:
                    # As native code writes: behind autograd's back.
                    t.data.copy_(copies[id(t)])
            sources = {copies[id(t)].untyped_storage()._cdata: t for t, _ in given}

            def back(result: Any) -> Any:
                return sources.get(result.untyped_storage()._cdata, result) if isinstance(result, Tensor) else result

            results = _map(back, results)
            where = f"mose_fast._C.{name}"
            fresh = [(r, self.place(r, _DEVICE, where)) for r in _tensors(results) if self.block(r) is None]
            self._report(where, reads, writes + fresh)
            self._record(function, args, kwargs, results, fresh)
            return results

    def operator(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """An operator of the dispatcher."""
        about = _about(func)
        if about.makes_views:
            return func(*args, **kwargs)
        given, reads, writes = about.placed(self.block, args, kwargs)
        place = getattr(self.local, "place", None)
        if place is None and not any(block is not None for _, block in given):
            return func(*args, **kwargs)
        name = about.name
        if name == "aten::copy_":
            return self._copied(func, args, kwargs)
        with self.lock:
            on_gpu, waits = any(block is not None and block.on_gpu for _, block in given), about.waits
            if on_gpu:
                strange = [t for t, block in given if (block is None or not block.on_gpu) and t.dim()]
                if strange and not about.indexes:
                    where = f"{name} got one of shape {tuple(strange[0].shape)} on the host and others on the GPU"
                    raise RuntimeError(f"Expected all tensors to be on the same device: {where}")
                waits = waits or bool(strange) or (about.indexes and any(map(_is_mask, _tensors(args[1]))))
                if waits:
                    self.not_while_capturing(name)
                if self.recording is not None:
                    self.recording.save(writes)
            results = func(*args, **kwargs)
            kind = place or (_DEVICE if on_gpu else None)
            fresh: list[_Placed] = []
            if kind in (_DEVICE, _PINNED):
                # Some operators return an argument, or a part of it.
                on_host = [t.untyped_storage()._cdata for t, block in given if block is None and t.is_cpu]
                for r in _tensors(results):
                    if r.is_cpu and self.block(r) is None and r.untyped_storage()._cdata not in on_host:
                        fresh.append((r, self.place(r, kind, name)))
            if kind == _DEVICE and not (self.recording is not None and about.makes_empty):
                writes = writes + fresh
            if on_gpu or kind == _DEVICE:
                self._report(name, reads, writes)
                self._record(func, args, kwargs, results, fresh)
                if on_gpu and waits:
                    self.wait_for(self.stream)
            else:
                self._report(name, reads, writes, self.checker.host())
            return results

    def _copied(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``copy_``, between host and GPU too."""
        source, target = ((t, self.block(t)) for t in (args[1], args[0]))
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        of, to = (_HOST if block is None else block.kind for _, block in (source, target))
        with self.lock:
            if _DEVICE not in (to, of):
                results = func(*args, **kwargs)
                self._report("copy_", [source], [target], self.checker.host())
                return results
            crosses = to != of
            # Memory of the host that is not pinned is read or written before the call returns.
            through_host = crosses and _HOST in (to, of)
            waits = crosses and (waits or to == _HOST) and not (of == _HOST and source[0].dim() == 0)
            if waits or through_host:
                self.not_while_capturing("a copy that the host waits for")
            if self.recording is not None:
                self.recording.save([target])
            results = func(*args, **kwargs)
            self._report(f"copy of {of} to {to}", [source], [target])
            self._record(func, args, kwargs, results, [])
            if waits:
                self.wait_for(self.stream)
            return results

    def _record(
        self, function: Callable, args: tuple, kwargs: dict[str, Any], results: Any, fresh: list[_Placed]
    ) -> None:
        """Notes a launch for replays, with its results where they are, if a graph is captured."""
        if self.recording is None:
            return
        args, kwargs = _map(self.recording.kept, args), _map(self.recording.kept, kwargs)
        made = {id(t) for t, _ in fresh}
        places = [(i, r) for i, r in enumerate(_tensors(results)) if id(r) in made]

        def again() -> None:
            found = _tensors(function(*args, **kwargs))
            for i, place in places:
                place.copy_(found[i])

        self.recording.launches.append(again)

    def _report(self, what: str, reads: list[_Placed], writes: list[_Placed], stream: Any = None) -> None:
        stream = self.stream if stream is None else stream
        read, written = _ranges(reads), _ranges(writes)
        if self.recording is not None and stream is self.stream:
            self.recording.note(stream, read, written, what)
        elif read or written:
            self.streams.add(stream)
            self.checker.access(stream, read, written, what)

    @contextmanager
    def placing(self, kind: str | None) -> Iterator[None]:
        """Where new tensors lie."""
        before, self.local.place = getattr(self.local, "place", None), kind
        try:
            yield
        finally:
            self.local.place = before

    def moved(self, tensor: Tensor, to_gpu: bool, how: dict[str, Any], non_blocking: bool) -> Tensor:
        """A copy at the other place."""
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("the simulated GPU moves no tensor that requires a gradient")
        with torch.no_grad():
            with self.placing(_DEVICE if to_gpu else _PINNED if non_blocking else _HOST):
                target = torch.empty_like(tensor, **how)
            return target.copy_(tensor, non_blocking=non_blocking)


class _Operators(TorchDispatchMode):
    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it takes as long as an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self.gpu.active:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self.gpu.operator(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What the program asks tensors, and how it makes and moves them."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu
        on_gpu, to = gpu.on_gpu, self._to
        self.instead = {
            torch.Tensor.device.__get__: lambda t, *_: _CUDA if on_gpu(t) else t.device,
            torch.Tensor.is_cuda.__get__: lambda t, *_: on_gpu(t) or t.is_cuda,
            torch.Tensor.is_cpu.__get__: lambda t, *_: t.is_cpu and not on_gpu(t),
            torch.Tensor.to: to,
            torch.Tensor.cpu: lambda t, **_: to(t, "cpu"),
            torch.Tensor.cuda: lambda t, device=None, non_blocking=False: to(t, "cuda", non_blocking=non_blocking),
            torch.Tensor.tolist: lambda t: torch.Tensor.tolist(self._host(t)),
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.pin_memory: self._pin_memory,
            torch.Tensor.is_pinned: lambda t, device=None: getattr(gpu.block(t), "kind", _HOST) == _PINNED,
            torch.Tensor.data_ptr: self._data_ptr,
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.Tensor.new_tensor: self._new_tensor,
            torch.tensor: self._tensor,
            torch.as_tensor: self._as_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        gpu, kwargs = self.gpu, kwargs or {}
        if not gpu.active:
            return func(*args, **kwargs)
        if (instead := self.instead.get(func)) is not None:
            return instead(*args, **kwargs)
        kind = None
        if kwargs.get("pin_memory"):
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            kind = _PINNED
        if (device := kwargs.get("device")) is not None and (device := torch.device(device)).type != "meta":
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            kind = _DEVICE if device.type == "cuda" else kind or _HOST
        if kind is None and getattr(gpu.local, "place", None) is None:
            return gpu.placed_in_backward(func(*args, **kwargs))
        with gpu.placing(kind):
            return gpu.placed_in_backward(func(*args, **kwargs))

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        on_gpu = self.gpu.on_gpu(tensor)
        if args and isinstance(args[0], Tensor):
            args = (_CUDA if self.gpu.on_gpu(args[0]) else torch.device("cpu"), args[0].dtype, *args[1:])
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        how = {} if dtype is None else {"dtype": dtype}
        if memory_format is not None:
            how["memory_format"] = memory_format
        wanted = on_gpu if device is None else device.type == "cuda"
        if wanted == on_gpu:
            return torch.Tensor.to(tensor, copy=copy, **how) if how or copy else tensor
        return self.gpu.moved(tensor, wanted, how, non_blocking)

    def _host(self, tensor: Tensor) -> Tensor:
        """The tensor for the host to read: what lies on the GPU is copied, pinned memory is looked
        at.
        """
        block = self.gpu.block(tensor)
        if block is None:
            return tensor
        if block.on_gpu:
            with torch.no_grad():
                return self.gpu.moved(tensor, False, {}, False)
        with self.gpu.lock:
            self.gpu._report("the host", [(tensor, block)], [], self.gpu.checker.host())
        return tensor

    def _numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        if self.gpu.on_gpu(tensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory"
                " first."
            )
        return torch.Tensor.numpy(self._host(tensor), **kwargs)

    def _pin_memory(self, tensor: Tensor, device: Any = None) -> Tensor:
        with self.gpu.placing(_PINNED):
            pinned = torch.empty_like(tensor)
        return pinned.copy_(tensor)

    def _data_ptr(self, tensor: Tensor) -> int:
        if not self.gpu.on_gpu(tensor):
            self._host(tensor)
        address = torch.Tensor.data_ptr(tensor)
        self.gpu.tensors_by_address[address] = tensor
        return address

    def _deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """PyTorch copies the storage, which no operator does."""
        copied, gpu = torch.Tensor.__deepcopy__(tensor, memo), self.gpu
        block = gpu.block(tensor)
        if block is not None and gpu.block(copied) is None:
            gpu._report("copy.deepcopy", [], [(copied, gpu.place(copied, block.kind, "copy.deepcopy"))])
        return copied

    def _tensor(self, data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = torch.tensor(data, **kwargs)
        if pin_memory:
            made = self._pin_memory(made)
        return made if device is None else self._to(made, device)

    def _new_tensor(self, like: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        device = _CUDA if device is None and self.gpu.on_gpu(like) else device
        return self._tensor(data, dtype=dtype or like.dtype, device=device, **kwargs)

    def _as_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        whole = isinstance(data, Tensor) and dtype in (None, data.dtype)
        made = data if whole else torch.as_tensor(data, dtype=dtype)
        return made if device is None else self._to(made, device)


class _About:
    """What the schema of an operator says."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name, name = schema.name, schema.name.removeprefix("aten::")
        self.waits, self.indexes = name in _WAITS, name in _INDEXING
        self.makes_empty = name.startswith(("empty", "new_empty"))
        self.running_statistics = name in _WRITES_RUNNING_STATISTICS
        #: Of each argument with tensors: place, name, whether its elements are read, or written.
        self.tensors: list[tuple[int, str, bool, bool]] = []
        for position, argument in enumerate(schema.arguments):
            if "Tensor" in str(argument.type):
                alias = argument.alias_info
                reads = alias is None and name not in _READS_NO_ARGUMENT
                self.tensors.append((position, argument.name, reads, alias is not None and alias.is_write))
        #: It looks at no element, and what it returns is part of its argument.
        self.makes_views = bool(self.tensors) and not any(r or w for *_, r, w in self.tensors)
        self.makes_views &= any(result.alias_info is not None for result in schema.returns)

    def placed(
        self, block: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[list[_Placed], list[_Placed], list[_Placed]]:
        """The tensors that an operator is given, those that it reads, and those that it writes."""
        given: list[_Placed] = []
        reads: list[_Placed] = []
        writes: list[_Placed] = []
        for position, name, is_read, is_written in self.tensors:
            value = args[position] if position < len(args) else kwargs.get(name)
            for part in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(part, Tensor):
                    pair = part, block(part)
                    given.append(pair)
                    if is_read:
                        reads.append(pair)
                    elif is_written:
                        writes.append(pair)
        if self.running_statistics and args[5]:
            writes += [(t, block(t)) for t in _tensors(args[3:5])]
        return given, reads, writes


_about = cache(_About)


def _ranges(tensors: list[_Placed]) -> list[_Range]:
    found = []
    for t, block in tensors:
        if block is not None and t.numel():
            start = t.data_ptr() - block.address
            size = t.nbytes if t.is_contiguous() else _extent(t) * t.element_size()
            found.append((block, start, start + size))
    return found


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last in memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 if tensor.numel() else 0


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the strides of the original, in memory of its own."""
    extent = _extent(tensor)
    return tensor.detach().as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in arguments or results, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_map(function, part) for part in value)
    if isinstance(value, dict):
        return {name: _map(function, part) for name, part in value.items()}
    return function(value)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"


def _on_host(value: Any) -> Any:
    return type(value)("cpu") if _is_cuda(value) else value


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)
