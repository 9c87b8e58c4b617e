"""Accuracy at any time: on fixed images of the classes seen so far, between the ends of tasks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from mose_fast.device import upload
from mose_fast.evaluate.one_pass import accuracy_of, on_host
from mose_fast.methods import Learner
from mose_fast.nn import Classifiers, classify
from mose_fast.settings.run import RunConfig
from mose_fast.streams import Stream
from mose_fast.streams.draws import draw_order

# Purpose words for the order of the images and that of the memory's slots: above the words of the
# tasks' orders, below that of the class order.
_IMAGES = 2**62 + 2**61
_SLOTS = _IMAGES + 1


class AnytimeSample:
    """Fixed images that a run is evaluated on every few batches.

    All images that the stream is evaluated on are put in a random order by the run's seed. An
    evaluation takes the first ones whose classes have been seen. So runs with the same seed are
    evaluated on the same images at the same time, whatever their method.
    """

    def __init__(self, config: RunConfig, stream: Stream) -> None:
        self.stream, self.seed = stream, config.seed
        self.images, self.stored = config.anytime_images, config.anytime_stored
        self.order = torch.from_numpy(draw_order(len(stream.y_test), config.seed, _IMAGES))
        self.labels = stream.y_test[self.order]

    def rows(self, seen: Collection[int]) -> Tensor:
        """Images of the classes ``seen`` (head indices), as int64 rows of ``stream.x_test``."""
        return self.order[torch.isin(self.labels, torch.tensor(sorted(seen)))][: self.images]

    def evaluate(self, learner: Learner) -> dict[str, dict[str, float]]:
        """Accuracy in [0, 1] by classifier and expert. Nothing that training depends on changes.

        Class means and what else is fitted are of a few stored images of each class, not of the
        whole memory. Methods that choose exemplars when a task ends have none in the first one: the
        accuracy by all but the linear classifier is 0.
        """
        learner.prepare_evaluation()
        memory = learner.memory
        labels = memory.labels[: memory.filled].cpu()
        slots = upload(self._slots(labels), learner.device)
        fitted = None
        if len(slots):
            outputs = learner.test_outputs(memory.images[slots])
            penalty = learner.config.options.ridge_penalty
            fitted = Classifiers(*outputs, memory.labels[slots], ridge_penalty=penalty)
        rows = self.rows(learner.seen)
        images = self.stream.test_images(rows, len(rows))
        parts = [classify(*learner.test_outputs(part), fitted, learner.evaluated()) for part in images]
        return accuracy_of(on_host(parts), self.stream.y_test[self.stream.tested(rows)])

    def _slots(self, labels: Tensor) -> Tensor:
        """Slots with at most ``stored`` samples of each class, in the seed's random order."""
        if self.stored is None:
            return torch.arange(len(labels))
        order = draw_order(len(labels), self.seed, _SLOTS)
        by_class = order[np.argsort(labels.numpy()[order], kind="stable")]
        counts = np.bincount(labels.numpy())
        rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
        return torch.from_numpy(by_class[rank < self.stored])
