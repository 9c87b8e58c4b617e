"""A learner as a network of another library's benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mose_fast.integrations.images import Images
from mose_fast.methods import create_learner
from mose_fast.settings.run import ConfigError
from mose_fast.train.loop import TrainingDiverged


class Adapter(nn.Module):
    """A learner that takes a benchmark's images, and the number of its task.

    Args:
        method: The method's name.
        images: How images are turned back.
        exact_training_accuracy: See :meth:`forward`.
        settings: Other arguments of :func:`mose_fast.create_learner`.

    ConfigError: an argument is unusable, or the method learns the stream as a whole.
    """

    def __init__(self, method: str, images: Images, *, exact_training_accuracy: bool, **settings: Any) -> None:
        super().__init__()
        self.images, self._exact = images, exact_training_accuracy
        self.learner = create_learner(method=method, **images.spec, **settings)
        train_on = self.learner.config.train_on
        if self.learner.joint_stream or train_on != "stream":
            raise ConfigError(
                f"method {method!r} with train_on {train_on!r} learns the stream as a whole, which another library's"
                " loop does not present; wanted mose_fast.run for it"
            )

    def begin_task(self, classes: Sequence[int] | None = None, batches: int | None = None) -> None:
        """Begins the next task, with its classes and its number of batches, repeated ones counted
        again, as far as they are known.
        """
        learner = self.learner
        learner.begin_task(0 if learner.task is None else learner.task + 1, classes)
        learner.data.task_batches = batches

    def observe(self, x: Tensor, y: Tensor, *, store: bool) -> Tensor:
        """Learns from images (:meth:`Images.raw`) and labels, int64 [B], of the current task; the
        first task begins by itself. Returns the minimised loss, a scalar; 0 if nothing was trained.

        Raises:
            ValueError: An image or a label is unusable.
            TrainingDiverged: A loss is not finite.
        """
        learner = self.learner
        losses = learner.observe(self.images.raw(x), y, learner.task or 0, store=store)
        if learner.diverged:
            raise TrainingDiverged(f"the loss is not finite after step {learner.steps}; lower lr, or use another seed")
        return torch.zeros((), device=learner.device) if losses is None else next(iter(losses.values())).detach()

    def forward(self, x: Tensor) -> Tensor:
        """The prediction for images, one-hot float32 [B, K] on the learner's device, as
        ``learner.predict`` gives it; in training mode by the network as it stands, also where a
        method trains it for evaluations, and, unless the accuracy there is to be exact, by the last
        expert's linear classifier. Zeros while there is nothing to predict from.
        """
        learner, images = self.learner, self.images.raw(x)
        linear = self.training and not self._exact
        classifier, expert = learner.resolve_expert(*(("linear", "last") if linear else ()))
        if not learner.seen or (classifier != "linear" and not learner.memory.filled):
            return torch.zeros(len(x), learner.classes, device=learner.device)
        if self.training:
            labels = learner.present_scores(images, classifier, expert).argmax(-1)
        else:
            # Other libraries switch gradients off, and some methods train here.
            with torch.enable_grad():
                labels = learner.predict(images)
        return F.one_hot(labels.to(learner.device), learner.classes).float()
