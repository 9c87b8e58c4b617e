"""Choices in the step that need a card: cuDNN's search for algorithms, branches on their own
streams, cuDNN's fused norm.

    python -m bench.compare_step
    python -m bench.compare_step --device cpu --width 2     # only shows that it runs

* ``cudnn.benchmark`` (three candidates a convolution) at the two full shapes of a step, 296 and 384
  views;
* the alignment branches of the first three experts without streams of their own
  (``ExpertNetwork.side_streams``);
* ``batch_norm_act`` with a residual against cuDNN's bf16 NormAddRelu, forward, if the package
  nvidia-cudnn-frontend is installed.

Everything is bf16 and inside a captured graph; steps are forward and backward. The variants
alternate; the table has medians of event times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from bench.bench_step import make_call as make_step
from bench.common import Case
from mose_fast.device import device_name
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.train.captured import capture
from mose_fast.train.clock import laps

Call = Callable[[], object]


def captured(call: Call, device: str) -> Call:
    """The call as the replay of a graph; on the CPU the call itself."""
    if device == "cpu":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
        side.synchronize()
        with capture(side) as graph:
            call()
    torch.cuda.synchronize()
    return graph.replay


def medians(calls: dict[str, Call], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of each call; the calls alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += laps(torch.device(device), call, 1)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def step(rows: int, width: int, device: str, *, side_streams: bool = True) -> Call:
    """A step with the fused ops on ``rows`` views."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = Case("step", "native", device, dtype, "forward+backward", {"N": rows, "K": 100, "E": 4, "W": width})

    def prepare(network: ExpertNetwork) -> None:
        network.side_streams.on = side_streams

    return captured(make_step(case, prepare), device)


def steps(width: int, device: str, rounds: int) -> dict[str, float]:
    """The first two comparisons."""
    found: dict[str, float] = {}
    for rows in (296, 384) if device == "cuda" else (40,):
        calls: dict[str, Call] = {}
        before = torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit
        for search in (False, True):
            torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = search, 3
            calls[f"step of {rows} views, cudnn.benchmark {'on' if search else 'off'}"] = step(rows, width, device)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = before
        calls[f"step of {rows} views, all on one stream"] = step(rows, width, device, side_streams=False)
        found |= medians(calls, rounds, device)
    return found


def norm(rounds: int, device: str) -> dict[str, float]:
    """The third comparison: forward of norm, add and ReLU in training, on the first stage's map of
    384 images.
    """
    shape = (384, 64, 32, 32) if device == "cuda" else (4, 8, 8, 8)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, r = (
        torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    module = torch.nn.BatchNorm2d(shape[1], device=device)
    calls = {
        "norm + add + ReLU forward, batch_norm_act": captured(
            lambda: batch_norm_act(x, Norm.of(module), residual=r), device
        )
    }
    library = _norm_of_cudnn(x, r, module) if device == "cuda" else None
    if library is None:
        print("nvidia-cudnn-frontend is not installed: cuDNN's NormAddRelu is not measured", file=sys.stderr)
    else:
        calls["norm + add + ReLU forward, cuDNN NormAddRelu"] = captured(library, device)
    return medians(calls, rounds, device)


def _norm_of_cudnn(x: torch.Tensor, r: torch.Tensor, module: torch.nn.BatchNorm2d) -> Call | None:
    """A call of cuDNN's fused forward; None if cuDNN's frontend is not installed."""
    try:
        import cudnn
    except ImportError:
        return None
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    vector = (1, x.shape[1], 1, 1)
    tensors = {name: t.detach().float().view(vector) for name, t in (("scale", module.weight), ("bias", module.bias))}
    tensors |= {"mean": torch.zeros(vector, device=x.device), "var": torch.ones(vector, device=x.device)}
    scalars = {
        name: torch.full((1, 1, 1, 1), value)
        for name, value in (("epsilon", module.eps), ("momentum", module.momentum))
    }
    gx, gr = graph.tensor_like(x), graph.tensor_like(r)
    known = {name: graph.tensor_like(t) for name, t in (tensors | scalars).items()}
    y, mean, inverse, next_mean, next_var = graph.batchnorm(
        name="norm",
        input=gx,
        scale=known["scale"],
        bias=known["bias"],
        in_running_mean=known["mean"],
        in_running_var=known["var"],
        epsilon=known["epsilon"],
        momentum=known["momentum"],
        peer_stats=[],
    )
    out = graph.relu(name="relu", input=graph.add(name="add", a=y, b=gr))
    out.set_output(True).set_data_type(cudnn.data_type.BFLOAT16)
    for statistic in (mean, inverse, next_mean, next_var):
        statistic.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    results = {out: torch.empty_like(x)} | {
        s: torch.empty(vector, device=x.device) for s in (mean, inverse, next_mean, next_var)
    }
    given = {gx: x, gr: r} | {known[name]: t for name, t in (tensors | scalars).items()} | results
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device=x.device, dtype=torch.uint8)

    def call() -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(given, workspace, handle=handle)

    return call


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA card; wanted one, or --device cpu", file=sys.stderr)
        return 2
    print(f"{device_name(torch.device(given.device))}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    for name, milliseconds in (
        steps(given.width, given.device, given.rounds) | norm(given.rounds, given.device)
    ).items():
        print(f"{name:<60} {milliseconds:8.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
