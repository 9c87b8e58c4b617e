"""A small stream of real digits and a tiny one of noise, for the tests with other libraries."""

from __future__ import annotations

import pytest
import torch

from mose_fast import streams
from mose_fast.settings.run import StreamConfig
from tests.unit.integrations.twins import SMALL, twin_of


@pytest.fixture(scope="module")
def mnist(real_data):
    """Split MNIST, 28x28 and grey: 50 training images a task, every 40th test image."""
    whole = streams.create(StreamConfig(name="split-mnist", limit_per_task=50, data_dir=str(real_data("mnist"))))
    test = whole.x_test[::40], whole.y_test[::40]
    made = streams.from_arrays(whole.x_train, whole.y_train, *test, normalisation="mnist", mirror_safe=False)
    return twin_of(made, SMALL["seed"], crop=2, channels=1)


@pytest.fixture(scope="module")
def tiny():
    """Two tasks of two classes, 32 images and four batches each, 8x8."""
    labels = torch.arange(84) % 4
    noise = torch.randint(0, 60, (84, 8, 8, 3), generator=torch.Generator().manual_seed(0))
    images = (noise + 45 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    return twin_of(streams.from_arrays(images[:64], labels[:64], images[64:], labels[64:]), 0)
