"""The variants of a step that bench.compare_step measures, on the simulated GPU: they are ordered,
and their weights are the same.
"""

from __future__ import annotations

import pytest
import torch

from bench import compare_step
from bench.bench_step import make_call
from bench.common import Case
from mose_fast import _loader
from mose_fast.nn import ExpertNetwork
from tests.ordering.card import Card, Stream

pytestmark = pytest.mark.skipif(_loader.native is None, reason="there is no native library, which has Adam")


def two_steps(variant: str) -> tuple[Card, list[torch.Tensor]]:
    """The GPU and the network's weights after two steps."""
    networks: list[ExpertNetwork] = []
    case = Case("step", "native", "cuda", torch.float32, "forward+backward", {"N": 6, "K": 10, "E": 4, "W": 8})

    def prepare(network: ExpertNetwork) -> None:
        networks.append(network)
        compare_step.VARIANTS[variant](network)

    with Card() as card:
        torch.manual_seed(0)
        call = make_call(case, prepare)
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    return card, [weight.detach().cpu() for weight in networks[0].parameters()]


def test_weight_gradients_beside_change_no_weight():
    plain, weights = two_steps("as it is")
    beside, others = two_steps("weight gradients beside")
    assert not plain.races and not beside.races, [*map(str, plain.races + beside.races)]
    assert len(beside.streams) == len(plain.streams) + 1
    for weight, other in zip(weights, others, strict=True):
        assert torch.equal(weight, other)


def test_all_on_one_stream_has_one():
    card, _ = two_steps("all on one stream")
    assert not card.races and len(card.streams) == 1


def test_a_missing_join_is_reported(monkeypatch):
    """Adam would read gradients that no wait orders before it."""

    def prepare(network: ExpertNetwork) -> None:
        network.side_streams.on = False  # so that the network's stream waits for no other one
        compare_step.put_weight_gradients_beside(network)

    monkeypatch.setitem(compare_step.VARIANTS, "beside", prepare)
    assert not two_steps("beside")[0].races
    waits = Stream.wait_stream
    monkeypatch.setattr(
        Stream, "wait_stream", lambda self, other: None if self is Card.current.default else waits(self, other)
    )
    assert two_steps("beside")[0].races
