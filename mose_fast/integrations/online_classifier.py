"""A learner as scikit-learn's users know classifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from mose_fast.methods import Learner, create_learner
from mose_fast.settings.knob import whole_number
from mose_fast.settings.run import RunConfig, StreamConfig, shown
from mose_fast.streams.arrays import check_images
from mose_fast.train import TrainingDiverged


class OnlineClassifier(ClassifierMixin, BaseEstimator):
    """Any of our methods as a scikit-learn classifier of images, which learns from each row once.

    Images are uint8 [N, H, W, 3], or grey [N, H, W], numpy or torch, with sides divisible by 8, of
    one size in all calls. Labels are [N], of any type that numpy sorts: integers, strings.

    The output layer of the network has a fixed number of classes, which must be known beforehand:
    from ``classes`` at the first :meth:`partial_fit`, or as ``max_classes``. Unusable images,
    labels and settings raise ValueErrors that name them; settings are checked when learning begins.

    Args:
        method: Name of a method, or ``path/to/file.py:Name``.
        preset: One of the method's presets; None: its first.
        memory: Images that the replay memory holds.
        width: Channels of the first stage; 64 is the full ResNet-18.
        batch: Rows of a training step; :meth:`partial_fit` cuts its rows into such batches in their
            order, of which the last may be smaller.
        max_classes: Most classes that may ever come. Labels may then be new in any call, and
            ``classes_`` grows in the order in which they come.
        seed: Seed of weights, memory and augmented views.
        device: ``auto`` (the GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        mean: Mean of images in [0, 1], by channel.
        std: Standard deviation of images in [0, 1], by channel.
        mirror_safe: False where mirroring an image changes its label, as for digits.
        settings: Any others of :meth:`mose_fast.RunConfig.create`, also the method's switches:
            ``{"lr": 0.01, "classifier": "linear"}``.

    Attributes:
        classes_: The labels, in the order of the columns of :meth:`predict_proba`: sorted, then
            those that came later.
        learner_: The :class:`mose_fast.Learner`, which numbers classes by their position in
            ``classes_``.
    """

    def __init__(
        self,
        method: str = RunConfig.method,
        *,
        preset: str | None = None,
        memory: int = RunConfig.memory,
        width: int = RunConfig.width,
        batch: int = StreamConfig.batch,
        max_classes: int | None = None,
        seed: int = RunConfig.seed,
        device: str = RunConfig.device,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        mirror_safe: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.preset = preset
        self.memory = memory
        self.width = width
        self.batch = batch
        self.max_classes = max_classes
        self.seed = seed
        self.device = device
        self.mean = mean
        self.std = std
        self.mirror_safe = mirror_safe
        self.settings = settings

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        return tags

    def fit(self, X: Any, y: Any) -> OnlineClassifier:
        """Starts anew and learns from the rows once, in their order, as one task, which then ends.
        Rows that are sorted by class are forgotten as such a stream is: shuffle them if that is not
        meant.
        """
        for name in ("learner_", "classes_"):
            vars(self).pop(name, None)
        self.partial_fit(X, y, classes=np.unique(np.asarray(y)))
        self.learner_.end_task()
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, task: int | None = None) -> OnlineClassifier:
        """Learns from the rows once, in their order.

        Args:
            X: The images.
            y: Their labels.
            classes: All labels that will ever come; needed in the first call without
                ``max_classes``.
            task: Number of the task that the rows belong to, for methods that use task boundaries
                (docs/methods.md): a new number ends the task before. None: there are no boundaries;
                all rows are of one task, or, after :meth:`fit`, of a second.

        Raises:
            ValueError: Something is unusable; nothing was learned.
            TrainingDiverged: A loss is not finite; the network stays as it was before that batch.
        """
        X, y = check_images(X, "X"), column_or_1d(y, warn=True)
        check_classification_targets(y)
        check_consistent_length(X, y)
        if hasattr(self, "learner_"):
            learner, known = self.learner_, self.classes_
        elif classes is None and self.max_classes is None:
            raise ValueError(
                "classes is None in the first call of partial_fit, and max_classes is None; wanted all labels that will"
                " ever come as classes, or how many there will be at most as max_classes"
            )
        else:
            count = len(np.unique(classes)) if self.max_classes is None else self.max_classes
            if count == 1:
                raise ValueError("there is 1 class; wanted at least two to tell apart")
            learner, known = self._untrained(X.shape[1:3], count), y[:0]
        if classes is not None:
            known = _joined(known, np.unique(classes), learner.classes, "classes")
        known = _joined(known, y, learner.classes, "y")
        learner.data.check_images(X)
        if task is None:
            learner.check_boundaries(learner.config, "no task is given, so there are no task boundaries")
            task = 0 if learner.task is None else learner.task + learner.data.ended
        batch = whole_number("batch", self.batch)
        self.learner_, self.classes_ = learner, known
        place = {label: position for position, label in enumerate(known.tolist())}
        positions = np.array([place[label] for label in y.tolist()])
        for first in range(0, len(X), batch):
            rows = slice(first, first + batch)
            learner.observe(X[rows], positions[rows], task)
        if learner.diverged:
            raise TrainingDiverged("a loss is not finite; wanted a lower lr, in settings, and fit again")
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each image, [N]."""
        check_is_fitted(self)
        return self.classes_[self._scores(X).argmax(-1).numpy()]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, float64 ``[N, len(classes_)]``; they are not calibrated.

        By the linear classifier, the softmax of the logits; by others, of their scores. The
        nearest-class-mean classifier, which ``mose`` and ``scr`` have by default, knows distances
        alone, as ``residual`` does: its probabilities are those of Gaussians of variance 1 around
        the class means of normalised features, all classes equally frequent. That is the softmax of
        -d**2 / 2, or of the cosine similarities. They order the classes, but are close to each
        other: features are not negative, so that no class is more than e times as probable as
        another. Classes without an image in the memory have probability 0.
        """
        check_is_fitted(self)
        scores = self._scores(X).double()
        distances = self.learner_.resolve_expert()[0] in ("ncm", "residual")
        return torch.softmax(scores / 2 if distances else scores, -1).numpy()

    def _scores(self, X: Any) -> Tensor:
        """``[N, len(classes_)]``, on the CPU: see :meth:`mose_fast.Learner.scores`."""
        return self.learner_.scores(check_images(X, "X"))[:, : len(self.classes_)].cpu()

    def _untrained(self, image_size: Sequence[int], classes: int) -> Learner:
        """A learner with the settings as they are now."""
        config = RunConfig.create(
            method=self.method,
            preset=self.preset,
            memory=self.memory,
            width=self.width,
            seed=self.seed,
            device=self.device,
            **(self.settings or {}),
        )
        return create_learner(
            config, classes=classes, image_size=image_size, mean=self.mean, std=self.std, mirror_safe=self.mirror_safe
        )


def _joined(known: np.ndarray, labels: np.ndarray, most: int, what: str) -> np.ndarray:
    """The known labels and those of ``labels`` that are new; ValueError if they are too many."""
    held = set(known.tolist())
    new = [label for label in dict.fromkeys(labels.tolist()) if label not in held]
    if len(known) + len(new) > most:
        raise ValueError(
            f"{what} holds {shown(new[most - len(known)])}, which is one class more than the {most} of the network;"
            " wanted it in classes at the first call, or a larger max_classes"
        )
    return np.concatenate([known, np.array(new, labels.dtype)]) if new else known
