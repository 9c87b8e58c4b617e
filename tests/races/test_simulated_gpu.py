"""The simulated GPU by itself: small programs whose order is known, each with what is reported of
it.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mose_fast import _loader
from mose_fast.ops.adam import adam_step
from tests.races.simulated_gpu import SimulatedGpu

PINNED = {"pin_memory": True}


@pytest.fixture
def gpu():
    with SimulatedGpu(done=0.0) as gpu:
        yield gpu


def test_tensors_know_where_they_are(gpu):
    x = torch.arange(6, device="cuda").view(2, 3)
    assert x.is_cuda and x[0].device == torch.device("cuda", 0) and (x + 1).is_cuda and torch.zeros_like(x).is_cuda
    assert not x.cpu().is_cuda and x.cpu().tolist() == [[0, 1, 2], [3, 4, 5]] == x.tolist()
    host = torch.ones(3)
    assert (
        host.device.type == "cpu" and host.to("cuda").is_cuda and host.pin_memory().is_pinned() and not host.is_pinned()
    )
    assert torch.empty_like(x, device="meta").device.type == "meta"
    assert torch.nn.Linear(3, 3).to("cuda").weight.is_cuda
    with pytest.raises(RuntimeError, match="on the same device"):
        x + host
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()


# Two streams


# Between what the first stream did and what the second one does; ``early`` is an event of the first
# from before, ``third`` a stream.
WAITS = {
    "nothing": lambda first, second, early, third: None,
    "an event": lambda first, second, early, third: second.wait_event(first.record_event()),
    "an event that was recorded too early": lambda first, second, early, third: second.wait_event(early),
    "the stream": lambda first, second, early, third: second.wait_stream(first),
    "the host, for the stream": lambda first, second, early, third: first.synchronize(),
    "the host, for an event": lambda first, second, early, third: first.record_event().synchronize(),
    "the host, for the GPU": lambda first, second, early, third: torch.cuda.synchronize(),
    "a third stream": lambda first, second, early, third: (third.wait_stream(first), second.wait_stream(third)),
    "the wrong way round": lambda first, second, early, third: first.wait_stream(second),
}


@pytest.mark.parametrize("use", ["reads", "writes"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_stream_uses_what_another_one_made(gpu, wait, use):
    first, second, third = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    early = first.record_event()
    with torch.cuda.stream(first):
        x = torch.ones(3, device="cuda")
    WAITS[wait](first, second, early, third)
    with torch.cuda.stream(second):
        x.add_(1) if use == "writes" else x + 1
    ordered = wait not in ("nothing", "an event that was recorded too early", "the wrong way round")
    assert bool(gpu.races) != ordered


def test_a_write_waits_for_reads_and_reads_for_nobody(gpu):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    for stream in (first, second):
        with torch.cuda.stream(stream):
            x.sum()
    assert not gpu.races
    second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        x.zero_()
    assert (
        len(gpu.races) == 1
        and "aten::zero_ writes on stream" in str(gpu.races[0])
        and "aten::sum reads" in str(gpu.races[0])
    )


# Memory that is freed


@pytest.mark.parametrize("guard", ["nothing", "record_stream", "wait before", "wait later"])
def test_memory_is_given_away_while_it_is_read(gpu, guard):
    own, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(own):
        x = torch.ones(3, device="cuda")
        reader.wait_stream(own)
        with torch.cuda.stream(reader):
            x.sum()
        if guard == "record_stream":
            x.record_stream(reader)
        if guard == "wait before":
            own.wait_stream(reader)
        del x
        gc.collect()
        torch.ones(5, device="cuda")
        if guard == "wait later":
            own.wait_stream(reader)
    assert bool(gpu.races) == (guard in ("nothing", "wait later"))


# The host


def test_the_host_reads_pinned_memory(gpu):
    x = torch.arange(3.0, device="cuda")
    for read in (
        torch.Tensor.tolist,
        torch.Tensor.sum,
        torch.Tensor.numpy,
        lambda t: float(t[0]),
        torch.Tensor.data_ptr,
    ):
        host = torch.empty(3, **PINNED)
        host.copy_(x, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event()
        assert not arrived.query()
        before = len(gpu.races)
        read(host)
        assert len(gpu.races) == before + 1
        arrived.synchronize()
        assert arrived.query()
        read(host)
        assert len(gpu.races) == before + 1


@pytest.mark.parametrize("waits", [True, False])
def test_threads_are_hosts_of_their_own(gpu, waits):
    host, x = torch.empty(3, **PINNED), torch.ones(3, device="cuda")
    copied = torch.cuda.current_stream().record_event()

    def fetch():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            if waits:
                stream.wait_event(copied)
            host.copy_(x, non_blocking=True)
        stream.synchronize()
        return host.tolist()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(fetch)
        assert done.result() == [1, 1, 1]
    assert bool(gpu.races) != waits
    # Its result came after it had waited.
    races = len(gpu.races)
    host.tolist()
    assert len(gpu.races) == races


# Graphs


def captured(x: torch.Tensor, y: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        y.add_(x * 2)
    return graph


def test_a_capture_executes_nothing_and_a_replay_reads_anew(gpu):
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = captured(x, y)
    assert y.tolist() == [0, 0, 0]
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [12, 12, 12] and not gpu.races


@pytest.mark.parametrize("waits", [True, False])
def test_inputs_of_a_graph_that_are_overwritten_while_it_reads(gpu, waits):
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph, other = captured(x, y), torch.cuda.Stream()
    graph.replay()
    if waits:
        other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        x.fill_(2)
    assert bool(gpu.races) != waits


@pytest.mark.parametrize(
    "act", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.cuda.synchronize(), lambda x: x[x > 0]]
)
def test_nothing_may_wait_in_a_capture(gpu, act):
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        act(x)


def test_a_graph_whose_input_was_freed_is_reported(gpu):
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = captured(x, y)
    graph.replay()
    assert not gpu.races
    del x
    graph.replay()
    assert len(gpu.races) == 1 and "whose last reference has gone" in str(gpu.races[0])


FORKS = {
    "as it should be": (True, True, True),
    "without a fork": (False, True, True),
    "without a join": (True, True, False),
    "where the network goes on with what the branch reads": (True, False, True),
}


@pytest.mark.parametrize("fault", FORKS)
def test_streams_that_a_capture_forks(gpu, fault):
    """A branch reads x and writes y on a stream of its own; then x is overwritten."""
    forks, waits, joins = FORKS[fault]
    x, y, side = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        own = torch.cuda.current_stream()
        if forks:
            side.wait_stream(own)
        with torch.cuda.stream(side):
            y.add_(x)
        if joins and waits:
            own.wait_stream(side)
        x.fill_(2)
        if joins and not waits:
            own.wait_stream(side)
    assert bool(gpu.races) == (fault != "as it should be")
    graph.replay()
    assert y.tolist() == [1, 1, 1]


@pytest.mark.parametrize("waits", [True, False])
def test_a_backward_pass_runs_on_the_streams_of_the_forward_pass(gpu, waits):
    weight, side = torch.ones(3, device="cuda", requires_grad=True), torch.cuda.Stream()
    x = weight * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.square()
    torch.cuda.current_stream().wait_stream(side)
    loss = y.sum()
    if waits:
        loss.grad_fn.register_hook(lambda *_: side.wait_stream(torch.cuda.current_stream()))
        x.grad_fn.register_prehook(lambda *_: torch.cuda.current_stream().wait_stream(side))
    loss.backward()
    # Both ways between the streams.
    assert len(gpu.races) == (0 if waits else 2), gpu.races
    assert weight.grad.tolist() == [8, 8, 8]


# Native code


@pytest.mark.skipif(_loader.native is None, reason="there is no native library")
def test_native_functions_without_a_schema_are_seen(gpu):
    """Adam's step, by what it takes mutable pointers of: the gradient and the learning rate are
    read, the buffers written.
    """
    master, first, second, gradient = (torch.ones(64, device="cuda") for _ in range(4))
    steps, lr, unused = torch.zeros(1, device="cuda"), torch.tensor(0.1, device="cuda"), torch.zeros(64, device="cuda")
    average, copied = torch.ones(64, device="cuda"), torch.ones(64, device="cuda", dtype=torch.bfloat16)
    rates = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "average_rate": 0.5}
    read = {"gradient": gradient, "lr": lr, "unused": unused}
    written = {"master": master, "first": first, "steps": steps, "average": average, "copied": copied}
    other = torch.cuda.Stream()

    def races_of(tensor: torch.Tensor) -> int:
        """Reads a tensor on another stream while a step runs that waited for all before."""
        torch.cuda.synchronize()
        adam_step(master, first, second, [gradient], [0], steps, lr, average=average, average_shadow=copied, **rates)
        before = len(gpu.races)
        with torch.cuda.stream(other):
            tensor.sum()
        return len(gpu.races) - before

    assert {name: races_of(x) for name, x in read.items()} == dict.fromkeys(read, 0)
    assert {name: races_of(x) for name, x in written.items()} == dict.fromkeys(written, 1)
    on_host, host_average = [torch.ones(64) for _ in range(4)], torch.ones(64)
    for done in range(8):
        steps_done, rate = torch.full((1,), float(done)), torch.tensor(0.1)
        adam_step(*on_host[:3], [on_host[3]], [0], steps_done, rate, average=host_average, **rates)
    assert float(steps) == 8 and all(
        torch.equal(a.cpu(), b)
        for a, b in zip((master, first, second, average), [*on_host[:3], host_average], strict=True)
    )
