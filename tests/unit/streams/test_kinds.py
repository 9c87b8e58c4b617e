"""Kinds of streams: which images they have, and in which order these arrive."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch

from mose_fast.settings.run import ConfigError, RunConfig, StreamConfig
from mose_fast.streams import StreamError, create, from_arrays
from mose_fast.streams.draws import draw_order, draw_words

WITHOUT_BOUNDARIES = ("blurry", "si_blurry", "task_free")
KINDS = ("imbalanced", *WITHOUT_BOUNDARIES)

# Purpose words, as docs/streams.md gives them.
_, RANKS, KEPT, DISJOINT, MOVED, CUTS = (2**63 + 2**61 + n * 2**32 for n in range(6))


def arrays(sizes, size=8):
    """Images that hold their row number in their first two pixels, class after class."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    x = np.zeros((len(y), size, size, 3), np.uint8)
    x[:, 0, 0, 0], x[:, 0, 1, 0] = np.arange(len(y)) // 256, np.arange(len(y)) % 256
    return x, y


def stream_of(sizes=(40,) * 8, **settings):
    x, y = arrays(sizes)
    return from_arrays(x, y, x, y, **{"tasks": 4, **settings})


def numbers(images):
    """The row numbers that images hold."""
    images = images.long()
    return (images[:, 0, 0, 0] * 256 + images[:, 0, 1, 0]).tolist()


def arriving(stream, seed=0):
    return torch.cat([rows for part in range(stream.parts) for rows in stream.batches(part, seed=seed)])


# Every kind


@pytest.mark.parametrize("kind", KINDS)
def test_every_image_comes_once(kind):
    stream = stream_of(kind=kind, imbalance=4)
    for seed in (0, 1, 2**63 - 1):
        assert sorted(arriving(stream, seed).tolist()) == list(range(len(stream.x_train)))
    assert len(stream.x_train) == (
        320 if kind != "imbalanced" else sum(int(40 * 4 ** (-r / 7) + 1e-6) for r in range(8))
    )
    assert len(set(numbers(stream.x_train))) == len(stream.x_train)


# Of SHA-256 of the numbers of the images in their order of arrival.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tasks", "91381b80568a188d"),
        ("imbalanced", "085e78f8b67cd884"),
        ("blurry", "4210e4f0170eda66"),
        ("si_blurry", "ade05a92a896c3cc"),
        ("task_free", "d27ef5071875c9fb"),
    ],
)
def test_the_order_is_the_same_on_every_machine(kind, expected):
    stream = stream_of((60, 33, 40, 51, 40, 40, 28, 40), kind=kind, kind_seed=3, imbalance=10, blur=0.3, drift=0.1)
    text = ",".join(map(str, numbers(stream.x_train[arriving(stream, 7)])))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_of_the_run_and_of_the_kind(kind):
    stream, other = stream_of(kind=kind, imbalance=4), stream_of(kind=kind, imbalance=4, kind_seed=1)
    orders = [numbers(stream.x_train[arriving(stream, seed)]) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    different = numbers(other.x_train[arriving(other)]) != orders[0]
    assert different == (kind != "task_free")  # nothing of it is chosen beforehand


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_images_never_come(kind):
    """And they are the same as of any other kind."""
    plain = stream_of(validation=0.2)
    stream = stream_of(kind=kind, imbalance=4, validation=0.2, evaluate_on="validation")
    held = set(plain.held_out.rows.tolist())
    assert set(stream.held_out.rows.tolist()) == held == set(numbers(stream.x_test))
    assert not held & set(numbers(stream.x_train[arriving(stream)]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_comes_before_the_kind(kind):
    stream = stream_of(kind=kind, imbalance=4, limit_per_task=40)
    counts = torch.bincount(stream.y_train).tolist()
    if kind == "imbalanced":
        assert sorted(counts, reverse=True) == [int(20 * 4 ** (-rank / 7) + 1e-6) for rank in range(8)]
    else:
        assert counts == [20] * 8
    assert set(numbers(stream.x_train)) <= set(numbers(stream_of(limit_per_task=40).x_train))


@pytest.mark.parametrize("kind", WITHOUT_BOUNDARIES)
def test_a_stream_without_task_boundaries_is_one_task_in_equal_parts(kind):
    stream = stream_of(kind=kind, batch=7)  # 320 images in 46 batches, of which the last has 5
    assert not stream.has_boundaries and stream.tasks == (tuple(range(8)),) and stream.parts == 4
    counts = [len(stream.batches(part, seed=0)) for part in range(4)]
    assert counts == [11, 12, 11, 12] == [stream.count_batches(part) for part in range(4)]
    sizes = [len(rows) for part in range(4) for rows in stream.batches(part, seed=0)]
    assert sizes == [7] * 45 + [5]
    assert [stream.count_images(part) for part in range(4)] == [77, 84, 77, 82]
    assert stream.count_images(3, 11) == 77 and stream.count_images(1, 2) == 14
    assert {stream.task_of(part) for part in range(4)} == {0}
    with pytest.raises(IndexError, match="part is 4; arrays has parts 0 to 3"):
        stream.batches(4, seed=0)


@pytest.mark.parametrize("kind", WITHOUT_BOUNDARIES)
def test_the_first_tasks_make_a_smaller_stream_of_the_kind(kind):
    stream = stream_of(kind=kind, first_tasks=2)
    alone = stream_of((40,) * 4, kind=kind, tasks=2)
    assert stream.parts == 2 and stream.classes == 4
    assert numbers(stream.x_train[arriving(stream)]) == numbers(alone.x_train[arriving(alone)])


# imbalanced


def test_counts_of_the_long_tail_are_those_of_the_formula():
    """Five classes of 100 images and a factor of 16: 100, 50, 25, 12.5 and 6.25 images."""
    stream = stream_of((100,) * 5, tasks=5, kind="imbalanced", imbalance=16, kind_seed=2)
    counts = torch.bincount(stream.y_train).tolist()
    order = draw_order(5, 2, RANKS).tolist()
    assert [counts[head] for head in order] == [100, 50, 25, 12, 6]
    kept = 100 * order[2] + draw_order(100, 2, KEPT + order[2])[:25]
    assert sorted(kept.tolist()) == [n for n in numbers(stream.x_train) if n // 100 == order[2]]


def test_whole_numbers_are_not_rounded_down():
    """A quarter of 40 images is ten, though 40 * 32 ** -(2 / 5) is 9.999999999999998."""
    stream = stream_of((40,) * 6, tasks=1, kind="imbalanced", imbalance=32)
    assert sorted(torch.bincount(stream.y_train).tolist()) == [1, 2, 5, 10, 20, 40]


def test_the_long_tail_does_not_depend_on_order_and_number_of_tasks():
    plain = stream_of(kind="imbalanced", imbalance=8)
    images = {n: n // 40 for n in numbers(plain.x_train)}
    assert set(numbers(stream_of(kind="imbalanced", imbalance=8, class_order_seed=4, tasks=2).x_train)) == set(images)
    first = stream_of(kind="imbalanced", imbalance=8, first_tasks=2)
    assert set(numbers(first.x_train)) == {n for n, label in images.items() if label < 4}


# blurry


def parts(stream, seed=0):
    """The number of images by part and class, int64 [parts, classes]."""
    return np.stack(
        [
            np.bincount(stream.y_train[torch.cat(stream.batches(part, seed=seed))], minlength=stream.classes)
            for part in range(stream.parts)
        ]
    )


def test_blurry_by_hand():
    """Three tasks of two classes with 10 images each, one class of each task disjoint, 4 of 10
    images of the others moved: two to each other part.
    """
    stream = stream_of((10,) * 6, tasks=3, batch=5, kind="blurry", disjoint=0.5, blur=0.4)
    found = parts(stream)
    for task in range(3):
        disjoint, blurred = (2 * task + draw_order(2, 0, DISJOINT + task)).tolist()
        assert found[:, disjoint].tolist() == [10 * (part == task) for part in range(3)]
        assert found[:, blurred].tolist() == [6 if part == task else 2 for part in range(3)]
        moved = set((10 * blurred + draw_order(10, 0, MOVED + blurred)[:4]).tolist())
        home = set(numbers(stream.x_train[torch.cat(stream.batches(task, seed=0))]))
        assert set(range(10 * blurred, 10 * blurred + 10)) - home == moved


def test_what_cannot_be_dealt_evenly():
    """5 of 10 images to three other parts: two of them get two, the third one."""
    stream = stream_of((10,) * 8, tasks=4, batch=10, kind="blurry", disjoint=0, blur=0.5)
    found = parts(stream)
    for head in range(8):
        home = head // 2
        assert found[home, head] == 5
        assert sorted(np.delete(found[:, head], home)) == [1, 2, 2]
    assert (found.sum(0) == 10).all()


def test_half_an_image_counts_as_one():
    found = parts(stream_of((5,) * 4, tasks=2, batch=5, kind="blurry", disjoint=0, blur=0.5))
    assert found.tolist() == [[2, 2, 3, 3], [3, 3, 2, 2]]


def test_without_blur_the_classes_come_one_task_after_the_other():
    stream = stream_of(kind="blurry", blur=0)
    assert (parts(stream) == 40 * np.kron(np.eye(4, dtype=int), [1, 1])).all()
    assert not stream.has_boundaries


# si_blurry


def test_si_blurry_by_hand():
    """Eight classes, four of them disjoint, 3 of 10 images of the others moved."""
    stream = stream_of((10,) * 8, tasks=4, batch=1, kind="si_blurry", blur=0.3, kind_seed=1)
    drawn = draw_order(8, 1, DISJOINT).tolist()
    disjoint, blurry = sorted(drawn[:4]), sorted(drawn[4:])
    cuts = sorted((draw_words(3, 1, CUTS) % np.uint64(5)).tolist())
    order = arriving(stream).tolist()
    # By the position at which the part of a class ends.
    homes = {}
    for place, head in enumerate(disjoint):
        homes[head] = sum(cut <= place for cut in cuts)
    for place, head in enumerate(blurry):
        homes[head] = place  # one a part
    rows = np.flatnonzero(np.isin(stream.y_train, blurry))
    moved = rows[draw_order(40, 1, MOVED)[:12]]
    dealt = sorted((draw_words(3, 1, CUTS + 1) % np.uint64(13)).tolist())
    part = np.array([homes[int(y)] for y in stream.y_train])
    for place, row in enumerate(moved):
        part[row] = sum(cut <= place for cut in dealt)
    assert [int(part[row]) for row in order] == sorted(part.tolist())


def test_classes_a_part_vary_with_the_seed():
    found = set()
    for seed in range(12):
        stream = stream_of(kind="si_blurry", blur=0, kind_seed=seed)
        order = arriving(stream)
        first = [int((stream.y_train[order] == head).nonzero()[0]) for head in range(8)]
        found.add(tuple(np.argsort(first).tolist()))
    assert len(found) > 8


# task_free


def test_probabilities_are_gaussians():
    """At each time the share of a class is that of its Gaussian among all."""
    x, y = arrays((2000,) * 4)
    stream = from_arrays(x, y, x[::50], y[::50], tasks=2, kind="task_free", drift=0.1)
    order = stream.y_train[arriving(stream)].numpy()
    centres = (np.arange(4) + 0.5) / 4
    # Times of the images at known ranks: the distribution function of the mixture, inverted.
    grid = np.linspace(-0.5, 1.5, 20001)
    density = np.exp(-((grid[:, None] - centres) ** 2) / (2 * 0.1**2))
    rank = np.cumsum(density.sum(1)) / density.sum()
    for at in np.linspace(0.05, 0.95, 10):
        window = order[int(at * 8000) - 200 : int(at * 8000) + 200]
        expected = density[np.searchsorted(rank, at)] / density[np.searchsorted(rank, at)].sum()
        assert np.abs(np.bincount(window, minlength=4) / 400 - expected).max() < 0.1


def test_a_narrow_drift_is_one_class_after_the_other():
    stream = stream_of(kind="task_free", drift=1e-4)
    order = stream.y_train[arriving(stream)].tolist()
    assert order == sorted(order)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "blury"}, "stream.kind is 'blury'; wanted one of 'tasks', "),
        ({"kind": "blurry", "kind_seed": -1}, "stream.kind_seed is -1; wanted an integer of at least 0"),
        ({"kind": "blurry", "disjoint": 1.0}, "stream.disjoint is 1.0; wanted a number of at least 0 and below 1"),
        ({"kind": "blurry", "blur": -0.1}, "stream.blur is -0.1; wanted a number of at least 0 and below 1"),
        ({"kind": "imbalanced", "imbalance": 0.5}, "stream.imbalance is 0.5; wanted a number of at least 1"),
        ({"kind": "task_free", "drift": 0}, "stream.drift is 0; wanted a number above 0"),
        (
            {"kind": "blurry", "disjoint": 0.3},
            "disjoint is 0.3, which is 0.6 of the 2 classes of a task; wanted a share of whole classes",
        ),
        (
            {"kind": "si_blurry", "disjoint": 0.3},
            "disjoint is 0.3, which is 2.4 of the 8 classes; wanted a share of whole classes",
        ),
        ({"kind": "blurry", "tasks": 1}, "kind is 'blurry', but the stream has one task; wanted at least two to blur"),
        (
            {"kind": "si_blurry", "first_tasks": 1},
            "kind is 'si_blurry', but the stream has one task; wanted at least two to blur",
        ),
        (
            {"kind": "imbalanced", "imbalance": 41},
            "imbalance is 41, which leaves none of the 40 training images of class [0-7]; wanted at most 40",
        ),
        (
            {"kind": "task_free", "batch": 107},
            "tasks is 4 with kind 'task_free', but 320 training images make 3 batches of 107; wanted at least one batch"
            " in each part",
        ),
    ],
)
def test_unusable_settings_are_named(settings, message):
    with pytest.raises((ConfigError, StreamError), match=message):
        stream_of(**settings)


def test_passes_over_the_data_need_tasks():
    for kind in WITHOUT_BOUNDARIES:
        with pytest.raises(ConfigError, match=f"epochs is 2, but a stream of kind '{kind}' has no tasks to repeat"):
            RunConfig.create(stream={"kind": kind}, epochs=2)
        RunConfig.create(stream={"kind": kind}, epochs=2, train_on="final_memory")
    RunConfig.create(stream={"kind": "imbalanced"}, epochs=2)


# By configuration


def test_settings_come_from_the_configuration():
    config = StreamConfig(kind="blurry", kind_seed=5, blur=0.2, limit_per_task=40)
    stream = create(config)
    assert dataclasses.asdict(stream.kind) == {
        name: getattr(config, name) for name in ("kind", "kind_seed", "disjoint", "blur", "imbalance", "drift")
    }
    assert str(stream.kind) == "blurry (disjoint 0.5, blur 0.2)"
    assert str(dataclasses.replace(stream.kind, blur=0.2000001)) == "blurry (disjoint 0.5, blur 0.2000001)"
    assert stream.summary.startswith(
        "digits, blurry (disjoint 0.5, blur 0.2): 5 parts without task boundaries, 10 classes, 200"
    )
    assert stream.fingerprint == create(StreamConfig()).fingerprint


def test_describe_names_parts_and_classes():
    lines = stream_of(kind="task_free", batch=7).describe().splitlines()
    assert lines[0] == (
        "arrays, task_free (drift 0.05): 4 parts without task boundaries, 8 classes, 320 training and 320 test images"
        " of 8x8"
    )
    assert [line.split() for line in lines[2:7]] == [
        ["part", "train", "steps"],
        ["0", "77", "11"],
        ["1", "84", "12"],
        ["2", "77", "11"],
        ["3", "82", "12"],
    ]
    assert lines[7].startswith("label (train, test): 0 (40, 40), 1 (40, 40)")
