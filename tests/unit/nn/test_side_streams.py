"""Streams of branches; tests/races has the order that they keep, tests/gpu their results."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import torch

from mose_fast.nn import ExpertNetwork
from mose_fast.nn.side_streams import SideStreams


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __reduce__(self) -> None:
        raise TypeError("a CUDA stream cannot be copied")


def test_a_copy_of_a_network_makes_streams_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    network, x = ExpertNetwork(2, width=1), mock.Mock(is_cuda=True, device=torch.device("cuda", 0))
    first = network.side_streams.of(1, x)
    assert network.side_streams.of(1, x) is first is not network.side_streams.of(2, x)
    assert copy.deepcopy(network).side_streams.of(1, x) is not first
    assert not pickle.loads(pickle.dumps(SideStreams(on=False))).on


def test_there_are_none_on_the_cpu_and_in_evaluation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    streams, x = SideStreams(), mock.Mock(is_cuda=True, device=torch.device("cuda", 0))
    assert streams.of(1, torch.zeros(1)) is None and SideStreams(on=False).of(1, x) is None
    with torch.no_grad():
        assert streams.of(1, x) is None
    assert streams.of(1, x) is not None
