"""Methods in CapyMOA's loop learn what they learn in our own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from mose_fast.methods import METHODS
from tests.unit.integrations.twins import own_loop

pytest.importorskip("capymoa", reason="CapyMOA is not installed")

from capymoa.ocl.evaluation import ocl_train_eval_loop
from capymoa.stream.torch import TorchStream

from mose_fast.integrations.capymoa import learner

TINY = {"width": 1, "memory": 20, "device": "cpu"}


def learner_for(twin, method, **settings):
    made = TorchStream.from_classification(twin.train[0], num_classes=twin.stream.classes, shape=twin.shape)
    return learner(made.get_schema(), method, **twin.described, **settings)


def trained(twin, learns, **loop):
    """The accuracy on the tasks so far after each task."""
    train = [DataLoader(task, batch_size=twin.stream.batch) for task in twin.train]
    test = [DataLoader(task, batch_size=256) for task in twin.test]
    matrix = ocl_train_eval_loop(learns, train, test, **loop).accuracy_matrix.tolist()
    return [row[: n + 1] for n, row in enumerate(matrix)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mose", "er"])
def test_split_mnist_gives_the_accuracies_of_our_own_loop(mnist, method, one_thread):
    settings = {"width": 8, "memory": 200, "seed": 3, "device": "cpu"}
    learns = learner_for(mnist, method, **settings)
    rows = trained(mnist, learns)
    own_weights, own_rows = own_loop(method, mnist.stream, **settings)
    print(method, rows, own_rows)
    assert learns.learner.weights_hash() == own_weights
    assert [row == pytest.approx(own, abs=1e-6) for row, own in zip(rows, own_rows, strict=True)] == [True] * 5
