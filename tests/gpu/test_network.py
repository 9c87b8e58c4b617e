"""The whole network by fused ops on a GPU: against float64, replayed from a graph, with padding,
no kernel that only adds gradients.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from mose_fast import _loader
from mose_fast.nn import ExpertNetwork
from mose_fast.ops.batch_norm_act import Norm, batch_norm_act

DEVICE = _loader.gpu()


@pytest.fixture(autouse=True)
def float32_is_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def make(kernels: str, dtype: torch.dtype = torch.float32, width: int = 64) -> ExpertNetwork:
    torch.manual_seed(0)
    network = ExpertNetwork(100, width=width, kernels=kernels)
    return network.to(DEVICE, dtype, memory_format=torch.channels_last)


def images(rows: int) -> Tensor:
    x = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE).contiguous(memory_format=torch.channels_last)


@lru_cache
def weights(shape: torch.Size) -> Tensor:
    """Of a sum over outputs of this shape; made before any capture."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(DEVICE)


def train_once(
    network: ExpertNetwork, x: Tensor, *, half: bool = False, rows: int | None = None, **settings
) -> list[Tensor]:
    """Outputs of the first rows, then the gradients of all parameters."""
    network.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        outputs = [part[..., :rows, :] for part in network(x, **settings)]
    loss = sum((part.double() * weights(part.shape)).sum() for part in outputs)
    (loss / len(x)).backward()
    return [part.detach() for part in outputs] + [p.grad for p in network.parameters()]


def distances(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Of the four outputs, and of all gradients as one vector: single gradients that all but vanish
    have no digit that counts.
    """

    def parts(tensors: list[Tensor]) -> list[Tensor]:
        return [*(t.double() for t in tensors[:4]), torch.cat([t.double().reshape(-1) for t in tensors[4:]])]

    return [((a - b).norm() / b.norm()).item() for a, b in zip(parts(found), parts(wanted), strict=True)]


@pytest.mark.parametrize(("half", "rows"), [(False, 33), (True, 384), (True, 33)])
def test_errors_are_at_most_twice_those_of_pytorchs_own_path(gpu, half, rows):
    x, width = images(gpu.few(rows)), gpu.few(64, 16)
    exact = train_once(make("torch", torch.float64, width), x.double())
    plain, fused = (
        distances(train_once(make(kernels, width=width), x, half=half), exact) for kernels in ("torch", "fused")
    )
    assert all(b <= 2 * max(a, 1e-6) for a, b in zip(plain, fused, strict=True)), (plain, fused)


def test_two_passes_agree_bit_for_bit(gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    x = images(gpu.few(48))
    first, again = (train_once(make("fused", width=gpu.few(64, 16)), x, half=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_padding_changes_nothing(gpu):
    rows = gpu.few(40)
    x = images(rows)
    longer = torch.cat([x, torch.zeros_like(images(gpu.few(24, 3)))]).contiguous(memory_format=torch.channels_last)
    bare, padded = (make("fused", width=gpu.few(64, 16)) for _ in range(2))
    wanted = train_once(bare, x)
    scale = len(longer) / len(x)  # the loss is divided by the images, padded ones included
    found = train_once(padded, longer, rows=rows, valid_rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE))
    found = [t if i < 4 else t * scale for i, t in enumerate(found)]
    assert max(distances(found, wanted)) < 1e-3
    for a, b in zip(padded.buffers(), bare.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("graphs")
def test_a_replayed_pass_is_the_eager_one(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    network, x = make("fused"), images(48)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        before = copy.deepcopy(network.state_dict())
        wanted = [t.clone() for t in train_once(network, x, half=True)]
        buffers = [b.clone() for b in network.buffers()]
        network.load_state_dict(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            found = train_once(network, x, half=True)
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(network.buffers(), buffers, strict=True))


@pytest.mark.needs("profiler")
def test_no_kernel_only_adds_gradients_of_maps():
    """The sums of the gradients of a map's readers happen in the backward pass of the norm before
    it (consumers).
    """
    network, x = make("fused"), images(48)
    train_once(network, x, half=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], record_shapes=True) as profile:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = network(x).features.float().sum()
        loss.backward()
    adds = [event.name for event in profile.events() if "CUDAFunctor_add" in event.name or "add_kernel" in event.name]
    # What is left adds vectors, such as the gradients of features that two heads read.
    assert len(adds) <= 8, adds


@pytest.mark.needs("streams")
def test_side_streams_change_nothing(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    x = images(48)
    network = make("fused")
    network.side_streams.on = False
    wanted = [t.clone() for t in train_once(network, x, half=True)]
    forked = make("fused")
    found = train_once(forked, x, half=True)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.needs("profiler")
def test_the_norm_of_the_library_is_used():
    """The tests above would pass, slowly, if every op fell back to PyTorch."""
    x = images(4)[:, :, :8, :8].repeat(1, 8, 1, 1)[:, :16].contiguous(memory_format=torch.channels_last)
    module = torch.nn.BatchNorm2d(16, device=DEVICE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch_norm_act(x, Norm.of(module))
    assert any("batch_norm_act_forward_kernel" in event.name for event in profile.events())
