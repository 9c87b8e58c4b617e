"""Tasks, class order and batches, on synthetic arrays."""

import numpy as np
import pytest
import torch

from mose_fast.methods import create_learner
from mose_fast.settings.run import RunConfig
from mose_fast.streams import NORMALISATIONS, Normalisation, StreamError, from_arrays, from_batches
from mose_fast.streams.draws import draw_order

MASK = 2**64 - 1


def arrays(labels=(7, 3, 11, 20, 5, 9), per_class=12, size=8):
    """Images that hold their own row number in every pixel, with shuffled labels."""
    y = np.random.default_rng(0).permutation(np.repeat(labels, per_class))
    x = np.broadcast_to(np.arange(len(y), dtype=np.uint8)[:, None, None, None], (len(y), size, size, 3)).copy()
    return x, y, x[::3].copy(), y[::3].copy()


def philox_words(n, key):
    """Philox4x64-10 written from its definition (Salmon et al., SC 2011), counters from 1 on."""
    words = []
    for block in range(1, -(-n // 4) + 1):
        c, k = [block, 0, 0, 0], list(key)
        for _ in range(10):
            left, right = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
            c = [(right >> 64) ^ c[1] ^ k[0], right & MASK, (left >> 64) ^ c[3] ^ k[1], left & MASK]
            k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
        words += c
    return words[:n]


@pytest.mark.parametrize(("n", "seed", "purpose"), [(10, 0, 2**63), (101, 2**63 - 1, 3 * 2**32 + 1)])
def test_orders_are_sorted_philox_words(n, seed, purpose):
    words = philox_words(n, (seed, purpose))
    assert draw_order(n, seed, purpose).tolist() == sorted(range(n), key=words.__getitem__)


def test_natural_order_numbers_the_sorted_labels():
    x, y, x_test, y_test = arrays()
    stream = from_arrays(x, y, x_test, y_test, tasks=3)
    assert stream.class_order == (3, 5, 7, 9, 11, 20)
    assert stream.tasks == ((0, 1), (2, 3), (4, 5))
    assert stream.class_names == ("3", "5", "7", "9", "11", "20")
    assert (stream.classes, stream.image_size) == (6, (8, 8))
    assert [stream.class_order[h] for h in stream.y_train] == y.tolist()
    assert [stream.class_order[h] for h in stream.y_test] == y_test.tolist()
    assert stream.x_train.dtype == torch.uint8 and stream.y_train.dtype == torch.int64


def test_spec_creates_a_learner_of_the_stream():
    stream = from_arrays(*arrays(), tasks=3, normalisation="cifar100", mirror_safe=False)
    learner = create_learner(RunConfig.create(width=1, memory=64, device="cpu"), **stream.spec)
    assert (learner.classes, learner.image_size, learner.mirrored) == (6, (8, 8), False)
    assert (learner.mean, learner.std) == (stream.normalisation.mean, stream.normalisation.std)


def test_one_task_holds_every_image_of_all_classes_once_and_shuffled():
    x, y, x_test, y_test = arrays()
    recorded = from_batches([[(x[y == label], y[y == label])] for label in sorted(set(y))], (x_test, y_test))
    for stream in (from_arrays(x, y, x_test, y_test, tasks=3), recorded):
        whole = stream.as_one_task()
        rows = torch.cat(whole.batches(0, seed=1))
        assert whole.tasks == ((0, 1, 2, 3, 4, 5),) and whole.fingerprint == stream.fingerprint
        assert sorted(rows.tolist()) == list(range(len(y))) != rows.tolist()
        assert set(whole.y_train[rows[:20]].tolist()) > set(stream.tasks[0])


def test_original_label_inverts_a_drawn_order():
    x, y, x_test, y_test = arrays()
    names = ["three", "five", "seven", "nine", "eleven", "twenty"]
    stream = from_arrays(x, y, x_test, y_test, tasks=2, class_order_seed=4, class_names=names)
    assert sorted(stream.class_order) == [3, 5, 7, 9, 11, 20] and stream.class_order != (3, 5, 7, 9, 11, 20)
    assert stream.original_label(stream.y_train).tolist() == y.tolist()
    assert stream.original_label(stream.y_test.view(2, -1)).flatten().tolist() == y_test.tolist()
    assert [stream.original_label(h) for h in range(6)] == list(stream.class_order)
    assert dict(zip(stream.class_order, stream.class_names, strict=True)) == dict(
        zip((3, 5, 7, 9, 11, 20), names, strict=True)
    )
    for outside in (-1, 6, torch.tensor([0, 6]), torch.tensor([-1])):
        with pytest.raises(StreamError, match="wanted 0 to 5"):
            stream.original_label(outside)


def test_class_order_depends_on_its_seed_alone():
    data = arrays()
    orders = {
        from_arrays(*data, tasks=3, class_order_seed=1, **k).class_order
        for k in ({}, {"batch": 3}, {"limit_per_task": 5})
    }
    orders |= {from_arrays(*data, tasks=t, class_order_seed=1).class_order for t in (1, 2, 6)}
    stream = from_arrays(*data, tasks=3, class_order_seed=1)
    for seed in range(3):
        stream.batches(0, seed=seed)
    assert orders == {stream.class_order}
    assert len({from_arrays(*data, tasks=3, class_order_seed=s).class_order for s in range(20)}) > 15


def test_tasks_partition_the_rows():
    stream = from_arrays(*arrays(), tasks=3, class_order_seed=2)
    for rows, y in ((stream.train_rows, stream.y_train), (stream.test_rows, stream.y_test)):
        assert sorted(torch.cat([rows(t) for t in range(3)]).tolist()) == list(range(len(y)))
        for t in range(3):
            assert set(y[rows(t)].tolist()) == set(stream.tasks[t])
    for task in (-1, 3):
        with pytest.raises(IndexError, match=f"task is {task}; arrays has tasks 0 to 2"):
            stream.train_rows(task)


@pytest.mark.parametrize("batch", [1, 7, 10, 1000])
def test_batches_hold_every_index_once_an_epoch(batch):
    stream = from_arrays(*arrays(), tasks=3, batch=batch)
    for task in range(3):
        rows = stream.train_rows(task).tolist()
        for epoch in range(2):
            batches = stream.batches(task, seed=5, epoch=epoch)
            assert sorted(torch.cat(batches).tolist()) == rows
            assert [len(b) for b in batches[:-1]] == [batch] * (len(batches) - 1) and 1 <= len(batches[-1]) <= batch


def test_batches_repeat_for_equal_and_differ_for_other_arguments():
    stream = from_arrays(*arrays(), tasks=3)
    fresh = from_arrays(*arrays(), tasks=3)

    def order(source, **arguments):
        return torch.cat(source.batches(1, **arguments)).tolist()

    assert order(stream, seed=5, epoch=1) == order(fresh, seed=5, epoch=1)
    distinct = {tuple(order(stream, seed=s, epoch=e)) for s in (0, 1, 2**63 - 1) for e in (0, 1, 2)}
    assert len(distinct) == 9
    ranks = [torch.cat(stream.batches(t, seed=0)).argsort().tolist() for t in (0, 1)]
    assert ranks[0] != ranks[1]


def test_batch_size_leaves_the_order_of_images_equal():
    orders = [torch.cat(from_arrays(*arrays(), tasks=2, batch=b).batches(1, seed=3)).tolist() for b in (1, 10, 64)]
    assert orders[0] == orders[1] == orders[2] != sorted(orders[0])


def test_limit_takes_the_first_of_every_class_in_turn():
    y = np.array([0, 0, 0, 0, 1, 0, 1, 1, 2, 3, 3, 2])
    x = np.broadcast_to(np.arange(12, dtype=np.uint8)[:, None, None, None], (12, 8, 8, 3))
    stream = from_arrays(x, y, x, y, tasks=2, limit_per_task=5)
    # Task 0 keeps rows 0 and 4 (first of classes 0 and 1), 1 and 6, then 2: class 0 comes before
    # class 1 in the data.
    assert stream.x_train[:, 0, 0, 0].tolist() == [0, 1, 2, 4, 6, 8, 9, 10, 11]
    assert stream.y_train.tolist() == y[[0, 1, 2, 4, 6, 8, 9, 10, 11]].tolist()
    assert len(stream.x_test) == 12
    assert from_arrays(x, y, x, y, tasks=1, limit_per_task=100).x_train.shape[0] == 12


def test_limit_fills_up_from_larger_classes():
    y = np.array([0] * 9 + [1])
    x = np.zeros((10, 8, 8, 3), np.uint8)
    assert torch.bincount(from_arrays(x, y, x, y, tasks=1, limit_per_task=6).y_train).tolist() == [5, 1]


def test_limit_keeps_the_same_images_under_every_class_order():
    data = arrays()
    kept = [from_arrays(*data, tasks=1, class_order_seed=s, limit_per_task=20).x_train for s in (None, 0, 1)]
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])


@pytest.mark.parametrize(("classes", "tasks"), [(10, 5), (9, 3), (7, 1), (4, 2), (3, 1)])
def test_default_tasks_have_at_least_two_classes(classes, tasks):
    x, y = np.zeros((classes, 8, 8, 3), np.uint8), np.arange(classes)
    assert len(from_arrays(x, y, x, y).tasks) == tasks


def test_grey_images_and_tensors_are_accepted():
    x, y, x_test, y_test = arrays()
    grey = from_arrays(torch.from_numpy(x[..., 0]), torch.from_numpy(y), x_test[..., 0], y_test.tolist(), tasks=2)
    assert torch.equal(grey.x_train, torch.from_numpy(x)) and torch.equal(grey.x_test, torch.from_numpy(x_test))
    backwards = from_arrays(x[::-1], y[::-1].astype(np.uint8), x_test, y_test.astype(np.int32), tasks=2)
    assert torch.equal(backwards.x_train.flip(0), torch.from_numpy(x))


def test_normalisation_by_name_or_own():
    own = Normalisation("own", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert from_arrays(*arrays()).normalisation == NORMALISATIONS["half"]
    assert from_arrays(*arrays(), normalisation="cifar100").normalisation.mean[0] == 0.5071
    assert from_arrays(*arrays(), normalisation=own).normalisation is own
    with pytest.raises(StreamError, match="normalisation is 'cifar', which is unknown; did you mean 'cifar10"):
        from_arrays(*arrays(), normalisation="cifar")


def test_describe_counts_what_is_there():
    x = np.zeros((7, 8, 16, 3), np.uint8)
    stream = from_arrays(x, [1, 1, 1, 2, 4, 4, 9], x[:4], [1, 2, 4, 9], tasks=2, batch=2, name="mine")
    lines = stream.describe().splitlines()
    assert lines[0] == "mine: 2 tasks, 4 classes, 7 training and 4 test images of 8x16"
    assert "normalisation half" in lines[1]
    assert " ".join(lines[3].split()) == "0 4 2 2 1 (3, 1), 2 (1, 1)"
    assert " ".join(lines[4].split()) == "1 3 2 2 4 (2, 1), 9 (1, 1)"


GOOD_X, GOOD_Y = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 0, 1, 1])
NAN = np.full((4, 8, 8, 3), np.nan, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": [1, 2]}, "x_train is a list; wanted a numpy array or a tensor"),
        ({"x_train": NAN}, r"x_train is float32 and contains NaN; wanted uint8 in \[0, 255\]$"),
        ({"x_test": NAN}, "x_test is float32 and contains NaN"),
        ({"x_train": GOOD_X / 255}, r"x_train is float64 from 0 to 0; wanted uint8 in \[0, 255\]: \(x \* 255\)"),
        ({"x_train": torch.zeros(4, 8, 8, 3, dtype=torch.bfloat16)}, r"is float32 from 0 to 0; wanted uint8"),
        ({"x_train": GOOD_X + 254.0}, r"from 254 to 254; .*: x.round\(\).astype"),
        ({"x_train": GOOD_X.astype(np.int64)}, r"x_train is int64 from 0 to 0; .*: x.astype\('uint8'\)"),
        ({"x_train": GOOD_X - 1.5}, "from -1.5 to -1.5; .*looks normalised"),
        (
            {"x_train": GOOD_X.transpose(0, 3, 1, 2)},
            r"shape \[4, 3, 8, 8\]; .*channels-first: x.transpose\(0, 2, 3, 1\)",
        ),
        ({"x_train": np.zeros((4, 8, 8, 4), np.uint8)}, r"shape \[4, 8, 8, 4\].*alpha"),
        ({"x_train": np.zeros((4, 8, 8, 1), np.uint8)}, r"shape \[4, 8, 8, 1\].*grey images: \[N, H, W\]"),
        ({"x_train": np.zeros((4, 8, 8, 2), np.uint8)}, r"shape \[4, 8, 8, 2\]; wanted \[N, H, W, 3\] with three"),
        ({"x_train": np.zeros((4, 8), np.uint8)}, r"shape \[4, 8\]; wanted \[N, H, W, 3\], or"),
        ({"x_train": np.zeros((0, 8, 8, 3), np.uint8)}, "x_train holds no images"),
        (
            {"x_train": np.zeros((4, 28, 28), np.uint8)},
            "images of 28x28; wanted sides divisible by 8: pad them .* or resize",
        ),
        ({"x_test": np.zeros((4, 8, 16, 3), np.uint8)}, "x_train holds images of 8x8 and x_test of 8x16"),
        ({"y_train": GOOD_Y[:3]}, "x_train holds 4 images and y_train 3 labels"),
        ({"y_train": GOOD_Y.astype(float)}, "y_train is float64; wanted integer labels"),
        ({"y_train": np.array([0, np.nan, 1, 1])}, "y_train is float64 and contains NaN"),
        ({"y_train": np.eye(4, dtype=int)}, r"y_train has shape \[4, 4\]; wanted \[N\]"),
        ({"y_train": [[0], [0, 1], 1, 1]}, "y_train is no array of labels"),
        ({"y_train": np.array([0, 0, 1, 2**64 - 1], np.uint64)}, "wanted labels below 2"),
        (
            {"y_test": np.array([0, 0, 1, 2])},
            r"y_test holds label 2 \(row 3\), which is outside the classes of y_train: 0, 1$",
        ),
        ({"y_test": np.zeros(4, int), "tasks": 2}, "the task of labels 1 has no test images"),
        (
            {"tasks": 3},
            (
                "tasks is 3, and the 2 classes of arrays cannot be split into 3 equal tasks; wanted tasks to be one of"
                " 1, 2"
            ),
        ),
        ({"tasks": 0}, "tasks is 0; wanted an integer of at least 1"),
        ({"tasks": 2.0}, "tasks is 2.0; wanted an integer"),
        ({"batch": 0}, "batch is 0; wanted"),
        ({"limit_per_task": True}, "limit_per_task is True; wanted"),
        ({"limit_per_task": 1, "tasks": 1}, "limit_per_task is 1, fewer than the 2 classes of a task"),
        ({"class_order_seed": -1}, "seed is -1; wanted an integer from 0"),
        ({"class_names": ["a"]}, "class_names holds 1 names; wanted one for each of the 2 classes"),
        ({"class_names": ["a", "a"]}, "class_names holds 'a' 2 times; wanted a name of its own for each class"),
        ({"class_names": np.array(["b", "b"])}, "class_names holds 'b' 2 times"),
        ({"class_names": ["a", None]}, "class_names holds None; wanted texts"),
        *(
            ({name: np.ma.masked_equal(array, 1)}, f"^{name} is a masked array; wanted a plain one")
            for name, array in (("x_train", GOOD_X), ("y_train", GOOD_Y), ("x_test", GOOD_X), ("y_test", GOOD_Y))
        ),
    ],
)
def test_bad_arrays_are_refused(changes, message):
    arguments = {"x_train": GOOD_X, "y_train": GOOD_Y, "x_test": GOOD_X, "y_test": GOOD_Y, **changes}
    with pytest.raises(StreamError, match=message):
        from_arrays(**arguments)
