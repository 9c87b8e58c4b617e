"""Small learners and batches for the tests of methods."""

from __future__ import annotations

import pytest
import torch

from mose_fast.methods import Learner, create_learner

# Its asserts then say what they found, as those of a test do.
pytest.register_assert_rewrite("tests.unit.methods.by_hand")

SIZE = 8


@pytest.fixture
def make():
    """A function that creates a small learner of a method; ``options`` and other settings as for
    ``create_learner``.
    """

    def create(method: str, classes: int = 6, **settings) -> Learner:
        given = {"width": 1, "memory": 30, "device": "cpu", **settings}
        given["options"] = {"buffer_batch": min(12, given["memory"]), **settings.get("options", {})}
        return create_learner(method=method, classes=classes, image_size=(SIZE, SIZE), **given)

    return create


@pytest.fixture
def batch():
    """A function from labels to a batch: noise around a brightness that tells the class."""

    def create(labels, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.as_tensor(labels)
        noise = torch.randint(0, 60, (len(y), SIZE, SIZE, 3), generator=torch.Generator().manual_seed(seed))
        return (noise + 30 * y.view(-1, 1, 1, 1)).to(torch.uint8), y

    return create


@pytest.fixture
def teach(batch):
    """A function that feeds a learner ``steps`` batches of ten from each task of two classes, and
    returns it.
    """

    def feed(learner: Learner, steps: int = 4, tasks=(0, 1), seed: int = 0) -> Learner:
        for task in tasks:
            for step in range(steps):
                learner.observe(*batch([2 * task, 2 * task + 1] * 5, seed=1000 * seed + 100 * task + step), task=task)
        return learner

    return feed
