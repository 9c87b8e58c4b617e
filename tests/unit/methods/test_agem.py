"""A-GEM: its projection, and the step around it."""

from __future__ import annotations

import pytest
import torch

from mose_fast.learner.gradients import flat_gradient, flatten, project, write_gradient


def random_vectors(seed: int, size: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


@pytest.mark.parametrize("seed", range(6))
def test_projection_never_opposes_the_reference(seed):
    """docs/specification/baselines.md appendix G.3: afterwards <g', r> = 0 where it was negative;
    where it was not, nothing changes.
    """
    gradient, reference = random_vectors(seed)
    before = torch.dot(gradient.double(), reference.double())
    after = project(gradient, reference)
    if before >= 0:
        assert torch.equal(after, gradient)
    else:
        assert abs(torch.dot(after.double(), reference.double())) < 1e-4 * gradient.norm() * reference.norm()
        wanted = gradient.double() - before / reference.double().square().sum() * reference.double()
        assert torch.allclose(after.double(), wanted, atol=1e-5)
        assert torch.allclose(
            project(gradient, 1000 * reference), after, atol=1e-5
        )  # the reference's length does not matter


def test_a_reference_of_zero_changes_nothing():
    gradient, _ = random_vectors(0)
    assert torch.equal(project(gradient, torch.zeros_like(gradient)), gradient)


def test_opposite_gradients_cancel():
    assert project(torch.tensor([2.0, 0, 1]), torch.tensor([-1.0, 0, 0])).tolist() == [0, 0, 1]


def test_flat_gradients_equal_backward_and_come_back():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    network = network.to(memory_format=torch.channels_last)
    unused = torch.nn.Parameter(torch.ones(3))
    parameters = [*network.parameters(), unused]
    x = torch.randn(5, 3, 3, 3)
    flat = flat_gradient(network(x).square().sum(), parameters)
    assert all(p.grad is None for p in parameters)
    network(x).square().sum().backward()
    assert torch.equal(flat, flatten([*(p.grad for p in network.parameters()), torch.zeros(3)]))
    wanted = [p.grad.clone() for p in network.parameters()]
    write_gradient(parameters, flat)
    # PyTorch's fused optimisers on the CPU take gradients of another layout for something else.
    assert all(p.grad.stride() == p.stride() for p in parameters)
    assert all(
        torch.equal(p.grad, w) for p, w in zip(network.parameters(), wanted, strict=True)
    ) and unused.grad.tolist() == [0, 0, 0]


def test_until_a_task_is_finished_it_is_fine_tuning_bit_for_bit(make, teach):
    agem, plain = (teach(make(name), tasks=(0,)) for name in ("agem", "finetune"))
    assert agem.memory.filled > 0
    assert agem.weights_hash() == plain.weights_hash()
