"""Evaluation in one pass, against a loop over single images."""

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mose_fast.evaluate import evaluate_learner
from mose_fast.learner.model import Model, padded_size
from mose_fast.methods import create_learner
from mose_fast.streams import from_arrays

CLASSES, TASKS = 6, 3


@pytest.fixture
def stream():
    """Three tasks of two classes; classes differ in brightness, so that a few steps learn
    something.
    """
    random = np.random.default_rng(0)
    parts = []
    for per_class in (10, 11):
        y = random.permutation(np.repeat(np.arange(CLASSES), per_class))
        x = random.integers(0, 120, (len(y), 16, 16, 3)) + 22 * y[:, None, None, None]
        parts += [x.astype(np.uint8), y]
    return from_arrays(*parts, tasks=TASKS)


def trained(stream, tasks=TASKS, **settings):
    settings = {
        "memory": 40,
        "width": 2,
        "evaluation_batch": 16,
        "device": "cpu",
        "options": {"buffer_batch": 8},
        **settings,
    }
    learner = create_learner(classes=stream.classes, image_size=stream.image_size, **settings)
    for task in range(tasks):
        for rows in stream.batches(task, seed=0):
            learner.observe(stream.x_train[rows], stream.y_train[rows], task)
    return learner


def slow_outputs(learner, image):
    """Features [E, D] and logits [E, K] of one image [H, W, 3]."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (learner.mean, learner.std))
    x = (image.permute(2, 0, 1).float() / 255 - mean) / std
    with torch.no_grad():
        features = learner.network.eval().features(x[None])
        return features[:, 0], learner.network.classify(features)[:, 0]


def slow_prototypes(learner):
    """[expert][class] -> prototype, or None, from sums over the memory's single images."""
    memory = learner.memory
    features = [slow_outputs(learner, memory.images[s])[0] for s in range(memory.filled)]
    prototypes = []
    for e in range(4):
        prototypes.append([])
        for label in range(learner.classes):
            samples = [F.normalize(features[s][e], dim=0) for s in range(memory.filled) if memory.labels[s] == label]
            prototypes[e].append(F.normalize(sum(samples) / len(samples), dim=0) if samples else None)
    return prototypes


def slow_predictions(learner, prototypes, image):
    """Labels by classifier and expert for one image."""
    features, logits = slow_outputs(learner, image)
    distances = torch.full((4, learner.classes), float("inf"), dtype=torch.float64)
    for e in range(4):
        for label, prototype in enumerate(prototypes[e]):
            if prototype is not None:
                distances[e, label] = ((F.normalize(features[e], dim=0) - prototype).double() ** 2).sum()
    ncm = {str(e + 1): int(distances[e].argmin()) for e in range(4)} | {
        "mean_distance": int(distances.mean(0).argmin())
    }
    linear = {str(e + 1): int(logits[e].argmax()) for e in range(4)} | {"mean_logit": int(logits.mean(0).argmax())}
    return {"ncm": ncm, "linear": linear}


def slow_accuracy(learner, images, labels, tasks, seen):
    """[classifier][expert] -> accuracy of each task 0 ... seen, None where there are no images;
    counts by task and by class.
    """
    right, prototypes = {}, slow_prototypes(learner)
    classifier_of_predict, expert_of_predict = learner.resolve_expert()
    confusion = [[0] * TASKS for _ in range(seen + 1)]
    by_class = [Counter() for _ in range(learner.classes)]
    for image, label, task in zip(images, labels.tolist(), tasks.tolist(), strict=True):
        for classifier, experts in slow_predictions(learner, prototypes, image).items():
            for expert, predicted in experts.items():
                right.setdefault(classifier, {}).setdefault(expert, [[] for _ in range(seen + 1)])[task].append(
                    predicted == label
                )
                if (classifier, expert) == (classifier_of_predict, expert_of_predict):
                    confusion[task][predicted // 2] += 1
                    by_class[label][str(predicted)] += 1
    accuracy = {
        c: {e: [sum(r) / len(r) if r else None for r in rows] for e, rows in experts.items()}
        for c, experts in right.items()
    }
    return accuracy, confusion, by_class


@pytest.mark.slow
@pytest.mark.parametrize(("seen", "classifier"), [(0, "ncm"), (2, "ncm"), (2, "linear")])
def test_equals_a_loop_over_single_images(stream, seen, classifier):
    learner = trained(stream, tasks=seen + 1, options={"buffer_batch": 8, "classifier": classifier})
    accuracy = evaluate_learner(learner, stream, seen)
    filled = learner.memory.filled
    rows = torch.isin(stream.y_test, torch.arange(2 * (seen + 1))).nonzero().flatten()
    test, confusion, by_class = slow_accuracy(
        learner, stream.x_test[rows], stream.y_test[rows], stream.y_test[rows] // 2, seen
    )
    buffer, *_ = slow_accuracy(
        learner, learner.memory.images[:filled], learner.memory.labels[:filled], learner.memory.tasks[:filled], seen
    )
    assert accuracy.test == test
    assert accuracy.buffer == buffer
    assert accuracy.confusion == confusion
    assert accuracy.confusion_by_class == by_class
    assert set(test["ncm"]) == {"1", "2", "3", "4", "mean_distance"}
    assert set(test["linear"]) == {"1", "2", "3", "4", "mean_logit"}
    # The comparison would be empty if every classifier did the same.
    assert len({tuple(row) for row in test["ncm"].values()}) > 1


def test_every_classifier_takes_one_pass(stream, monkeypatch):
    """Images that pass the network: the memory's and those of the tasks; mirrors once more."""
    options = {"buffer_batch": 8}
    usual = trained(stream, tasks=2)
    every = trained(stream, tasks=2, classifiers="all")
    mirrored = trained(stream, tasks=2, options={**options, "classifier": "lda", "expert": "all", "test_mirror": True})
    passed = Counter()
    forward = Model.outputs

    def counted(model, x, *how):
        passed[model] += len(x)
        return forward(model, x, *how)

    monkeypatch.setattr(Model, "outputs", counted)
    found = [evaluate_learner(learner, stream, 1) for learner in (usual, every, mirrored)]
    images = usual.memory.filled + 4 * 11
    assert [passed[learner.model] for learner in (usual, every, mirrored)] == [images, images, 2 * images]
    assert [*found[0].test] == ["ncm", "linear"] and [*found[2].test] == ["ncm", "linear", "lda"]
    assert {name: [*rows] for name, rows in found[1].test.items()} == every.evaluated()
    assert [*found[1].test["lda"]] == ["1", "2", "3", "4", "mean_score", "all"]
    assert [*found[1].test["adjusted"]] == ["1", "2", "3", "4", "mean_score"]
    assert [*found[2].test["ncm"]] == ["1", "2", "3", "4", "mean_distance", "all"]
    for kind in ("test", "buffer"):
        usually, all_of_them = getattr(found[0], kind), getattr(found[1], kind)
        for name, rows in usually.items():
            assert {expert: all_of_them[name][expert] for expert in rows} == rows
    assert sum(found[2].confusion[0]) == 22
    monkeypatch.undo()
    # The memory's outputs that served are those of predict().
    right = every.predict(stream.x_test, "lda_adjusted", "all") == stream.y_test
    rows = [stream.test_rows(task) for task in range(2)]
    assert found[1].test["lda_adjusted"]["all"] == [float(right[r].double().mean()) for r in rows]


@pytest.mark.slow
def test_batch_size_does_not_matter(stream):
    """66 test images: 13 leaves a last batch of one image."""
    expected = evaluate_learner(trained(stream), stream, TASKS - 1)
    for evaluation_batch in (13, 1000):
        assert evaluate_learner(trained(stream, evaluation_batch=evaluation_batch), stream, TASKS - 1) == expected


def test_earlier_tasks_alone(stream):
    learner = trained(stream)
    everything, earlier = (evaluate_learner(learner, stream, task) for task in (TASKS - 1, 0))
    assert earlier.confusion == everything.confusion[:1]
    for whole, part in ((everything.test, earlier.test), (everything.buffer, earlier.buffer)):
        assert part == {c: {e: row[:1] for e, row in experts.items()} for c, experts in whole.items()}


def test_each_image_passes_the_network_once(stream):
    learner = trained(stream)
    passed = []
    learner.network.stem.register_forward_hook(lambda module, inputs, output: passed.append(inputs[0].detach().clone()))
    evaluate_learner(learner, stream, 1)
    wanted = torch.cat([learner.memory.images[: learner.memory.filled], stream.x_test[stream.y_test < 4]])
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (learner.mean, learner.std))
    seen = (torch.cat(passed) * std + mean).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1)
    # Black images are padding: 40 stored ones make two parts of 16 and one of 8, 44 test images two
    # and one of 16 with 4 black ones.
    black = torch.zeros(4, *seen.shape[1:], dtype=torch.uint8)
    assert sorted(i.numpy().tobytes() for i in seen) == sorted(i.numpy().tobytes() for i in torch.cat([wanted, black]))


def test_evaluation_changes_nothing(stream):
    learner = trained(stream)
    tensors, values = learner.state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}, dict(values)
    first = evaluate_learner(learner, stream, TASKS - 1)
    assert evaluate_learner(learner, stream, TASKS - 1) == first
    tensors, values = learner.state()
    assert values == before[1]
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in tensors.items())


def test_class_without_memory_samples_is_never_predicted_and_warns_once(stream):
    learner = trained(stream)
    memory = learner.memory
    predicted = torch.stack([learner.predict(stream.x_test, "ncm", e) for e in (1, 2, 3, 4, "mean")])
    assert (predicted == 3).any()
    # Class 3 loses its samples to class 2, of the same task, and task 0 loses all of its to task 1.
    memory.labels[memory.labels == 3] = 2
    memory.labels[memory.labels < 2] = 2
    memory.tasks[memory.tasks == 0] = 1
    learner.load_state(*learner.state())
    with pytest.warns(UserWarning, match=r"3 of 6 classes seen have no sample in the memory of 40 \(0, 1, 3\)") as told:
        accuracy = evaluate_learner(learner, stream, TASKS - 1)
    assert len(told) == 1
    predicted = torch.stack([learner.predict(stream.x_test, "ncm", e) for e in (1, 2, 3, 4, "mean")])
    assert not torch.isin(predicted, torch.tensor([0, 1, 3])).any()
    assert all(row[0] == 0 for row in accuracy.test["ncm"].values())
    assert all(
        row[0] is None and row[1] is not None for experts in accuracy.buffer.values() for row in experts.values()
    )
    learner.load_state(*learner.state())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate_learner(learner, stream, TASKS - 1) == accuracy


# Batch sizes


def test_evaluations_of_a_run_meet_few_batch_sizes(stream):
    """A GPU looks for convolution plans at each new one; memory and test images have another last
    part in every evaluation.
    """
    learner = trained(stream, tasks=0, evaluation_batch=16, memory=30)
    sizes: set[int] = set()
    learner.network.stem.register_forward_pre_hook(lambda module, inputs: sizes.add(len(inputs[0])))
    parts = set()
    for task in range(TASKS):
        for rows in stream.batches(task, seed=0):
            learner.observe(stream.x_train[rows], stream.y_train[rows], task, train=False)
            evaluate_learner(learner, stream, task)
            tests = sum(len(stream.test_rows(t)) for t in range(task + 1))
            parts |= {learner.memory.filled % 16, tests % 16}
    # Two or more sizes would not be worth a word; here there are many, and three are met.
    assert len(parts) >= 5 and sizes <= {16, 8, 4, 2}, (parts, sizes)
    # The sizes of Split CIFAR-100 at M = 5,000 on a GPU.
    lengths = [length for tests in range(1000, 11000, 1000) for length in (5000, tests)]
    assert {padded_size(length % 2048 or 2048, 2048) for length in lengths} == {1024, 2048}


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 100, 256])
def test_padding_is_at_most_as_much_again(batch):
    sizes = {padded_size(images, batch) for images in range(1, batch + 1)}
    assert len(sizes) <= 1 + int(np.ceil(np.log2(batch))) and max(sizes) == batch
    for images in range(1, batch + 1):
        assert images <= padded_size(images, batch) <= 2 * images


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_padding_changes_no_bit_of_the_other_images(stream, precision):
    learner = trained(stream, evaluation_batch=32, precision=precision)
    images = stream.x_test
    for count in (0, 1, 3, 17, 33, 50):
        features, logits = learner.outputs(images[:count])
        assert features.shape[1] == logits.shape[1] == count
        for start in range(0, count, 32):
            part = learner.views.normalise(images[start : min(start + 32, count)]).contiguous(
                memory_format=torch.channels_last
            )
            with torch.no_grad(), learner.model.precise():
                alone = learner.model.forward(part)
            assert torch.equal(features[:, start : start + len(part)], alone.features.float())
            assert torch.equal(logits[:, start : start + len(part)], alone.logits.float())
