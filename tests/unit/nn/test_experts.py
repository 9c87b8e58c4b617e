"""The network: parameter counts, shapes, branch points, sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mose_fast.methods.mose import MOSE_PRESETS, MoseOptions
from mose_fast.nn import BRANCH_POINTS, Classifiers, ClassMeans, ExpertNetwork, classify, count_cost, names_of_experts
from mose_fast.nn.backbone import PointwiseConv2d
from tests.paths import ROOT


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def by_prefix(network: ExpertNetwork, prefix: str) -> int:
    return sum(p.numel() for name, p in network.named_parameters() if name.startswith(prefix))


@pytest.fixture
def sizes_alone():
    """Networks have no weights: counting needs none."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("sizes_alone")
def test_parameter_counts_of_the_released_network():
    network = ExpertNetwork(100)
    backbone = by_prefix(network, "stem") + by_prefix(network, "stage")
    assert backbone == 11_168_832
    assert backbone + parameters(network.classifier4) + parameters(network.projection4) == 11_285_796
    assert [parameters(getattr(network, f"align{i}")) for i in (1, 2, 3)] == [268_800, 254_976, 202_752]
    assert by_prefix(network, "align") == 726_528
    assert [parameters(getattr(network, f"gate{i}")) for i in (1, 2, 3)] == [9_728, 35_840, 137_216]
    assert by_prefix(network, "gate") == 182_784
    assert parameters(network.adapter) == 262_656
    assert parameters(network) == 12_808_656
    assert parameters(ExpertNetwork(200)) == 13_013_856


@pytest.mark.usefixtures("sizes_alone")
def test_parameter_count_of_the_paper_preset():
    options = MoseOptions(**MOSE_PRESETS["paper"])
    network = ExpertNetwork(100, attention=options.attention, adapter=options.adapter)
    assert parameters(network) == 12_363_216


@pytest.mark.usefixtures("sizes_alone")
def test_costs_agree_with_the_hand_count():
    """docs/specification/mose.md section 2: 555.5M, 582.4M and 582.6M multiply-accumulates at
    32x32.
    """
    network = ExpertNetwork(100)
    whole = count_cost(network, network, (32, 32))
    assert whole.parameters == 12_808_656
    assert whole.macs == pytest.approx(582.6e6, abs=0.1e6)
    without = ExpertNetwork(100, adapter=False)
    assert whole.macs - count_cost(without, without, (32, 32)).macs == 512 * 512
    deployed = count_cost(network, network.deepest_feature, (32, 32))
    assert deployed.parameters == 11_168_832
    # Stem, then per stage: first block, second block, shortcut; a stage's map is 32 >> stage pixels
    # wide.
    by_hand = 32 * 32 * 64 * 27 + sum(
        (32 >> s) ** 2 * (64 << s) * (9 * (64 << max(s - 1, 0)) + 27 * (64 << s) + (64 << (s - 1) if s else 0))
        for s in range(4)
    )
    assert deployed.macs == by_hand == pytest.approx(555.4e6, abs=0.1e6)
    assert network.training


@pytest.mark.parametrize(("experts", "size"), [*((experts, 32) for experts in range(1, 9)), (4, 64)])
def test_every_number_of_experts_and_both_image_sizes(experts, size):
    network = ExpertNetwork(5, width=4, experts=experts).eval()
    x = torch.rand(3, 3, size, size)
    outputs = network(x)
    assert outputs.features.shape == (experts, 3, 32)
    assert outputs.projections.shape == (experts, 3, 128)
    assert outputs.logits.shape == (experts, 3, 5)
    assert outputs.student.shape == (3, 32)
    assert (outputs.features >= 0).all()
    torch.testing.assert_close(network.deepest_feature(x), outputs.features[-1], rtol=0, atol=0)
    gated = {e for e, block in enumerate(BRANCH_POINTS[experts], start=1) if block <= 6}
    assert {e for e in range(1, experts + 1) if hasattr(network, f"gate{e}")} == gated


def test_experts_share_the_backbone_up_to_their_branch():
    """Expert 2 of 4 ends after stage 2: its loss reaches stages 1 and 2 and no deeper one."""
    network = ExpertNetwork(5, width=4).train()
    network(torch.rand(4, 3, 32, 32)).logits[1].sum().backward()
    reached = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {"stem", "stage1", "stage2", "gate2", "align2", "classifier2"}


def test_forward_self_distillation_stops_the_gradient_before_the_adapter():
    network = ExpertNetwork(5, width=4).train()
    network(torch.rand(4, 3, 32, 32), detach_student=True).student.sum().backward()
    assert {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None} == {"adapter"}


def test_initialisations():
    torch.manual_seed(0)
    kaiming, default = ExpertNetwork(5, width=16), ExpertNetwork(5, width=16, init="default")
    weight = kaiming.stage4.block1.conv1.weight
    assert weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.01)
    bound = (1 / (128 * 9)) ** 0.5
    assert default.stage4.block1.conv1.weight.abs().max() <= bound < weight.abs().max()
    assert (kaiming.stem.norm.weight == 1).all() and (kaiming.stem.norm.bias == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": 9}, "experts is 9"),
        ({"width": 0}, "width 0"),
        ({"init": "xavier"}, "xavier"),
        ({"student": 4}, "student is 4"),
    ],
)
def test_unusable_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExpertNetwork(5, **{"width": 4} | arguments)


def test_sides_that_do_not_halve_three_times_are_refused():
    with pytest.raises(ValueError, match="28x28"):
        ExpertNetwork(5, width=4).features(torch.rand(1, 3, 28, 28))


def test_class_means_by_hand():
    """Two classes on the axes; class 1 has no sample and is never predicted, though a test feature
    lies exactly on no prototype.
    """
    features = torch.tensor([[[2.0, 0.0], [0.0, 5.0], [0.0, 1.0]]])
    means = ClassMeans(features, torch.tensor([0, 2, 2]), 3)
    assert means.known.tolist() == [True, False, True]
    torch.testing.assert_close(means.means[0], torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]))
    queries = torch.tensor([[[3.0, 1.0], [1.0, 3.0], [-1.0, -1.0]]])
    distances = means.distances(queries)[0]
    assert distances[0, 0].item() == pytest.approx(2 - 2 * 3 / 10**0.5)
    assert distances[:, 1].isinf().all()
    predictions = means.scores(queries)[0].argmax(-1)
    assert predictions[:2].tolist() == [0, 2]
    assert not (predictions == 1).any()


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::").rstrip("_"))
        return func(*args, **(kwargs or {}))


def test_class_means_are_those_of_float64_and_add_in_a_fixed_order():
    """On a GPU, the operators that are named here add floats by atomics, in any order."""
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(3, 200, 16, generator=generator), torch.randint(0, 7, (200,), generator=generator)
    with _Operators() as used:
        means = ClassMeans(features, labels, 8).means
    assert not used.names & {"index_add", "scatter_add", "scatter_reduce", "index_put", "_index_put_impl", "put"}
    exact = F.normalize(features.double(), dim=-1)
    wanted = torch.stack([exact[:, labels == label].mean(1) for label in range(7)], 1)
    torch.testing.assert_close(means[:, :7].double(), F.normalize(wanted, dim=-1), rtol=0, atol=1e-6)
    assert not means[:, 7].any()


def test_mean_of_experts_averages_distances_and_logits():
    """Expert 1 slightly prefers class 0, expert 2 strongly class 1: the mean follows expert 2."""
    memory = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]] * 2)
    fitted = Classifiers(memory, torch.zeros(2, 2, 2), torch.tensor([0, 1]), ridge_penalty=1.0)
    features = torch.tensor([[[1.0, 0.9]], [[0.0, 1.0]]])
    logits = torch.tensor([[[0.1, 0.0]], [[0.0, 3.0]]])
    names = {name: names_of_experts(name, 2, joined=False) for name in ("ncm", "linear")}
    predicted = classify(features, logits, fitted, names)
    assert {c: {e: p.tolist() for e, p in experts.items()} for c, experts in predicted.items()} == {
        "ncm": {"1": [0], "2": [1], "mean_distance": [1]},
        "linear": {"1": [0], "2": [1], "mean_logit": [1]},
    }


def test_class_means_refuse_labels_beyond_the_classes_and_an_empty_memory():
    with pytest.raises(ValueError, match="labels reach 3"):
        ClassMeans(torch.rand(1, 2, 4), torch.tensor([0, 3]), 3)
    empty = ClassMeans(torch.empty(1, 0, 4), torch.empty(0, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="memory is empty"):
        empty.distances(torch.rand(1, 2, 4))


@pytest.mark.slow
def test_small_networks_survive_odd_batches_on_several_threads():
    """torch 2.14.1 crashes here with its own strided 1x1 convolution (heap corruption), so the
    check runs in a process of its own.
    """
    program = """
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from mose_fast.nn import ExpertNetwork
torch.set_num_threads(2)
network = ExpertNetwork(10, width=8, experts=1, attention=False, adapter=False).to(memory_format=torch.channels_last)
for images in (65, 67, 85):
    for _ in range(4):
        network(torch.randn(images, 3, 32, 32).contiguous(memory_format=torch.channels_last)).logits.sum().backward()
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_shortcuts_convolution_is_torchs_own():
    conv = PointwiseConv2d(6, 4, 2)
    x = torch.randn(3, 6, 8, 8, requires_grad=True)
    y, expected = conv(x), torch.nn.functional.conv2d(x, conv.weight, stride=2)
    torch.testing.assert_close(y, expected)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(gradient, wanted)
