"""A network by fused ops against the same network by PyTorch's modules."""

from __future__ import annotations

import copy

import pytest
import torch

from mose_fast.nn import AlignmentModule, ExpertNetwork
from mose_fast.ops.expert_losses import contrastive_loss, masked_cross_entropy, self_distillation

NETWORKS = {
    "released": {},
    "paper": {"attention": False, "adapter": False},
    "one expert": {"experts": 1, "attention": False, "adapter": False},
    "two experts": {"experts": 2},
    "eight experts": {"experts": 8},
    "student in front": {"student": 0},
}


def twins(dtype: torch.dtype = torch.float64, **settings) -> tuple[ExpertNetwork, ExpertNetwork]:
    torch.manual_seed(1)
    plain = ExpertNetwork(5, width=8, projection=6, **settings).to(dtype, memory_format=torch.channels_last)
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    fused = copy.deepcopy(plain)
    fused.use_kernels("fused")
    return plain, fused


def images(rows: int = 5, size: int = 16, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def train_once(
    network: ExpertNetwork, x: torch.Tensor, rows: int | None = None, **settings
) -> tuple[torch.Tensor, ...]:
    """Outputs of the first ``rows`` images; gradients of a sum of them, weighted at random, are
    left in the parameters.
    """
    outputs = [part[..., :rows, :] for part in network(x, **settings)]
    weight = torch.Generator().manual_seed(3)
    loss = sum(
        (part * torch.randn(part.shape, generator=weight, dtype=torch.float64).to(part.dtype)).sum() for part in outputs
    )
    loss.backward()
    return tuple(outputs)


def assert_same_training(
    plain: ExpertNetwork, fused: ExpertNetwork, wanted: tuple, found: tuple, tolerance: float
) -> None:
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    for (name, a), b in zip(plain.named_parameters(), fused.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            scale = a.grad.abs().max().clamp(min=1)
            assert ((a.grad - b.grad).abs().max() / scale).item() < tolerance, name
    for (name, a), b in zip(plain.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("settings", NETWORKS.values(), ids=NETWORKS)
def test_training_is_the_same(settings):
    plain, fused = twins(**settings)
    x = images()
    assert_same_training(plain, fused, train_once(plain, x), train_once(fused, x), 1e-9)


def test_training_in_float32_is_the_same_up_to_rounding():
    plain, fused = twins(torch.float32)
    x = images(dtype=torch.float32)
    assert_same_training(plain, fused, train_once(plain, x), train_once(fused, x), 2e-4)


def test_a_detached_student_passes_no_gradient():
    plain, fused = twins()
    x = images()
    assert_same_training(
        plain, fused, train_once(plain, x, detach_student=True), train_once(fused, x, detach_student=True), 1e-9
    )


def test_evaluation_is_the_same():
    plain, fused = twins(torch.float32)
    x = images(dtype=torch.float32)
    train_once(plain, x)
    fused.load_state_dict(plain.state_dict())
    for network in (plain, fused):
        network.eval()
    for a, b in zip(plain(x), fused(x), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.deepest_feature(x), plain.features(x)[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "as_tensor"), [("released", False), ("paper", True), ("eight experts", True)])
def test_padding_changes_nothing(name, as_tensor):
    """The padded step equals the step without padding: outputs, gradients, running statistics."""
    bare, padded = twins(**NETWORKS[name])
    bare.use_kernels("fused")
    x = images(5)
    longer = torch.cat([x, torch.zeros(3, *x.shape[1:], dtype=x.dtype)]).contiguous(memory_format=torch.channels_last)
    valid = torch.tensor(5, dtype=torch.int32) if as_tensor else 5
    wanted, found = train_once(bare, x), train_once(padded, longer, 5, valid_rows=valid)
    assert_same_training(bare, padded, wanted, found, 1e-9)
    assert torch.count_nonzero(padded.features(longer, valid)[:, 5:]) == 0


def test_an_alignment_module_serves_in_any_model():
    torch.manual_seed(0)
    plain = AlignmentModule(8, 2).double()
    fused = AlignmentModule(8, 2, kernels="fused").double()
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(3, 8, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-9, atol=1e-9)
    pool = AlignmentModule(8, 0, kernels="fused")
    torch.testing.assert_close(pool(x.relu()), x.relu().mean(dim=(2, 3)))


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="kernels is 'fast'; wanted one of torch, fused"):
        ExpertNetwork(5, kernels="fast")
    plain, _ = twins()
    with pytest.raises(ValueError, match="valid_rows is given, but kernels is 'torch'"):
        plain(images(), valid_rows=3)
    with pytest.raises(ValueError, match="kernels is 'torch', which has no gate and no valid_rows"):
        AlignmentModule(8, 1)(torch.zeros(1, 8, 8, 8), valid_rows=1)
    with pytest.raises(ValueError, match="image size is 28x28; wanted sides that are multiples of 8"):
        ExpertNetwork(5, width=8, kernels="fused")(torch.zeros(2, 3, 28, 28))


def test_transforms_of_torch_func_go_through_network_and_losses():
    """What vmap and grad hand on has no memory that native code could read, on the CPU or on a
    GPU.
    """
    plain, fused = (network.eval() for network in twins(torch.float32))
    x = images(6, dtype=torch.float32).unflatten(0, (3, 2))
    labels, classes = torch.tensor([[0, 0], [1, 1], [3, 3]]), torch.tensor([True, True, False, True, False])
    gradients = []
    for network in (plain, fused):

        def loss(parameters, x, y, network=network):
            outputs = torch.func.functional_call(network, parameters, (x,))
            return (
                contrastive_loss(outputs.projections[0], y, 0.1)
                + torch.nn.functional.cross_entropy(outputs.logits[1], y)
                + self_distillation(outputs.student, outputs.features[0], "frobenius")
            )

        parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
        every = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, labels)
        logits = torch.func.grad(masked_cross_entropy)(torch.ones(2, 5), labels[1], classes)
        gradients.append(torch.cat([t.flatten() for t in (*every.values(), logits)]))
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()
