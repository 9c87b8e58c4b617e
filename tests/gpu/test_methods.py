"""Every method on a GPU: fused kernels against PyTorch's own, a state taken over, padded steps, an
interrupted run.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch

from mose_fast import _loader
from mose_fast.methods import METHODS, Learner, create_learner
from mose_fast.streams import from_arrays
from mose_fast.train import resume, run
from tests import mkd_twin
from tests.listeners import StopAt

DEVICE = _loader.gpu()

# Kernels serve channels in multiples of 8. Few images, since an emulated GPU is slow; the memory
# overflows in the third batch.
SMALL = {"width": 8, "memory": 8, "device": DEVICE or "cpu", "kernels": "fused", "feed": "fused", "step": "eager"}
OPTIONS = {
    "gdumb": {"passes": 1, "passes_before": 1},
    "mir": {"candidates": 8},
    "mose": {"new_extra": 2},
    "ocm": {"rotations": 4},
    "onpro": {"rotations": 4},
}
STEPS = 5
# Of small weight: teacher and student are so near that bf16's rounding is a share of what differs.
TAUGHT = {"teacher": "momentum", "teacher_rate": 0.3, "teacher_raw": True, "teacher_weight": 1.0}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """Float32 that is float32, and the same sums in two runs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def make(method: str, **settings) -> Learner:
    options = {"buffer_batch": 4, **OPTIONS.get(method, {}), **settings.pop("options", {})}
    return create_learner(method=method, classes=4, image_size=(8, 8), options=options, **SMALL | settings)


def observe(learner: Learner, step: int) -> list[float]:
    """The losses of a step on four images; the task of the first two steps is another one than that
    of the others.
    """
    task = int(step >= 2)
    y = torch.tensor([0, 1, 1, 0]) + 2 * task
    noise = torch.randint(0, 60, (4, 8, 8, 3), generator=torch.Generator().manual_seed(step))
    losses = learner.observe((noise + 40 * y.view(-1, 1, 1, 1)).to(torch.uint8), y, task)
    return [] if losses is None else [float(loss) for loss in losses.values()]


def some_images(count: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (count, 8, 8, 3), generator=torch.Generator().manual_seed(99), dtype=torch.uint8)


def apart(found, wanted) -> float:
    """The distance between two lists of tensors as parts of the second one's length."""
    found, wanted = (torch.cat([t.double().flatten() for t in tensors]) for tensors in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


def hand_over(giver: Learner, taker: Learner) -> None:
    """Gives a learner a copy of another one's state."""
    taker.load_state(tensors_of(giver), copy.deepcopy(giver.state()[1]))


def assert_alike(found: Learner, wanted: Learner, near: float) -> None:
    """Equal memories, near running statistics; gradients, as far as first moments tell them, of the
    same direction and length.

    These are compared less closely, since one of the few activations on the other side of 0 is a
    share of a percent.
    """
    a, b = (learner.state()[0] for learner in (found, wanted))
    for name in ("memory/images", "memory/labels"):
        assert torch.equal(a[name], b[name])
    for part, limit in (("running_mean", near), ("running_var", near), ("average/", near), ("adam/exp_avg/", 5e-2)):
        names = [name for name in b if part in name and b[name].any()]
        if names:
            assert apart([a[name] for name in names], [b[name] for name in names]) < limit, part


def tensors_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state()[0].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [*((method, {}) for method in METHODS), ("er", TAUGHT | {"predict_with": "mean"}), ("mose", TAUGHT)],
)
def test_each_of_five_steps_is_that_of_pytorch_and_repeats_from_a_state(method, options):
    """From equal states: losses, what the memory holds, moments, running statistics and moving
    averages of the weights.

    Scoring leaves no trace.
    """
    new = partial(make, method, options=options)
    plain, fused = new(kernels="torch"), new()
    for step in range(STEPS):
        hand_over(fused, plain)
        if step == STEPS - 1:
            successor = new()
            hand_over(fused, successor)
        wanted, found = observe(plain, step), observe(fused, step)
        assert found == pytest.approx(wanted, rel=1e-3)
        assert_alike(fused, plain, 1e-3)
    assert fused.network.kernels == "fused" and fused.memory.seen == 4 * STEPS > fused.memory.filled == 8

    assert observe(successor, STEPS - 1) == found
    a, b = tensors_of(fused), tensors_of(successor)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []

    # Nothing but a step changes the network.
    hand_over(fused, plain)
    x, y = some_images(4), torch.tensor([2, 3, 3, 2])
    fused.plan(x.to(DEVICE), y.to(DEVICE))
    fused.store(x.to(DEVICE), y.to(DEVICE), torch.arange(4, device=DEVICE))
    outputs = fused.outputs(x)
    after = fused.model.state()
    assert [name for name in after if not torch.equal(after[name], a[name])] == []
    assert apart(outputs, plain.outputs(x)) < 1e-3


@pytest.mark.parametrize(("from_equal_states", "of_losses", "near"), [(False, 1e-4, 1e-4), (True, 1e-5, 1e-6)])
def test_ten_steps_of_mkd_are_those_of_plain_pytorch(from_equal_states, of_losses, near):
    learner = make("er", preset="mkd", options={"eps": 1e-2})
    for found, wanted in mkd_twin.ten_steps(learner, 8, from_equal_states=from_equal_states):
        assert found.loss == pytest.approx(wanted.loss, rel=of_losses)
        assert mkd_twin.apart(found.weights, wanted.weights) < near
        assert mkd_twin.apart(found.teacher, wanted.teacher) < near


def test_gdumb_trains_alike_when_it_is_asked():
    plain, fused = make("gdumb", kernels="torch"), make("gdumb")
    for learner in (plain, fused):
        for step in range(STEPS):
            observe(learner, step)
        learner.prepare_evaluation()
    assert fused.steps == plain.steps > 0 and apart(fused.outputs(some_images()), plain.outputs(some_images())) < 5e-2


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("bf16", TAUGHT | {"teacher_rows": "buffer"}),
        ("bf16", {"logit_adjustment": 1.0, "view_chain": 0.8}),
    ],
)
def test_a_padded_step_of_mose_is_the_bare_one(precision, options):
    """In the first task, which has its own composition, and in the second; losses, gradients by the
    moments, statistics.
    """
    bare, padded = (make("mose", precision=precision, options={"experts": 2, **options}) for _ in range(2))
    kinds = []

    def padded_inputs(plan, stored=None):
        rows = padded.padded_rows(plan)
        assert rows > len(plan.images)
        kinds.append(plan.current_classes is None)
        return padded.step_inputs(plan, rows)

    padded.inputs = padded_inputs
    near = 1e-5 if precision == "fp32" else 1e-2
    for step in range(4):
        hand_over(bare, padded)
        found, wanted = observe(padded, step), observe(bare, step)
        assert found == pytest.approx(wanted, rel=near)
        assert_alike(padded, bare, 10 * near)
    assert kinds == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_ends_with_the_same_bits(precision, tmp_path):
    random = np.random.default_rng(0)
    y = np.arange(16) % 4
    x = (random.integers(0, 90, (16, 8, 8, 3)) + 50 * y[:, None, None, None]).astype(np.uint8)
    stream = from_arrays(x, y, x[:4], y[:4], tasks=2, batch=4)
    settings = SMALL | {"precision": precision, "checkpoint_every": 2, "deterministic": True}
    settings["options"] = {"buffer_batch": 4, "new_extra": 2, "experts": 2, "predict_with": "mean", **TAUGHT}
    whole = run(stream=stream, **settings)
    with pytest.raises(RuntimeError, match="broken off"):
        run(stream=stream, out=tmp_path, listeners=[StopAt(3, RuntimeError("broken off"))], **settings)
    resumed = resume(tmp_path, stream=stream)
    assert resumed["resumed"] == 1 and resumed["resolved"]["kernels"] == "fused"
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]
