"""A-GEM: its projection, and the step around it."""

from __future__ import annotations

import torch

from mose_fast.methods.agem import flat_gradient, project, write_gradient


def test_only_what_opposes_the_reference_is_removed_whatever_its_length():
    """docs/specification/baselines.md appendix G.3."""
    gradient = torch.tensor([2.0, 0, 1])
    for length in (1, 1000):
        assert project(gradient, torch.tensor([-length, 0.0, 0])).tolist() == [0, 0, 1]
        assert torch.equal(project(gradient, torch.tensor([length, 0.0, 0])), gradient)
    assert torch.equal(project(gradient, torch.zeros(3)), gradient)


def test_flat_gradients_equal_backward_and_come_back():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    network = network.to(memory_format=torch.channels_last)
    unused = torch.nn.Parameter(torch.ones(3))
    parameters = [*network.parameters(), unused]
    x = torch.randn(5, 3, 3, 3)
    flat = flat_gradient(network(x).square().sum(), parameters)
    assert all(p.grad is None for p in parameters)
    network(x).square().sum().backward()
    assert torch.equal(flat, torch.cat([*(p.grad.reshape(-1) for p in network.parameters()), torch.zeros(3)]))
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
