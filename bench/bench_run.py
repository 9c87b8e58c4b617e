"""Training as in a run: a step inside the loop (planning, feed, step, reading of losses) by feed,
and on a GPU a whole run.

``reference`` and ``native`` differ in the network's kernels; the op's name gives the feed. The row
``run`` is one pass over 50,000 random images in ten tasks with an evaluation after each task, like
Split CIFAR-100 at M = 5,000. Its time is that of the whole call; the rows ``run_train``,
``run_evaluate``, ``run_capture``, ``run_checkpoint`` and ``run_other`` are the parts. There is one
run, so that its quantiles are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from bench.common import HEADLINE, Case
from mose_fast import _dali, run
from mose_fast.app.bench import in_the_loop, random_stream
from mose_fast.runs.clock import PHASES
from mose_fast.settings.run import RunConfig

IMPLEMENTATIONS = ("reference", "native")
FEEDS = ("fused", "dali", "torch")
#: Target times on a Hopper GPU in microseconds: a step in the loop, a whole run, its evaluations.
TARGETS = {"loop": 6e3, "run": 33e6, "run_evaluate": 1.65e6}


def config_for(case: Case, feed: str) -> RunConfig:
    return RunConfig.create(
        device=case.device,
        precision="bf16" if case.dtype == torch.bfloat16 else "fp32",
        kernels="fused" if case.impl == "native" else "torch",
        feed=feed,
        width=case.shape["W"],
        memory=case.shape["M"],
    )


@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def bench_loop(measure, impl, device, dtype, feed):
    on_gpu = device == "cuda"
    if not on_gpu and dtype != torch.float32:
        pytest.skip("CPU rows are float32")
    if feed == "dali" and _dali.obstacle():
        pytest.skip(_dali.obstacle())
    # The CPU shows the same code at a size that takes a second, not a minute.
    shape = {"N": HEADLINE, "K": 100, "W": 64 if on_gpu else 2, "M": 5000 if on_gpu else 200}
    target = TARGETS["loop"] if impl == "native" and dtype == torch.bfloat16 and feed != "torch" else None
    case = Case(f"loop_{feed}", impl, device, dtype, "forward+backward", shape, target, captured=False)

    def take() -> list[float]:
        config = config_for(case, feed)
        stream = random_stream(config, shape["K"], 2000 * config.stream.batch)
        return in_the_loop(config, stream, seconds=2.0 if on_gpu else 1.0)[1]

    measure.given(case, take)


@pytest.mark.parametrize("part", ["run", *(f"run_{phase}" for phase in (*PHASES, "other"))])
def bench_run(measure, device, part, whole_run):
    if device != "cuda" or not torch.cuda.is_available():
        pytest.skip("a whole run at full size is measured on a GPU only")
    case = Case(
        part, "native", device, torch.bfloat16, "run", {"N": HEADLINE, "K": 100, "W": 64, "M": 5000}, TARGETS.get(part)
    )
    measure.given(case, lambda: [whole_run(config_for(case, "auto"))[part]])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Callable[[RunConfig], dict[str, float]]:
    """A function that trains once and gives the seconds of the run by part."""
    found: dict[str, float] = {}

    def train(config: RunConfig) -> dict[str, float]:
        if not found:
            stream = random_stream(config, 100, 50_000, tests=10_000)
            random = torch.Generator().manual_seed(1)
            labels = torch.arange(len(stream.x_train)) % 100
            ten = tuple(tuple(range(10 * task, 10 * task + 10)) for task in range(10))
            stream = dataclasses.replace(
                stream, y_train=labels[torch.randperm(len(labels), generator=random)], tasks=ten
            )
            results = run(config, stream=stream, out=tmp_path_factory.mktemp("run") / "run")
            seconds = results["seconds"]
            found.update(run=seconds["wall"], **{f"run_{name}": seconds[name] for name in (*PHASES, "other")})
        return found

    return train
