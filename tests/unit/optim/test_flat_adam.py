"""FlatAdam against torch.optim.Adam, its shadows, its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from mose_fast import _loader
from mose_fast.nn import ExpertNetwork
from mose_fast.optim import FlatAdam
from mose_fast.runs.checkpoint import load_checkpoint, save_checkpoint

needs_library = pytest.mark.skipif(_loader.native is None, reason="the native library was not built")


@pytest.fixture(params=[pytest.param("native", marks=needs_library), "fallback"], autouse=True)
def path(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(_loader, "native", None)
    return request.param


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1, bias=False),
            nn.Flatten(),
            nn.Linear(36, 5),
        )


def make(**options):
    torch.manual_seed(3)
    network = Net().to(memory_format=torch.channels_last)
    settings = {"lr": 1e-2, "weight_decay": 1e-2, **options}
    return network, FlatAdam(network.parameters(), **settings)


def twin_of(network, **options):
    twin = copy.deepcopy(network)
    settings = {"lr": 1e-2, "weight_decay": 1e-2, **options}
    return twin, torch.optim.Adam(twin.parameters(), **settings)


def loss_of(network, x, leaves=None):
    names = [name for name, _ in network.named_parameters()]
    out = network(x) if leaves is None else functional_call(network, dict(zip(names, leaves, strict=True)), (x,))
    return out.float().square().sum()


def images(n=4):
    return torch.randn(n, 3, 5, 5).contiguous(memory_format=torch.channels_last)


def step_both(optimiser, twin, theirs, gradients):
    optimiser.step(gradients)
    for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    theirs.step()


def assert_alike(network, twin, tolerance=1e-6):
    for (name, ours), theirs in zip(network.named_parameters(), twin.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= tolerance, name


def test_recorded_gradients_give_the_weights_of_torch_after_a_hundred_steps():
    network, optimiser = make()
    twin, theirs = twin_of(network)
    for _ in range(100):
        step_both(optimiser, twin, theirs, [torch.randn_like(p) for p in network.parameters()])
    assert_alike(network, twin)


def test_trains_as_torch_does_with_a_scheduler_and_a_number_as_learning_rate():
    network, optimiser = make(betas=(0.8, 0.99), eps=1e-6)
    twin, theirs = twin_of(network, betas=(0.8, 0.99), eps=1e-6)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.3) for o in (optimiser, theirs)]
    for step in range(9):
        x = images()
        for net, opt, scheduler in zip((network, twin), (optimiser, theirs), schedulers, strict=True):
            opt.zero_grad()
            loss_of(net, x).backward()
            if step == 7:
                opt.param_groups[0]["lr"] = 0.05
            opt.step()
            scheduler.step()
        assert float(optimiser.param_groups[0]["lr"]) == pytest.approx(theirs.param_groups[0]["lr"])
    assert optimiser.param_groups[0]["lr"].dtype == torch.float32
    assert_alike(network, twin, 1e-5)


def test_construction_keeps_values_strides_and_starts_at_multiples_of_64():
    torch.manual_seed(3)
    network = Net().to(memory_format=torch.channels_last)
    wanted = [(p.detach().clone(), p.stride()) for p in network.parameters()]
    optimiser = FlatAdam(network.parameters(), shadow_dtype=torch.bfloat16)
    storages = {p.untyped_storage().data_ptr() for p in network.parameters()}
    assert len(storages) == 1
    for parameter, shadow, (values, strides) in zip(network.parameters(), optimiser.shadows, wanted, strict=True):
        assert torch.equal(parameter, values) and parameter.stride() == strides
        assert parameter.is_leaf and parameter.requires_grad
        assert parameter.storage_offset() % 64 == 0
        if shadow is not None:
            assert shadow.is_leaf and shadow.requires_grad and shadow.storage_offset() == parameter.storage_offset()
            assert shadow.shape == parameter.shape and shadow.stride() == strides
            assert torch.equal(shadow, values.to(torch.bfloat16))
    assert [s is None for s in optimiser.shadows] == [p.dim() < 2 for p in network.parameters()]
    assert all(
        leaf is (p if s is None else s)
        for leaf, s, p in zip(optimiser.leaves, optimiser.shadows, network.parameters(), strict=True)
    )


def test_a_step_through_the_shadows():
    network, optimiser = make(shadow_dtype=torch.bfloat16)
    before = [p.detach().clone() for p in network.parameters()]
    for _ in range(3):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(network, images(), optimiser.leaves).backward()
        assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in optimiser.leaves)
        optimiser.step()
    for parameter, old, shadow in zip(network.parameters(), before, optimiser.shadows, strict=True):
        assert not torch.equal(parameter, old)
        assert shadow is None or torch.equal(shadow, parameter.to(torch.bfloat16))
    optimiser.zero_grad(set_to_none=False)
    assert all((leaf.grad == 0).all() for leaf in optimiser.leaves)
    optimiser.zero_grad(set_to_none=True)
    assert all(leaf.grad is None for leaf in [*optimiser.leaves, *network.parameters()])


def test_the_gradients_of_shadows_are_those_of_the_weights():
    network, optimiser = make(shadow_dtype=torch.bfloat16)
    twin, theirs = twin_of(network)
    gradients = [torch.randn_like(p).to(torch.bfloat16).float() for p in twin.parameters()]
    for leaf, parameter, gradient in zip(optimiser.leaves, twin.parameters(), gradients, strict=True):
        leaf.grad = gradient.to(leaf.dtype)
        parameter.grad = gradient
    optimiser.step()
    theirs.step()
    assert_alike(network, twin)


def test_averages_start_as_the_weights_in_their_shape_and_memory_order():
    torch.manual_seed(3)
    network = Net().to(memory_format=torch.channels_last)
    optimiser = FlatAdam(network.parameters(), shadow_dtype=torch.bfloat16, average_rate=0.1)
    for parameter, shadow, average, leaf in zip(
        network.parameters(), optimiser.shadows, optimiser.averages, optimiser.average_leaves, strict=True
    ):
        assert torch.equal(average, parameter) and average.stride() == parameter.stride()
        assert average.data_ptr() != parameter.data_ptr() and not average.requires_grad and not leaf.requires_grad
        if shadow is None:
            assert leaf is average
        else:
            assert torch.equal(leaf, shadow) and leaf.stride() == shadow.stride() and leaf.dtype == shadow.dtype
            assert leaf.data_ptr() != shadow.data_ptr()
    plain = FlatAdam(Net().parameters(), average_rate=1.0)
    assert all(leaf is average for leaf, average in zip(plain.average_leaves, plain.averages, strict=True))
    without = FlatAdam(Net().parameters())
    assert without.averages == without.average_leaves == []


@pytest.mark.parametrize("shadow", [None, torch.bfloat16], ids=str)
def test_averages_follow_the_weights(shadow):
    network, optimiser = make(shadow_dtype=shadow, average_rate=0.2)
    other, without = make(shadow_dtype=shadow)
    other.load_state_dict(network.state_dict())
    wanted = [parameter.detach().double() for parameter in network.parameters()]
    for step in range(5):
        gradients = [torch.randn(p.shape) for p in network.parameters()]
        gradients[step] = None
        loss = torch.tensor(torch.inf if step == 2 else 1.0)
        for each in (optimiser, without):
            each.step(gradients, loss=loss)
            each.latch.fill_(False)
        for average, weight, gradient in zip(wanted, network.parameters(), gradients, strict=True):
            if gradient is not None and step != 2:
                average += 0.2 * (weight.detach().double() - average)
        for average, leaf, exact in zip(optimiser.averages, optimiser.average_leaves, wanted, strict=True):
            assert (average - exact).abs().max() <= 1e-6
            assert torch.equal(leaf, average.to(leaf.dtype))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))
    states = [each.state_dict()["state"] for each in (optimiser, without)]
    assert states[0].keys() == states[1].keys() and states[0][0].keys() == states[1][0].keys()


def test_averages_that_were_written_reach_their_copies():
    _, optimiser = make(shadow_dtype=torch.bfloat16, average_rate=0.2)
    for average in optimiser.averages:
        average.copy_(torch.randn(average.shape))
    optimiser.refresh_shadows()
    for average, leaf in zip(optimiser.averages, optimiser.average_leaves, strict=True):
        assert torch.equal(leaf, average.to(leaf.dtype))


@pytest.mark.parametrize("how", ["contiguous", "expanded", "transposed"])
def test_a_gradient_of_other_strides(how):
    network, optimiser = make()
    twin, theirs = twin_of(network)
    gradients = []
    for parameter in network.parameters():
        g = torch.randn(parameter.shape)
        if how == "expanded":
            g = torch.randn(parameter.shape[-1:]).expand(parameter.shape)
        elif how == "transposed" and g.dim() > 1:
            g = torch.randn(parameter.shape[::-1]).permute(*reversed(range(g.dim())))
        gradients.append(g)
    step_both(optimiser, twin, theirs, gradients)
    assert_alike(network, twin)


def test_parameters_without_gradient_are_skipped_and_have_no_state():
    network, optimiser = make()
    twin, theirs = twin_of(network)
    for step in range(4):
        x = images()
        for net, opt in ((network, optimiser), (twin, theirs)):
            opt.zero_grad()
            net[5].requires_grad_(step >= 2)
            loss_of(net, x).backward()
            opt.step()
        assert [p in optimiser.state for p in network.parameters()] == [p in theirs.state for p in twin.parameters()]
    ours = [float(optimiser.state[p]["step"]) for p in network.parameters()]
    assert ours == [float(theirs.state[p]["step"]) for p in twin.parameters()] == [4.0] * 4 + [2.0] * 2
    assert_alike(network, twin)


def test_states_go_from_torch_to_here_and_back():
    network, optimiser = make(shadow_dtype=torch.bfloat16)
    twin, theirs = twin_of(network, lr=3e-3)
    for parameter in twin.parameters():
        parameter.grad = torch.randn_like(parameter)
    theirs.step()
    addresses = [p.data_ptr() for p in network.parameters()]
    network.load_state_dict(twin.state_dict())
    optimiser.load_state_dict(theirs.state_dict())
    assert float(optimiser.param_groups[0]["lr"]) == pytest.approx(3e-3)
    assert [p.data_ptr() for p in network.parameters()] == addresses
    assert all(
        s is None or torch.equal(s, p.to(s.dtype)) for s, p in zip(optimiser.shadows, network.parameters(), strict=True)
    )
    for _ in range(3):
        step_both(optimiser, twin, theirs, [torch.randn_like(p) for p in network.parameters()])
    assert_alike(network, twin)

    state = copy.deepcopy(optimiser.state_dict())
    assert state["state"].keys() == theirs.state_dict()["state"].keys()
    assert all(
        state["state"][0][part].shape == theirs.state_dict()["state"][0][part].shape
        for part in ("step", "exp_avg", "exp_avg_sq")
    )
    twin.load_state_dict(network.state_dict())
    theirs = torch.optim.Adam(twin.parameters(), lr=1.0)
    theirs.load_state_dict(state)
    assert theirs.param_groups[0]["lr"] == pytest.approx(3e-3) and isinstance(theirs.param_groups[0]["lr"], float)
    for _ in range(3):
        step_both(optimiser, twin, theirs, [torch.randn_like(p) for p in network.parameters()])
    assert_alike(network, twin)


def test_resumes_bit_for_bit_through_a_checkpoint(tmp_path):
    gradients = [[torch.randn_like(p) for p in make()[0].parameters()] for _ in range(6)]
    network, optimiser = make(shadow_dtype=torch.bfloat16)
    for recorded in gradients[:3]:
        optimiser.step(recorded)
    tensors = {f"network/{name}": tensor for name, tensor in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        tensors |= {f"adam/{part}/{name}": value for part, value in optimiser.state[parameter].items()}
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, 3, tensors, {}))
    for recorded in gradients[3:]:
        optimiser.step(recorded)

    other, resumed = make(shadow_dtype=torch.bfloat16, lr=1e-2)
    resumed.step(gradients[5])  # something to be overwritten
    other.load_state_dict(
        {name.removeprefix("network/"): t for name, t in loaded.items() if name.startswith("network/")}
    )
    moments = {}
    for i, (name, _) in enumerate(other.named_parameters()):
        moments[i] = {part: loaded[f"adam/{part}/{name}"] for part in ("step", "exp_avg", "exp_avg_sq")}
    resumed.load_state_dict({"state": moments, "param_groups": resumed.state_dict()["param_groups"]})
    for recorded in gradients[3:]:
        resumed.step(recorded)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), other.parameters(), strict=True))
    assert all(a is b or torch.equal(a, b) for a, b in zip(optimiser.leaves, resumed.leaves, strict=True))


def test_loading_an_empty_state_starts_afresh():
    network, optimiser = make()
    start = copy.deepcopy(network.state_dict())
    fresh = copy.deepcopy(optimiser.state_dict())
    gradients = [torch.randn_like(p) for p in network.parameters()]
    optimiser.step(gradients)
    first = [p.detach().clone() for p in network.parameters()]
    optimiser.load_state_dict(fresh)
    network.load_state_dict(start)
    assert not optimiser.state
    optimiser.step(gradients)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), first, strict=True))


def test_weights_loaded_into_the_network_reach_the_shadows():
    network, optimiser = make(shadow_dtype=torch.bfloat16)
    addresses = [p.data_ptr() for p in network.parameters()]
    network.load_state_dict({name: torch.rand_like(t, dtype=torch.float32) for name, t in network.state_dict().items()})
    assert [p.data_ptr() for p in network.parameters()] == addresses
    optimiser.refresh_shadows()
    assert all(
        s is None or torch.equal(s, p.bfloat16()) for s, p in zip(optimiser.shadows, network.parameters(), strict=True)
    )


def test_the_latch():
    network, optimiser = make(shadow_dtype=torch.bfloat16)
    gradients = [torch.randn_like(p) for p in network.parameters()]
    optimiser.step(gradients, loss=torch.tensor(2.0, requires_grad=True))

    def now():
        return [*network.parameters(), *optimiser.leaves, *optimiser.state[next(network.parameters())].values()]

    kept = [x.detach().clone() for x in now()]
    optimiser.step(gradients, loss=torch.tensor(torch.nan))
    optimiser.step(gradients)
    assert optimiser.latch and all(torch.equal(a, b) for a, b in zip(kept, now(), strict=True))
    optimiser.latch.fill_(False)
    optimiser.step(gradients)
    assert not any(torch.equal(a, b) for a, b in zip(kept, now(), strict=True))


@pytest.mark.parametrize("shadow", [None, torch.bfloat16], ids=str)
def test_a_backward_pass_after_the_step_is_refused(shadow):
    _, optimiser = make(shadow_dtype=shadow)
    leaf = optimiser.leaves[0]
    y = (leaf * leaf).sum()
    optimiser.step([torch.ones(leaf.shape), *[None] * (len(optimiser.leaves) - 1)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("shadow", [None, torch.bfloat16], ids=str)
def test_a_backward_pass_through_an_average_after_the_step_is_refused(shadow):
    _, optimiser = make(shadow_dtype=shadow, average_rate=0.5)
    x = torch.ones(6, 3, 3, 3, requires_grad=True)
    y = (optimiser.average_leaves[0] * x).sum()
    optimiser.step([torch.ones(leaf.shape) for leaf in optimiser.leaves])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_network_that_was_moved_is_refused():
    network, optimiser = make()
    network[5].weight.data = network[5].weight.data.clone()
    with pytest.raises(RuntimeError, match="data was replaced"):
        optimiser.step([torch.zeros_like(p) for p in network.parameters()])


def test_the_whole_expert_network_trains_as_with_torch():
    torch.manual_seed(0)
    network = ExpertNetwork(5, width=4, experts=2).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(network)
    optimisers = FlatAdam(network.named_parameters(), lr=1e-3), torch.optim.Adam(twin.parameters(), lr=1e-3)
    x = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        losses = []
        for net, optimiser in zip((network, twin), optimisers, strict=True):
            optimiser.zero_grad()
            losses.append(F.cross_entropy(net(x).logits.flatten(0, 1), torch.arange(4).repeat(2)))
            losses[-1].backward()
            optimiser.step()
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    # A step of Adam turns the rounding of a tiny gradient into a whole lr: compare what the first
    # moments say.
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert ours.stride() == theirs.stride()
        if theirs in optimisers[1].state:
            torch.testing.assert_close(
                optimisers[0].state[ours]["exp_avg"], optimisers[1].state[theirs]["exp_avg"], rtol=1e-2, atol=1e-4
            )


def test_errors():
    network, optimiser = make()
    with pytest.raises(TypeError, match=r"parameter 0 has dtype torch\.float64"):
        FlatAdam([nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    with pytest.raises(TypeError, match=r"shadow_dtype is torch\.float32"):
        FlatAdam(network.parameters(), shadow_dtype=torch.float32)
    with pytest.raises(ValueError, match="lr is -1"):
        FlatAdam(network.parameters(), lr=-1)
    for rate in (0, -0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match=f"average_rate is {rate}; wanted above 0 and at most 1, or None"):
            FlatAdam(network.parameters(), average_rate=rate)
    with pytest.raises(ValueError, match="second group"):
        FlatAdam([{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(2))]}])
    with pytest.raises(ValueError, match="parameter 1 is on meta"):
        FlatAdam([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))])
    with pytest.raises(ValueError, match="empty parameter list"):
        FlatAdam([])
    with pytest.raises(ValueError, match="there are 1 gradients; wanted 6"):
        optimiser.step([None])
    with pytest.raises(ValueError, match=r"gradient 1 has shape \(7,\); wanted \(6,\)"):
        optimiser.step([None, torch.zeros(7), *[None] * 4])
    state = optimiser.state_dict()
    for switch in ("amsgrad", "maximize", "decoupled_weight_decay"):
        with pytest.raises(ValueError, match=f"{switch}=True"):
            optimiser.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], switch: True}]})
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters; wanted one group of 6"):
        optimiser.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]})
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(1,\)"):
        optimiser.load_state_dict(
            {**state, "state": {0: {"step": torch.zeros(()), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}}}
        )
