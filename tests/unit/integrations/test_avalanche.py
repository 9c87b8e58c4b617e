"""Methods in Avalanche's loops learn what they learn in our own."""

from __future__ import annotations

import pytest
import torch

from mose_fast.methods import METHODS
from tests.unit.integrations.twins import own_loop

pytest.importorskip("avalanche", reason="avalanche-lib is not installed")

from avalanche.benchmarks import benchmark_from_datasets, split_online_stream
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.training.plugins import EvaluationPlugin

from mose_fast.integrations.avalanche import strategy

TINY = {"width": 1, "memory": 20, "device": "cpu"}


def benchmark_of(twin):
    return benchmark_from_datasets(
        train=[as_classification_dataset(task) for task in twin.train],
        test=[as_classification_dataset(task) for task in twin.test],
    )


def strategy_for(twin, method, **settings):
    spec = {"classes": twin.stream.classes, "image_size": twin.shape[1:], **twin.described}
    metrics = accuracy_metrics(epoch=True, experience=True), loss_metrics(experience=True)
    return strategy(method, **spec, evaluator=EvaluationPlugin(*metrics, loggers=[]), **settings)


def trained(twin, method, **settings):
    """The hash of the weights, and the accuracy on the tasks so far after each task."""
    benchmark, learns = benchmark_of(twin), strategy_for(twin, method, **settings)
    rows = []
    for experience in benchmark.train_stream:
        learns.train(experience, shuffle=False)
        told = learns.eval(benchmark.test_stream)
        rows.append([value for name, value in sorted(told.items()) if name.startswith("Top1_Acc_Exp/eval")])
    return learns.learner.weights_hash(), [row[: n + 1] for n, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mose", "er"])
def test_split_mnist_gives_the_accuracies_of_our_own_loop(mnist, method, one_thread):
    settings = {"width": 8, "memory": 200, "seed": 3, "device": "cpu"}
    weights, rows = trained(mnist, method, **settings)
    own_weights, own_rows = own_loop(method, mnist.stream, **settings)
    print(method, rows, own_rows)
    assert weights == own_weights
    assert [row == pytest.approx(own, abs=1e-9) for row, own in zip(rows, own_rows, strict=True)] == [True] * 5
