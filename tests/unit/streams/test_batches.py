"""Streams recorded from iterables of batches."""

import numpy as np
import pytest
import torch

from mose_fast.streams import StreamError, from_batches


def batch(*labels, size=8):
    """A batch whose pixels are its labels."""
    y = np.array(labels)
    return np.broadcast_to(y.astype(np.uint8)[:, None, None, None], (len(y), size, size, 3)).copy(), y


TEST = batch(5, 2, 9, 7)


def recorded(stream, task):
    """Each batch of a task as the data set's labels, checked against the pixels."""
    batches = stream.batches(task, seed=0)
    for rows in batches:
        assert torch.equal(stream.original_label(stream.y_train[rows]), stream.x_train[rows, 0, 0, 0].long())
    return [stream.original_label(stream.y_train[rows]).tolist() for rows in batches]


def test_tasks_of_batches_keep_boundaries_and_order():
    stream = from_batches([[batch(7, 5, 7), batch(5)], [batch(9, 2)]], TEST)
    assert stream.class_order == (5, 7, 2, 9) and stream.tasks == ((0, 1), (2, 3))
    assert stream.class_names == ("5", "7", "2", "9")
    assert recorded(stream, 0) == [[7, 5, 7], [5]] and recorded(stream, 1) == [[9, 2]]
    assert stream.batch == 3
    assert stream.original_label(stream.y_test).tolist() == [5, 2, 9, 7]
    assert stream.train_rows(1).tolist() == [4, 5] and stream.test_rows(1).tolist() == [1, 2]
    for a, b in zip(stream.batches(0, seed=0), stream.batches(0, seed=1, epoch=3), strict=True):
        assert torch.equal(a, b)
    assert "batches as they arrived" in stream.describe()
    with pytest.raises(IndexError, match="task is 2"):
        stream.batches(2, seed=0)


def test_flat_batches_join_the_task_of_their_labels():
    flat = [batch(7, 5), batch(2), batch(5), batch(9)]
    stream = from_batches(
        iter(flat), [TEST], class_tasks=[[9, 2], [5, 7]], class_names=["two", "five", "seven", "nine"]
    )
    assert stream.class_order == (2, 9, 5, 7) and stream.class_names == ("two", "nine", "five", "seven")
    assert recorded(stream, 0) == [[2], [9]] and recorded(stream, 1) == [[7, 5], [5]]


def test_generators_are_read_once_and_may_reuse_their_buffer():
    reads = []

    def tasks():
        x, y = np.empty((2, 8, 8, 3), np.uint8), np.empty(2, np.int64)

        def task(*pairs):
            for pair in pairs:
                reads.append(pair)
                y[:] = pair
                x[:] = y.astype(np.uint8)[:, None, None, None]
                yield x, y

        yield task((5, 7), (7, 7))
        yield task((2, 9))

    stream = from_batches(tasks(), (torch.from_numpy(TEST[0]), torch.from_numpy(TEST[1])))
    assert reads == [(5, 7), (7, 7), (2, 9)]
    assert recorded(stream, 0) == [[5, 7], [7, 7]] and recorded(stream, 1) == [[2, 9]]
    assert len(stream.x_test) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([batch(5), batch(7)], TEST), "task 0 is a batch .* needs class_tasks"),
        (([[batch(5, 7)], []], TEST), "task 1 has no batches"),
        (([], TEST), "tasks is empty"),
        ((5, TEST), "tasks is a int; wanted an iterable"),
        (([5], TEST), "task 0 is a int; wanted an iterable"),
        (([[batch(5)[0]]], TEST), r"task 0, batch 0 is a ndarray; wanted a pair \(x, y\)"),
        (([[batch(5, 7)], [batch(9, 7)]], TEST), "label 7 occurs in tasks 0 and 1"),
        (([[batch(5, 7), (batch(7)[0] / 255, [7])]], TEST), "x of task 0, batch 1 is float64"),
        (([[(batch(5, 7)[0], [5])]], TEST), "x of task 0, batch 0 holds 2 images and y of task 0, batch 0 1 labels"),
        (([[batch(5), batch(7, size=16)]], batch(5)), "images of 8x8 and of 16x16"),
        (
            ([[batch(5)]], batch(5, 6)),
            r"test labels holds label 6 \(row 1\), which is outside the classes of the tasks: 5",
        ),
        (([[batch(5)], [batch(6)]], batch(5)), "the task of labels 6 has no test images"),
        (([[batch(5)]], []), "test holds no batches"),
        (([[batch(5)]], [(batch(5)[0],)]), "test batch 0 is a tuple of 1; wanted a pair"),
        (([[(np.zeros((0, 8, 8, 3), np.uint8), [])]], TEST), "x of task 0, batch 0 holds no images"),
        (([[(np.ma.array(batch(5)[0]), [5])]], TEST), "x of task 0, batch 0 is a masked array; wanted a plain one"),
        (([[(batch(5)[0], np.ma.array([5]))]], TEST), "y of task 0, batch 0 is a masked array"),
    ],
)
def test_bad_batches_are_refused(arguments, message):
    with pytest.raises(StreamError, match=message):
        from_batches(*arguments)


@pytest.mark.parametrize(
    ("class_tasks", "message"),
    [
        ([[5, 7], [9]], "batch 1 mixes labels of tasks 0, 1"),
        ([[5, 9]], "batch 0 holds label 7, which class_tasks does not name"),
        ([[5, 7, 9], [2]], r"label 2 of class_tasks\[1\] occurs in no batch"),
        ([[5, 7], [9, 5]], "class_tasks names label 5 2 times"),
        ([[5, 7, 9], []], "task 1 has no batches"),
    ],
)
def test_bad_class_tasks_are_refused(class_tasks, message):
    with pytest.raises(StreamError, match=message):
        from_batches([batch(5, 7), batch(7, 9)], batch(5, 7, 9), class_tasks=class_tasks)
