"""MOSE as a learner: composition of its steps, training, prediction, state, bad input."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from mose_fast.methods import Mose, create_learner
from mose_fast.methods.mose import Composition, StepPlan
from mose_fast.nn import ClassMeans
from mose_fast.settings.run import ConfigError, RunConfig
from tests.paths import GOLDEN


def learner(classes: int = 10, size: int = 8, **settings) -> Mose:
    return create_learner(classes=classes, image_size=(size, size), **{"width": 2, "memory": 100} | settings)


def batch(labels, size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around a brightness that tells the class."""
    y = torch.as_tensor(labels)
    noise = torch.randint(0, 60, (len(y), size, size, 3), generator=torch.Generator().manual_seed(seed))
    return (noise + 19 * y.view(-1, 1, 1, 1)).to(torch.uint8), y


def plan_only(mose: Mose, x: torch.Tensor, y: torch.Tensor, task: int) -> StepPlan | None:
    """Feeds a batch as ``observe`` does, but only plans its step."""
    prepared = mose.prepare(x, y, task)
    mose.data.ahead = 0
    return prepared.steps[0].plan if prepared.steps else None


def composition(plan: StepPlan | None) -> tuple[Composition, int]:
    """Rows by origin, and images in the step with two fixed copies, doubled by augmentation."""
    return (Composition(10, 0, 0, 0), 0) if plan is None else (plan.composition, 4 * sum(plan.composition))


# Composition


def test_composition_equals_the_released_codes_trace():
    """tests/golden: 120 batches, every row count, the classes of the task and the classes in
    all.
    """
    with np.load(GOLDEN) as golden:
        trace, labels = golden["composition/trace"], golden["composition/labels"]
    mose = learner(100, memory=5000)
    for expected, y in zip(trace.tolist(), labels, strict=True):
        rows, images = composition(
            plan_only(mose, torch.zeros(10, 8, 8, 3, dtype=torch.uint8), torch.from_numpy(y), expected[0])
        )
        assert [*rows, images, len(mose.data.current), len(mose.seen)] == expected[2:]


def test_rows_come_from_where_the_plan_says():
    mose = learner(memory=200)
    for start in range(0, 60, 10):
        mose.observe(*batch([0, 1] * 5, seed=start), task=0, train=False)
    x, y = batch([2, 3] * 5, seed=99)
    plan = plan_only(mose, x, y, 1)
    assert plan.composition == (10, 0, 10, 28)  # 7 for each of the four classes seen
    assert torch.equal(plan.images[:10], x) and torch.equal(plan.images[10:20], x)
    assert set(plan.labels[20:].tolist()) <= {0, 1}
    assert plan.current_classes.nonzero().flatten().tolist() == [2, 3]
    plan = plan_only(mose, *batch([2, 3] * 5, seed=98), 1)
    assert plan.composition == (10, 10, 10, 28)
    assert set(plan.labels[10:20].tolist()) <= {2, 3}


def test_paper_preset_takes_64_rows_from_the_whole_memory():
    mose = learner(preset="paper", memory=200)
    mose.begin_task(0, [0, 1])
    plan = plan_only(mose, *batch([0] * 10), 0)
    assert plan.composition == (10, 0, 0, 0)
    assert plan.current_classes.nonzero().flatten().tolist() == [0, 1]
    for start in range(8):
        mose.observe(*batch([0, 1] * 5, seed=start), task=0, train=False)
    mose.begin_task(1, [2, 3])
    assert plan_only(mose, *batch([2] * 10), 1).composition == (10, 0, 0, 64)


def test_the_paper_preset_needs_the_tasks_classes():
    mose = learner(preset="paper")
    with pytest.raises(ConfigError, match="begin_task"):
        mose.observe(*batch([0] * 10), task=0)


def test_the_first_batch_of_the_stream_trains_nothing():
    mose = learner()
    before = mose.weights_hash()
    assert mose.observe(*batch(range(10)), task=0) is None
    assert mose.weights_hash() == before and mose.memory.seen == 10
    assert mose.observe(*batch(range(10)), task=0) is not None
    assert mose.weights_hash() != before and mose.steps == 1


def test_a_last_batch_smaller_than_the_copies():
    mose = learner()
    mose.observe(*batch([0, 1] * 5), task=0)
    mose.observe(*batch([2]), task=1)
    assert plan_only(mose, *batch([3, 2, 3]), 1).composition == (3, 1, 3, 10)


# Training


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"augment": "simclr", "inner_views": 4},
        {"augment": "scr", "jitter_domain": "normalised", "inner_views": 1},
        {"augment": "none", "inner_views": 16},
        {"experts": 1, "distillation": "off"},
        {"experts": 8, "student": 3},
        {"distillation": "sd", "cross_entropy": "last", "contrastive": "all"},
        {"cross_entropy": "off"},
        {"contrastive": "off", "separate_cross_entropy": False, "init": "default"},
        {"attention": False, "adapter": False, "rsd_reduction": "mean_of_norms"},
        {"first_task": "same", "new_extra": 0, "replay_from": "all", "incoming_copies": False, "per_class_cap": None},
        {"skip_first_batch": False, "buffer_batch": 8},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_every_switch_trains(options):
    # In bf16 or fp32, in turn.
    mose = learner(options=options, precision=("fp32", "bf16")[len(options) % 2])
    for task, labels in enumerate(([0, 1], [2, 3])):
        for step in range(3):
            losses = mose.observe(*batch(labels * 3, seed=step), task=task)
    assert all(value.isfinite() for value in losses.values())
    assert losses["loss"].item() == pytest.approx(sum(v.item() for k, v in losses.items() if k != "loss"), rel=1e-5)
    assert all(p.isfinite().all() for p in mose.network.parameters())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("before", [False, True])
def test_only_tf32_lets_convolutions_use_tf32(precision, before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    mose = learner(precision=precision)
    with mose.model.precise():
        assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (False, False)])
def test_sums_of_products_in_bf16_stay_in_float32(wanted):
    """And whether cuBLAS may split a sum is left as it was."""
    matmul = torch.backends.cuda.matmul

    def now():
        return (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k)

    before = now()
    try:
        matmul.allow_bf16_reduced_precision_reduction = wanted
        with learner(precision="bf16").model.precise():
            assert now() == (False, wanted[1])
        assert now() == wanted
    finally:  # monkeypatch cannot put it back: the object does not hold it
        matmul.allow_bf16_reduced_precision_reduction = before


def test_only_the_first_epoch_fills_the_memory():
    mose = learner()
    mose.observe(*batch([0, 1] * 5), task=0)
    mose.observe(*batch([0, 1] * 5), task=0, store=False)
    assert mose.memory.seen == 10 and mose.steps == 1


# Prediction


def test_ncm_never_predicts_an_unseen_class():
    mose = learner(width=2)
    for step in range(4):
        mose.observe(*batch([3, 7] * 5, seed=step), task=0)
    x, _ = batch(list(range(10)) * 10, seed=5)
    for expert in ("1", "2", "3", "4", "mean"):
        assert set(mose.predict(x, "ncm", expert).tolist()) <= {3, 7}


def test_a_class_without_samples_is_never_predicted_and_said_once():
    mose = learner()
    for start in range(5):
        mose.observe(*batch(list(range(10)), seed=start), task=0, train=False)
    stored = mose.memory.labels
    stored[stored == 4] = 5
    x, _ = batch([4] * 20)
    with pytest.warns(UserWarning, match=r"1 of 10 classes .* \(4\)"):
        assert 4 not in mose.predict(x).tolist()
    mose.observe(*batch([0] * 10), task=0, train=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mose.predict(x)


def test_prediction_follows_what_was_observed_since():
    mose = learner()
    mose.observe(*batch([0] * 10), task=0)
    x, _ = batch([9] * 5)
    assert set(mose.predict(x).tolist()) == {0}
    mose.observe(*batch([9] * 10), task=1)
    assert set(mose.predict(x).tolist()) == {9}


def test_prediction_in_parts_of_one_image_equals_one_batch():
    mose, single = learner(), learner(evaluation_batch=1)
    for step in range(3):
        mose.observe(*batch([0, 1, 2] * 3, seed=step), task=0)
    single.load_state(*mose.state())
    x, _ = batch([0, 1, 2] * 5, seed=77)
    assert torch.equal(mose.predict(x), single.predict(x))
    assert mose.predict(x[:0]).shape == (0,)


def test_names_of_classifiers_and_experts():
    mose = learner()
    assert mose.resolve_expert() == ("ncm", "4")
    assert mose.resolve_expert("linear") == ("linear", "4")
    assert mose.resolve_expert("linear", "mean") == ("linear", "mean_logit")
    assert learner(options={"expert": "mean"}).resolve_expert() == ("ncm", "mean_distance")
    mean_paper = create_learner(
        classes=4, image_size=(8, 8), preset="paper", width=2, memory=100, options={"expert": "mean"}
    )
    assert mean_paper.resolve_expert() == ("linear", "mean_logit")
    assert mose.resolve_expert("lda", "mean") == ("lda", "mean_score")
    assert mose.resolve_expert("ridge", "all") == ("ridge", "all")
    assert learner(options={"expert": "mean", "classifier": "lda"}).resolve_expert() == ("lda", "mean_score")
    with pytest.raises(ValueError, match="did you mean 'linear'"):
        mose.resolve_expert("linaer")
    with pytest.raises(ValueError, match="'all' for classifier 'adjusted'; known: last, mean, 1, 2, 3, 4, mean_score"):
        mose.resolve_expert("adjusted", "all")
    with pytest.raises(ConfigError, match=r"options\.expert is 'all' with options\.classifier 'linear'"):
        learner(options={"expert": "all", "classifier": "linear"})
    with pytest.raises(ValueError, match="expert is '5'"):
        mose.resolve_expert("ncm", 5)


def test_mirrors_are_averaged_before_features_are_normalised():
    x, y = batch([0, 1, 2] * 4)
    usual, mirrored = learner(), learner(options={"test_mirror": True})
    for mose in (usual, mirrored):
        mose.observe(x, y, task=0)
        mose.observe(x, y, task=0)
    assert usual.weights_hash() == mirrored.weights_hash(), "training knows no mirrors"
    (features, logits), (others, their_logits) = usual.outputs(x), usual.outputs(x.flip(2))
    stored = usual.outputs(usual.memory.images[:24])[0] + usual.outputs(usual.memory.images[:24].flip(2))[0]
    means = ClassMeans(stored, usual.memory.labels[:24], usual.classes)
    torch.testing.assert_close(mirrored.scores(x, "linear"), ((logits + their_logits) / 2)[-1])
    torch.testing.assert_close(mirrored.scores(x, "ncm"), means.scores(features + others)[-1], rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="test_mirror is True, but mirroring changes the labels"):
        learner(options={"test_mirror": True, "mirror": "off"})


# State


def test_a_foreign_state_is_refused():
    tensors, values = learner(width=2).state()
    with pytest.raises(ValueError, match="another network"):
        learner(width=4).load_state(tensors, values)
    with pytest.raises(ValueError, match="memory"):
        learner(width=2, memory=120).load_state(tensors, values)


# Bad input


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.rand(2, 8, 8, 3), [0, 1], "float32; wanted raw images in uint8"),
        (torch.full((2, 8, 8, 3), float("nan")), [0, 1], "holds NaN"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [0, 1], "channels come last"),
        (torch.zeros(2, 8, 8, 1, dtype=torch.uint8), [0, 1], r"\[2, 8, 8, 1\]"),
        (torch.zeros(2, 16, 16, 3, dtype=torch.uint8), [0, 1], r"wanted \[N, 8, 8, 3\]"),
        (torch.zeros(0, 8, 8, 3, dtype=torch.uint8), [], "empty batch"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), [0], r"wanted \[2\]"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), [0, 10], "y holds 10; wanted labels of 0 to 9"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), [-1, 0], "y holds -1"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), [0.5, 1.0], "wanted integers"),
        (np.ma.masked_less(np.zeros((2, 8, 8, 3), np.uint8), 1), [0, 1], "x is a masked array; wanted a plain one"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), np.ma.array([0, 1], mask=[0, 1]), "y is a masked array"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(x, y, message):
    mose = learner()
    mose.observe(*batch([0, 1] * 5), task=0)
    tensors, values = mose.state()
    before = {name: t.clone() for name, t in tensors.items()}, dict(values)
    with pytest.raises(ValueError, match=message):
        mose.observe(x, y, task=1)
    after, values = mose.state()
    assert values == before[1] and all(torch.equal(after[name], t) for name, t in before[0].items())


def test_numpy_batches_are_taken():
    mose = learner()
    x, y = batch([0, 1] * 5)
    mose.observe(x.numpy(), y.numpy().astype(np.int32), task=0)
    assert mose.predict(x.numpy()).shape == (10,)


def test_unusable_settings():
    with pytest.raises(ConfigError, match=r"method is 'moes'.*'mose'"):
        create_learner(classes=3, method="moes", memory=100)
    with pytest.raises(ConfigError, match="classes is 1"):
        learner(1)
    with pytest.raises(ValueError, match="28x28"):
        learner(size=28)
    with pytest.raises(ConfigError, match="width"):
        create_learner(RunConfig(), classes=3, width=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"GPU.*or cpu"):
        learner(device="cuda")
