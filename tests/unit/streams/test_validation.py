"""Held-out training images, the first tasks of a stream, and data without any test image."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from PIL import Image

from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.streams import StreamError, create, from_arrays
from mose_fast.train import Listener, run

RNG = np.random.default_rng(0)

#: Training images of digits that are held out for a share of 0.1 with seed 0: how many, the first,
#: and the hash of all.
GOLDEN = (145, [12, 21, 26, 30, 34, 60, 61, 65, 67, 81, 93, 95], "5bd62950c32cf5c3")


def arrays(classes=6, each=10):
    """Images whose first pixel is their position, so that they can be told apart."""
    y = np.arange(classes * each) % classes
    x = np.zeros((len(y), 8, 8, 3), np.uint8)
    x[:, 0, 0, 0] = np.arange(len(y))
    return x, y


def numbers(images):
    return images[:, 0, 0, 0].tolist()


def test_the_same_seed_holds_out_the_same_images_everywhere():
    for settings in ({}, {"class_order_seed": 5, "limit_per_task": 40, "tasks": 2}, {"first_tasks": 2}):
        stream = create(StreamConfig("digits", validation=0.1, **settings))
        rows = stream.held_out.rows.tolist()
        assert (len(rows), rows[:12], hashlib.sha256(repr(rows).encode()).hexdigest()[:16]) == GOLDEN
    other = create(StreamConfig("digits", validation=0.1, validation_seed=1)).held_out
    assert other.rows.tolist() != rows and (other.share, other.seed) == (0.1, 1)


def test_each_class_gives_its_share_and_no_image_is_in_both_parts():
    x, y = arrays()
    stream = from_arrays(x, y, tasks=3, validation=0.3, evaluate_on="validation", class_order_seed=1)
    assert torch.bincount(stream.y_test).tolist() == [3] * 6 and torch.bincount(stream.y_train).tolist() == [7] * 6
    assert numbers(stream.x_test) == stream.held_out.rows.tolist()
    assert sorted(numbers(stream.x_train) + numbers(stream.x_test)) == list(range(60))
    assert stream.split == "validation"
    for images, heads in ((stream.x_train, stream.y_train), (stream.x_test, stream.y_test)):
        assert stream.original_label(heads).tolist() == [y[n] for n in numbers(images)]
    # Evaluated on test images, the same ones are left out of training.
    tested = from_arrays(x, y, x + 100, y, tasks=3, validation=0.3, class_order_seed=1)
    assert torch.equal(tested.x_train, stream.x_train) and torch.equal(tested.y_train, stream.y_train)
    assert (numbers(tested.x_test)[0], len(tested.x_test), tested.split) == (100, 60, "test")


def test_a_limit_counts_what_is_trained_on():
    x, y = arrays()
    stream = from_arrays(x, y, tasks=3, validation=0.3, evaluate_on="validation", limit_per_task=8)
    assert torch.bincount(stream.y_train).tolist() == [4] * 6 and torch.bincount(stream.y_test).tolist() == [3] * 6


def test_the_first_tasks_are_those_of_the_whole_stream():
    x, y = arrays()
    whole = from_arrays(x, y, x, y, tasks=3, class_order_seed=2)
    part = from_arrays(x, y, x, y, tasks=3, class_order_seed=2, first_tasks=2)
    assert part.tasks == whole.tasks[:2] and part.class_order == whole.class_order[:4]
    assert part.class_names == whole.class_names[:4] and part.fingerprint == whole.fingerprint
    for task in range(2):
        for rows in ("train_rows", "test_rows"):
            images = "x_train" if rows == "train_rows" else "x_test"
            found = [numbers(getattr(s, images)[getattr(s, rows)(task)]) for s in (whole, part)]
            assert found[0] == found[1]
    assert len(part.x_train) == len(part.x_test) == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": 0.01}, "validation is 0.01, which holds out 0 of the 10 training images of class 0"),
        ({"validation": 0.97}, "validation is 0.97, which holds out 10 of the 10 training images of class 0"),
        ({"validation": 1.0}, "validation is 1.0; wanted a share above 0 and below 1"),
        ({"validation": True}, "validation is True; wanted a share"),
        ({"validation_seed": -1}, "seed is -1; wanted an integer from 0"),
        ({"validation": None}, "evaluate_on is 'validation' with validation None; wanted 'test', or 'validation' and"),
        ({"evaluate_on": "train"}, "evaluate_on is 'train'"),
        ({"evaluate_on": "test"}, "x_test is a NoneType; wanted a numpy array"),
        ({"first_tasks": 4}, "first_tasks is 4, and arrays has 3 tasks of 2 classes; wanted 1 to 3"),
        ({"first_tasks": 0}, "first_tasks is 0; wanted an integer of at least 1"),
        ({"first_tasks": 1, "tasks": 6}, "first_tasks is 1, and arrays has 6 tasks of 1 classes; wanted 2 to 6"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    x, y = arrays()
    with pytest.raises(StreamError, match=message):
        from_arrays(x, y, **{"tasks": 3, "validation": 0.3, "evaluate_on": "validation", **changes})


def test_a_configuration_needs_a_share_to_evaluate_on():
    with pytest.raises(ConfigError, match=r"evaluate_on is 'validation', but stream.validation is None"):
        RunConfig.create(evaluate_on="validation")


@pytest.mark.parametrize("resize", [None, 8])
def test_a_folder_without_test_images_is_read(tmp_path, resize):
    for label in "ab":
        for i in range(4):
            path = tmp_path / "train" / label / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    config = StreamConfig(str(tmp_path), validation=0.25, tasks=1, resize=resize)
    for _ in range(2):  # a resized folder is read from the decoded copy, then
        stream = create(config, evaluate_on="validation")
        assert (len(stream.x_train), len(stream.x_test)) == (6, 2)
    assert {p.name for p in tmp_path.iterdir()} == {"train"} | ({"resized-8.train.npz"} if resize else set())
    with pytest.raises(StreamError, match=r"test is missing; wanted .* to hold train/<class>/<image> and test/<class>"):
        create(config)


def test_an_npz_gives_up_no_test_image(tmp_path, monkeypatch):
    x, y = arrays()
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = StreamConfig(str(tmp_path / "mine.npz"), validation=0.3, tasks=3)
    read, get = [], np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", lambda self, name: read.append(name) or get(self, name))
    with_test = create(config)
    assert sorted(read) == ["x_test", "x_train", "y_test", "y_train"]
    read.clear()
    without = create(config, evaluate_on="validation")
    assert sorted(read) == ["x_train", "y_train"]
    assert torch.equal(with_test.x_train, without.x_train) and with_test.fingerprint != without.fingerprint


class Seen(Listener):
    """Keeps the learner and the numbers of the images that it was given."""

    def on_start(self, config, stream, learner, batch, batches):
        self.learner, self.numbers, observe = learner, [], learner.prepare

        def counted(**arguments):
            self.numbers += numbers(arguments["x"])
            return observe(**arguments)

        learner.prepare = counted


def test_a_run_never_sees_what_is_held_out_and_records_it():
    x, y = arrays(classes=4, each=20)
    stream = from_arrays(x, y, tasks=2, validation=0.2, validation_seed=3, evaluate_on="validation")
    seen = Seen()
    results = run(stream=stream, method="er", memory=70, width=1, device="cpu", listeners=[seen], augment="none")
    held = set(stream.held_out.rows.tolist())
    assert len(held) == 16 and sorted(seen.numbers) == sorted(set(range(80)) - held)
    memory = seen.learner.memory
    assert memory.filled == 64 and not held & set(numbers(memory.images[: memory.filled]))
    assert set(results["held_out"]) == held
    assert results["config"]["evaluate_on"] == "validation"
    assert {name: results["config"]["stream"][name] for name in ("validation", "validation_seed")} == {
        "validation": 0.2,
        "validation_seed": 3,
    }
    # Accuracies are multiples of one in the eight held-out images of a task.
    for row in results["accuracy"]["ncm"]["1"]:
        assert [round(8 * accuracy, 9) % 1 for accuracy in row] == [0, 0]


def test_a_stream_made_by_hand_must_hold_the_images_that_are_asked_for():
    x, y = arrays(classes=4, each=20)
    stream = from_arrays(x, y, x, y, tasks=2, validation=0.2)
    config = RunConfig.create(method="er", memory=70, width=1, device="cpu", stream={"validation": 0.2})
    with pytest.raises(StreamError, match="evaluate_on is 'validation', but the stream that was given holds test"):
        run(dataclasses.replace(config, evaluate_on="validation"), stream=stream)
