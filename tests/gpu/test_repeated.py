"""Every op on a GPU gives the same bits twice, on another stream, and replayed from a CUDA graph,
which reads the numbers of rows anew.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mose_fast import _loader
from mose_fast.self_check.problems import (
    FORMS,
    Adam,
    AlignConv,
    BatchNormAct,
    BatchNormPool,
    ExpertLosses,
    NormPool,
    NormState,
    Null,
    Problem,
    Shape,
)
from tests.gpu.comparison import results

DEVICE = _loader.gpu()

#: Makes of an op's problem, for a number of images.
PROBLEMS = {
    "align_conv with a gate": lambda n: partial(AlignConv, Shape(n, 64, 64, 32, 2, gate=True)),
    "align_conv, fused": lambda n: partial(AlignConv, Shape(n, 128, 256, 8, 1, True)),
    "align_conv in two": lambda n: partial(AlignConv, Shape(n, 256, 512, 4, 1, True)),
    **{
        f"batch_norm_act, {form}": lambda n, form=form: partial(BatchNormAct, form, (n, 64, 16, 16), consumers=2)
        for form in FORMS
    },
    "norm_state": lambda n: partial(NormState, (n, 64, 16, 16)),
    "batch_norm_pool": lambda n: partial(BatchNormPool, (n, 512, 4, 4)),
    "norm_pool": lambda n: partial(NormPool, (n, 512, 4, 4)),
    "mean": lambda n: partial(NormPool, (n, 512, 4, 4), with_state=False),
    "expert_losses": lambda n: partial(ExpertLosses, n, 100),
    "null": lambda n: Null,
}
ALL = {**PROBLEMS, "adam": lambda n: partial(Adam, averages=True)}


def make(name: str, images: int) -> Problem:
    return ALL[name](images)(torch.bfloat16, DEVICE, 0)


def entering(problem: Problem) -> torch.Tensor:
    """One of the op's inputs, with a row for each image."""
    if isinstance(problem, Adam):
        return problem.grads[0][1]
    if isinstance(problem, BatchNormPool):
        return problem.maps[0]
    return problem.inputs[-1] if isinstance(problem, ExpertLosses) else problem.x


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_two_runs_agree_bit_for_bit(gpu, name):
    problem = make(name, gpu.few(384))
    first = results(problem, problem.op)
    for _ in range(2):
        assert_equal(results(problem, problem.op), first)


@pytest.mark.needs("streams")
@pytest.mark.parametrize("name", ALL)
def test_runs_on_the_current_stream(name):
    problem = make(name, 64)
    wanted = results(problem, problem.op)
    x = entering(problem)
    kept = x.clone()
    x.zero_()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # a launch on another stream would overtake the copy behind this
        x.copy_(kept)
        found = results(problem, problem.op)
    side.synchronize()
    assert_equal(found, wanted)


@pytest.mark.needs("graphs")
@pytest.mark.parametrize("name", PROBLEMS)
def test_replays_of_a_graph_equal_eager_and_read_the_numbers_of_rows_anew(name):
    problem = make(name, 384)
    rows = len(entering(problem))

    def call(valid, new):
        options = {"new_rows": new} if isinstance(problem, ExpertLosses) else {}
        return results(problem, problem.op, valid_rows=valid, **options)

    def scalars(valid):
        return [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (valid, valid // 3)]

    given = scalars(rows)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*given)
    for valid in (rows, rows * 3 // 4, 1, 0, rows):
        for scalar, value in zip(given, scalars(valid), strict=True):
            scalar.copy_(value)
        graph.replay()
        assert_equal(captured, call(*scalars(valid)))
