"""Choices in the step that need a GPU: cuDNN's search for algorithms, and branches on streams of
their own.

    python -m bench.compare_step
    python -m bench.compare_step --device cpu --width 2     # only shows that it runs

Steps of 296 and 384 views, the two full shapes, in bf16 and inside a captured graph; a step is
forward, backward and Adam. Variants: as it is; the alignment branches of the first three experts
without streams of their own (``ExpertNetwork.side_streams``); with cuDNN's search for algorithms
(``cudnn.benchmark``) among three candidates a convolution, and among all.

The table has medians of event times. The first two variants alternate. Each search has a process of
its own, since PyTorch keeps the algorithm that it first took for a shape, whether it has searched
or not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from bench.bench_step import make_call as make_step
from bench.common import Case, gpu_is_missing
from mose_fast.device import device_name
from mose_fast.nn import ExpertNetwork
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


def _keep_on_one_stream(network: ExpertNetwork) -> None:
    network.side_streams.on = False


#: What is done to the network before a variant of the step.
VARIANTS: dict[str, Callable[[ExpertNetwork], None]] = {
    "as it is": lambda network: None,
    "all on one stream": _keep_on_one_stream,
}


def steps(
    variants: dict[str, Callable[[ExpertNetwork], None]], width: int, device: str, rounds: int
) -> dict[str, float]:
    """Median milliseconds of the variants of the step at both shapes; the variants alternate."""
    times: dict[str, list[float]] = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for rows in (296, 384) if device == "cuda" else (40,):
        case = Case("step", "native", device, dtype, "forward+backward", {"N": rows, "K": 100, "E": 4, "W": width})
        calls = {
            f"step of {rows} views, {name}": captured(make_step(case, prepare), device)
            for name, prepare in variants.items()
        }
        for _ in range(rounds):
            for name, call in calls.items():
                times.setdefault(name, []).extend(laps(torch.device(device), call, 1))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def searched(candidates: int, width: int, device: str, rounds: int) -> dict[str, float]:
    """The step with cuDNN's search among so many candidates (0: all), in its own process."""
    sizes = ("--device", device, "--width", str(width), "--rounds", str(rounds))
    command = python("bench.compare_step", *sizes, "--search", str(candidates))
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--search", type=int, help=argparse.SUPPRESS)  # what `searched` starts
    given = parser.parse_args(arguments)
    if gpu_is_missing(given.device):
        return 2
    sizes = given.width, given.device, given.rounds
    if given.search is not None:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, given.search
        name = f"cuDNN's search among {given.search or 'all'}"
        print(json.dumps(steps({name: VARIANTS["as it is"]}, *sizes)))
        return 0
    print(f"{device_name(torch.device(given.device))}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    # What takes longest comes last: a call that is stopped has shown the others.
    for measured in (lambda: steps(VARIANTS, *sizes), lambda: searched(3, *sizes), lambda: searched(0, *sizes)):
        for name, milliseconds in measured().items():
            print(f"{name:<60} {milliseconds:8.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
