"""Choices in the step that need a card: cuDNN's search for algorithms, branches on their own
streams, cuDNN's fused norm.

    python -m bench.compare_step
    python -m bench.compare_step --device cpu --width 2     # only shows that it runs

* steps of 296 and 384 views, the two full shapes:
  * as they are;
  * the alignment branches of the first three experts without streams of their own
    (``ExpertNetwork.side_streams``);
  * the weights' gradients of the backbone's convolutions on a stream of their own, beside all
    that the backward pass computes after them;
  * with cuDNN's search for algorithms (``cudnn.benchmark``) among three candidates a convolution,
    and among all;
* ``batch_norm_act`` with a residual against cuDNN's bf16 NormAddRelu, forward, if the package
  nvidia-cudnn-frontend is installed.

Everything is bf16 and inside a captured graph; steps are forward, backward and Adam. The table has
medians of event times. The variants alternate, but for the two searches: each has a process of its
own, since PyTorch keeps the algorithm that it first took for a shape, whether it has searched or
not.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bench.bench_step import make_call as make_step
from bench.common import Case
from mose_fast.device import device_name
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act
from mose_fast.processes import python
from mose_fast.runs.clock import laps
from mose_fast.train.captured import capture

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


class _WeightGradientBeside(torch.autograd.Function):
    """A convolution whose weight's gradient is computed on a stream of its own. The current stream
    waits for all of them where the images need no gradient: at the first convolution, whose
    backward pass is the last.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: nn.Conv2d, side: torch.cuda.Stream | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv, ctx.side = conv, side
        return nn.functional.conv2d(x, weight, None, conv.stride, conv.padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, weight = ctx.saved_tensors

        def gradients(of_x: bool, of_weight: bool) -> tuple[Tensor | None, Tensor | None]:
            conv = ctx.conv
            return torch.ops.aten.convolution_backward(
                grad, x, weight, None, conv.stride, conv.padding, (1, 1), False, (0, 0), 1, (of_x, of_weight, False)
            )[:2]

        current = None
        if ctx.side is not None:
            current = torch.cuda.current_stream(x.device)
            ctx.side.wait_stream(current)
        with nullcontext() if ctx.side is None else torch.cuda.stream(ctx.side):
            of_weight = gradients(False, True)[1]
        of_x = gradients(True, False)[0] if ctx.needs_input_grad[0] else None
        if current is not None:
            for read in (grad, x):
                read.record_stream(ctx.side)
            of_weight.record_stream(current)
            if of_x is None:
                current.wait_stream(ctx.side)
        return of_x, of_weight, None, None


def put_weight_gradients_beside(network: ExpertNetwork) -> None:
    """Gives the weights' gradients of the backbone's convolutions a stream of their own."""
    device = next(network.parameters()).device
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d) and name.startswith(("stem.", "stage")):
            module.forward = functools.partial(_convolve, module, side)


def _convolve(conv: nn.Conv2d, side: torch.cuda.Stream | None, x: Tensor) -> Tensor:
    return _WeightGradientBeside.apply(x, conv.weight, conv, side)


def _keep_on_one_stream(network: ExpertNetwork) -> None:
    network.side_streams.on = False


#: What is done to the network before a variant of the step.
VARIANTS: dict[str, Callable[[ExpertNetwork], None]] = {
    "as it is": lambda network: None,
    "all on one stream": _keep_on_one_stream,
    "weight gradients beside": put_weight_gradients_beside,
}


def steps(
    variants: dict[str, Callable[[ExpertNetwork], None]], width: int, device: str, rounds: int
) -> dict[str, float]:
    """The variants of the step at both shapes."""
    found: dict[str, float] = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for rows in (296, 384) if device == "cuda" else (40,):
        case = Case("step", "native", device, dtype, "forward+backward", {"N": rows, "K": 100, "E": 4, "W": width})
        calls = {
            f"step of {rows} views, {name}": captured(make_step(case, prepare), device)
            for name, prepare in variants.items()
        }
        found |= medians(calls, rounds, device)
    return found


def searched(candidates: int, width: int, device: str, rounds: int) -> dict[str, float]:
    """The step with cuDNN's search among so many candidates a convolution (0: all), in a process of
    its own.
    """
    sizes = ("--device", device, "--width", str(width), "--rounds", str(rounds))
    command = python("bench.compare_step", *sizes, "--search", str(candidates))
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def norm(rounds: int, device: str) -> dict[str, float]:
    """The last comparison: forward of norm, add and ReLU in training, on the first stage's map of
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
    parser.add_argument("--search", type=int, help=argparse.SUPPRESS)  # what `searched` starts
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA card; wanted one, or --device cpu", file=sys.stderr)
        return 2
    sizes = given.width, given.device, given.rounds
    if given.search is not None:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, given.search
        name = f"cuDNN's search among {given.search or 'all'}"
        print(json.dumps(steps({name: VARIANTS["as it is"]}, *sizes)))
        return 0
    print(f"{device_name(torch.device(given.device))}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    # What takes longest comes last: a call that is stopped has shown the others.
    for measured in (
        lambda: steps(VARIANTS, *sizes),
        lambda: norm(given.rounds, given.device),
        lambda: searched(3, *sizes),
        lambda: searched(0, *sizes),
    ):
        for name, milliseconds in measured().items():
            print(f"{name:<60} {milliseconds:8.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
