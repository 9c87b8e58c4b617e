"""Plan and step apart: batches planned ahead, undone, padded; steps that change nothing once a loss
is not finite.
"""

from __future__ import annotations

import copy
import io
import math
from itertools import cycle

import pytest
import torch

from mose_fast import _loader
from mose_fast.learner.latch import gathered_statistics, undone_if
from mose_fast.methods import METHODS, Planning, create_learner
from mose_fast.settings.run import ConfigError
from tests.unit.methods.by_hand import bits

AHEAD = 4
OPTIONS = [
    {},
    {"augment": "simclr", "inner_views": 4},
    {"first_task": "same", "new_extra": 0, "replay_from": "all", "incoming_copies": False, "per_class_cap": None},
    {"skip_first_batch": False, "separate_cross_entropy": False},
    {"iterations": 3},
]
with_options = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "released"
)


@pytest.fixture
def stream(batch):
    """Three tasks of six batches: labels, and the last batch of a task smaller."""
    sizes = (10, 10, 10, 10, 10, 3)
    return [
        (*batch(([2 * task, 2 * task + 1] * 5)[:size], seed=100 * task + step), task)
        for task in range(3)
        for step, size in enumerate(sizes)
    ]


def parts(value) -> list:
    """Everything in a plan or in a step's inputs, flat."""
    return [leaf for part in value for leaf in parts(part)] if isinstance(value, tuple) else [value]


def same(a, b) -> bool:
    pairs = zip(parts(a), parts(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize(
    ("function", "look"),
    [
        ("retrieve", lambda learner: learner.outputs(learner.memory.images)),
        ("store", lambda learner: learner.network.eval()),
        ("extras", lambda learner: learner.model.latch),
    ],
)
def test_a_plan_that_looks_at_the_model_is_refused(make, stream, function, look):
    """Ahead of earlier steps it would see another model than in lockstep."""
    learner = make("er")
    learner.observe(*stream[0])
    given = getattr(learner, function)
    setattr(learner, function, lambda *how: (look(learner), given(*how))[1])
    with pytest.raises(RuntimeError, match=r"method 'er' looks at its model .* wanted planning = Planning\.LOOKS_AT"):
        learner.prepare(*stream[1])
    learner.planning = Planning.LOOKS_AT_MODEL
    assert learner.observe(*stream[1])["loss"].isfinite()


@pytest.mark.slow
@with_options
def test_preparing_ahead_and_consuming_equals_observing(make, stream, options):
    observing, ahead = make("mose", options=options), make("mose", options=options)
    losses = [observing.observe(*b) for b in stream]
    waiting, found = [], []
    for b in stream:
        waiting.append(ahead.prepare(*b))
        if len(waiting) > AHEAD:
            found.append(waiting.pop(0).take())
    found += [prepared.take() for prepared in waiting]
    assert bits(ahead) == bits(observing)
    assert found == losses


@pytest.mark.slow
@pytest.mark.parametrize(("name", "iterations"), zip(sorted(METHODS), cycle([1, 2]), strict=False))
def test_preparing_and_consuming_equals_observing_for_every_method(make, stream, name, iterations):
    options = {"passes": 2, "passes_before": 1} if name == "gdumb" else {"iterations": iterations}
    observing, apart = make(name, options=options), make(name, options=options)
    for b in stream[4:9]:
        observing.observe(*b)
        apart.prepare(*b).take()
    slots = torch.arange(8)
    observing.rehearse(slots)
    apart.prepare_rehearsal(slots).take()
    assert bits(apart) == bits(observing)
    if name != "gdumb":
        skipped = name in ("mose", "scr")  # the first batch, while the memory is empty
        assert apart.steps == iterations * (5 - skipped) + 1 and apart.memory.seen == 43


@pytest.mark.slow
@with_options
def test_what_was_planned_can_be_undone(make, stream, options):
    learner = make("mose", options=options)
    for b in stream[:7]:
        learner.observe(*b)
    before = bits(learner)
    # Task 1 to task 2, so that tasks and classes are undone as well.
    for first, last in ((7, 9), (7, 15), (7, 18)):
        waiting = [learner.prepare(*b) for b in stream[first:last]]
        assert bits(learner) != before and learner.data.sequence > learner.steps
        assert all([prepared.undo() for prepared in reversed(waiting)])
        assert bits(learner) == before and learner.data.sequence == learner.steps
    twin = make("mose", options=options)
    twin.load_state(*learner.state())
    for one in (learner, twin):
        for b in stream[7:]:
            one.observe(*b)
    assert bits(learner) == bits(twin)


def test_a_plan_survives_what_later_plans_do_to_the_memory(make, stream):
    learner = make("mose", memory=12)
    prepared = [learner.prepare(*b) for b in stream[:4]]
    plans = [
        tuple(part.clone() if isinstance(part, torch.Tensor) else part for part in parts(p.steps[0].plan))
        for p in prepared[1:]
    ]
    for b in stream[4:]:
        learner.prepare(*b)
    assert all(same(tuple(parts(p.steps[0].plan)), kept) for p, kept in zip(prepared[1:], plans, strict=True))


# A loss that is not finite


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"), [("mose", "fused"), *((name, "torch") for name in sorted(set(METHODS) - {"gdumb"}))]
)
def test_a_loss_that_is_not_finite_changes_nothing_and_can_be_undone(make, stream, name, kernels):
    learner = make(name, kernels=kernels, width=8 if kernels == "fused" else 1)
    for b in stream[4:9]:
        learner.observe(*b)
    assert not learner.diverged
    before = bits(learner)
    normalise = learner.views.normalise
    learner.views.apply = lambda images, inputs: torch.full((len(inputs.shown), 3, *images.shape[1:3]), math.nan)
    learner.views.augmented = lambda images, seed, sequence: torch.full((len(images), 3, *images.shape[1:3]), math.nan)
    learner.views.normalise = lambda images: normalise(images) * math.nan
    prepared = learner.prepare(*stream[9])
    losses = prepared.take()
    assert not losses["loss"].isfinite() and learner.diverged
    # A-GEM, DER++ and others draw before the step; weights, moments and statistics have not moved.
    after = bits(learner)
    assert all(after[key] == value for key, value in before.items() if key.startswith(("network/", "adam/")))
    assert prepared.undo()
    assert bits(learner) == before


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_batch_of_two_steps_whose_second_is_not_finite_cannot_be_undone(make, stream, monkeypatch, bad, late):
    """Also where the host does not ask for losses between steps, as on a GPU."""
    monkeypatch.setattr(METHODS["er"], "reads_losses_late", late)
    learner = make("er", options={"iterations": 2}, kernels="fused", width=8)
    for b in stream[4:9]:
        learner.observe(*b)
    before = bits(learner)
    prepared = learner.prepare(*stream[9])
    prepared.steps[bad].inputs.views.fill_(math.nan)
    assert not prepared.take()["loss"].isfinite() and learner.diverged
    assert prepared.undo() == (bad == 0)
    assert (bits(learner) == before) == (bad == 0)


def test_after_it_nothing_is_learned_and_every_loss_says_so(make, stream):
    learner = make("mose")
    for b in stream[:4]:
        learner.observe(*b)
    apply = learner.views.apply
    learner.views.apply = lambda images, inputs: apply(images, inputs) * math.nan
    assert not learner.observe(*stream[4])["loss"].isfinite()
    learner.views.apply = apply
    weights, steps = learner.weights_hash(), learner.steps
    assert learner.observe(*stream[5])["loss"].isnan()
    assert learner.weights_hash() == weights and learner.steps == steps
    # A state that is loaded is a new start.
    learner.load_state(*learner.state())
    assert learner.observe(*stream[6])["loss"].isfinite() and not learner.diverged


def test_running_statistics_lie_together_and_count_their_changes_apart(make):
    learner = make("mose", width=8)
    module = next(m for m in learner.network.modules() if hasattr(m, "running_mean"))
    others = [b for b in learner.network.buffers() if b is not module.running_mean]
    versions = [b._version for b in others]
    module.running_mean.add_(1)
    assert [b._version for b in others] == versions
    latch = torch.tensor(False)
    for wanted in (False, True):
        kept = {name: b.clone() for name, b in learner.network.named_buffers()}
        with undone_if(latch, [learner.model.latch.statistics]):
            for buffer in learner.network.buffers():
                buffer.add_(1)
            latch.fill_(wanted)
        assert all(torch.equal(b, kept[name] + (not wanted)) for name, b in learner.network.named_buffers())


def test_statistics_keep_their_values_when_they_are_gathered():
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(70))
    for buffer in network.buffers():
        buffer.add_(torch.arange(buffer.numel()).view(buffer.shape))
    kept = [b.clone() for b in network.buffers()]
    memory = gathered_statistics(network)
    assert all(map(torch.equal, network.buffers(), kept))
    start = memory.data_ptr()
    assert {(b.data_ptr() - start) % 256 for b in network.buffers()} == {0}
    assert all(0 <= b.data_ptr() - start < 8 * len(memory) for b in network.buffers())


def test_a_network_with_gathered_statistics_can_be_compiled_and_saved():
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3))
    plain, images = copy.deepcopy(network), torch.randn(2, 3, 8, 8)
    statistics = gathered_statistics(network)
    network.compile(dynamic=False, backend="aot_eager")
    for _ in range(2):
        network(images).sum().backward()
        plain(images).sum().backward()
    wanted = plain.state_dict()
    assert all(torch.allclose(t, wanted[name], atol=1e-6) for name, t in network.state_dict().items())
    assert network[0].num_batches_tracked == 2
    kept = [b.clone() for b in network.buffers()]
    with undone_if(torch.tensor(True), [statistics]):
        network(images)
    assert all(map(torch.equal, network.buffers(), kept))
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    assert all(torch.equal(t, network.state_dict()[name]) for name, t in torch.load(file).items())


# Padding


@pytest.mark.parametrize("options", [{}, {"augment": "none"}, {"augment": "scr", "inner_views": 4}], ids=str)
def test_padded_views_are_the_same_and_zero_behind(make, stream, options):
    learner = make("mose", options=options)
    prepared = [learner.prepare(*b) for b in stream]
    for plan in [step.plan for p in prepared for step in p.steps][:10]:
        bare, padded = learner.step_inputs(plan), learner.step_inputs(plan, 40)
        views = learner.views.apply(bare.images, bare.views)
        more = learner.views.apply(padded.images, padded.views)
        assert len(more) == 40 * learner.views.views_per_row == len(padded.targets.labels)
        assert torch.equal(more[: len(views)], views) and not more[len(views) :].any()
        assert torch.equal(padded.targets.labels[: len(views)], bare.targets.labels)
        assert int(padded.targets.valid_views) == len(views)
        assert int(padded.targets.new_views) == bare.targets.new_views
        made = learner.step_inputs(plan, 40, ready=True)
        assert torch.equal(made.views, more)


@pytest.mark.skipif(_loader.native is None, reason="there is no native library")
def test_views_have_the_dtype_of_the_copies_of_the_weights(make, stream):
    rounded, exact = (make("mose", kernels="fused", precision=precision) for precision in ("bf16", "fp32"))
    prepared = [[learner.prepare(*b) for b in stream[:2]][1] for learner in (rounded, exact)]
    inputs = [learner.step_inputs(p.steps[0].plan) for learner, p in zip((rounded, exact), prepared, strict=True)]
    views = [learner.views.apply(i.images, i.views) for learner, i in zip((rounded, exact), inputs, strict=True)]
    assert rounded.shadowed and torch.equal(views[0], views[1].to(torch.bfloat16))


def in_float64(learner, inputs) -> tuple[torch.Tensor, dict, dict]:
    """Losses, gradients and running statistics of a step's forward and backward pass by the
    learner's network in float64.
    """
    network = copy.deepcopy(learner.network).double().train()
    targets = inputs.targets
    padded = {} if targets.valid_views is None else {"valid_rows": targets.valid_views}
    views = learner.views.apply(inputs.images, inputs.views).double().contiguous(memory_format=torch.channels_last)
    outputs = network(views, learner.config.options.distillation == "sd", **padded)
    terms = learner.losses(outputs, *targets)
    terms.sum().backward()
    return terms.detach(), {name: p.grad for name, p in network.named_parameters()}, dict(network.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"distillation": "sd"}, {"rsd_reduction": "mean_of_norms", "separate_cross_entropy": False}],
    ids=str,
)
def test_a_padded_step_is_the_unpadded_step(make, stream, options):
    settings = {"width": 8, "kernels": "fused", "options": options}
    bare, padded = make("mose", **settings), make("mose", **settings)
    short = 0
    for b in stream[:12]:
        prepared = bare.prepare(*b)
        if not prepared.steps:
            continue
        plan = prepared.steps[0].plan
        rows = padded.padded_rows(plan)
        assert rows >= len(plan.images)
        short += rows > len(plan.images)
        # Adam makes much of little where gradients vanish, so each step starts from the same
        # weights.
        padded.load_state(*bare.state())
        without, behind = bare.step_inputs(plan), padded.step_inputs(plan, rows)
        if len(plan.images) < rows:
            for wanted, found in zip(in_float64(bare, without), in_float64(padded, behind), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        # In float32, of which the order of sums leaves less.
        torch.testing.assert_close(padded.train_on(behind), bare.train_on(without), rtol=2e-6, atol=2e-6)
        for ours, theirs in zip(padded.network.buffers(), bare.network.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert short >= 3


def test_what_cannot_be_padded_is_not(make, stream):
    learner = make("mose")
    plans = [step.plan for b in stream for step in learner.prepare(*b).steps]
    assert learner.kernels == "torch" and {learner.padded_rows(plan) for plan in plans} == {None}
    fused = make("mose", kernels="fused", width=8)
    o, batch = fused.config.options, fused.config.stream.batch
    assert {fused.padded_rows(plan) for plan in plans} == {batch + o.buffer_batch, batch + o.buffer_batch + o.new_extra}
    assert fused.padded_rows(plans[0]._replace(images=plans[0].images.new_zeros(999, 8, 8, 3))) is None


# What a step is


@pytest.mark.parametrize(("name", "step"), [("mose", "captured"), ("mir", "captured")])
def test_a_captured_step_is_refused_where_there_is_no_gpu(name, step):
    with pytest.raises(
        ConfigError, match=r"step is 'captured', but the device is cpu.*; wanted step 'auto' or 'eager'"
    ):
        create_learner(classes=4, method=name, step=step, memory=100, device="cpu", image_size=(8, 8), width=1)


def test_on_the_cpu_steps_are_eager(make):
    assert str(make("mose").stepping) == str(make("mir", step="eager").stepping) == "eager"
    with pytest.raises(ConfigError, match="step is 'graph'; wanted one of 'auto', 'captured', 'eager'"):
        make("mose", step="graph")
