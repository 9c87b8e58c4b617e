"""Any method in a benchmark of Avalanche (docs/integrations.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mose_fast.integrations.adapter import Adapter
from mose_fast.integrations.images import Images
from mose_fast.methods import Learner
from mose_fast.settings.run import takes_settings

try:
    from avalanche.benchmarks import OnlineCLExperience
    from avalanche.training.plugins.evaluation import default_evaluator
    from avalanche.training.templates import SupervisedTemplate
except ModuleNotFoundError as error:
    raise ImportError(
        f"mose_fast.integrations.avalanche needs Avalanche ({error}); first: pip install 'mose-fast[avalanche]'"
    ) from error


class LearnerStrategy(SupervisedTemplate):
    """A strategy whose training steps, optimiser and replay memory are those of a learner; see
    :func:`strategy`. Plugins that measure or log work as usual; callbacks around backward passes
    and updates are not called.
    """

    def __init__(self, *, model: Adapter, **settings: Any) -> None:
        super().__init__(model=model, optimizer=None, criterion=_missed, device=model.learner.device, **settings)
        # Experiences until the task ends; without task boundaries it never does.
        self._coming = 0

    @property
    def learner(self) -> Learner:
        """The learner, for its memory, its predictions and ``save``."""
        return self.model.learner

    def model_adaptation(self, model: Adapter | None = None) -> Adapter:
        """The model as it is: a learner knows all classes from the start."""
        return self.model

    def check_model_and_optimizer(self, **kwargs: Any) -> None:
        """Nothing: the learner has its own optimiser."""

    def _before_training_exp(self, **kwargs: Any) -> None:
        super()._before_training_exp(**kwargs)
        experience, parts = self.experience, 1
        if isinstance(experience, OnlineCLExperience):
            if not experience.access_task_boundaries or not experience.is_first_subexp:
                return
            # Its is_last_subexp is False throughout where all parts are equally large.
            experience, parts = experience.origin_experience, experience.sub_stream_length
        self._coming = parts
        batches = parts * len(self.dataloader) * self.train_epochs
        self.model.begin_task(sorted(experience.dataset.targets.uniques), batches)

    def _after_training_exp(self, **kwargs: Any) -> None:
        self._coming -= 1
        if self._coming == 0:
            self.learner.end_task()
        super()._after_training_exp(**kwargs)

    def training_epoch(self, **kwargs: Any) -> None:
        """One pass over the experience; only the first fills the memory."""
        store = self.clock.train_exp_epochs == 0
        for batch in self.dataloader:
            if self._stop_training:
                break
            self.mbatch = batch
            self._unpack_minibatch()
            self._before_training_iteration(**kwargs)
            self._before_forward(**kwargs)
            self.mb_output = self.forward()
            self._after_forward(**kwargs)
            self.loss = self.model.observe(self.mb_x, self.mb_y, store=store)
            self._after_training_iteration(**kwargs)


def _missed(output: Tensor, y: Tensor) -> Tensor:
    return (output.argmax(1) != y).float().mean()


@takes_settings
def strategy(
    method: str = "mose",
    *,
    classes: int,
    image_size: tuple[int, int] = (32, 32),
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    mirror_safe: bool = True,
    exact_training_accuracy: bool = True,
    train_mb_size: int = 10,
    train_epochs: int = 1,
    eval_mb_size: int = 256,
    plugins: Sequence[Any] | None = None,
    evaluator: Any = default_evaluator,
    eval_every: int = -1,
    peval_mode: str = "epoch",
    **settings: Any,
) -> LearnerStrategy:
    """Creates a strategy that trains a method in a benchmark of Avalanche.

    Each experience is a task, whose classes the learner knows when it begins; of an online stream
    the experience that it was split from, or, where it has no task boundaries, all of it is one
    task, which the caller ends, if at all, by ``learner.end_task()``. Labels are taken as they are.

    Args:
        method: The method's name.
        classes: Number of classes of the whole benchmark; labels are 0 ... K - 1.
        image_size, mean, std: Of the benchmark's images; see
            :class:`mose_fast.integrations.images.Images`.
        mirror_safe: False where mirroring an image changes its label.
        exact_training_accuracy: Whether training batches, before they are trained on, are predicted
            by the method's own classifier, for which class means cost a pass over the memory each
            time; False: by the last expert's linear classifier.
        train_mb_size, train_epochs, eval_mb_size, plugins, evaluator, eval_every, peval_mode: As in
            Avalanche; ``train_epochs`` is the setting ``epochs``, too.
        **settings: See :func:`mose_fast.create_learner`.

            {settings}

    Raises:
        ConfigError: See :func:`mose_fast.create_learner`.
    """
    adapter = Adapter(
        method,
        Images(image_size, mean, std),
        exact_training_accuracy=exact_training_accuracy,
        classes=classes,
        mirror_safe=mirror_safe,
        epochs=train_epochs,
        **settings,
    )
    return LearnerStrategy(
        model=adapter,
        train_mb_size=train_mb_size,
        train_epochs=train_epochs,
        eval_mb_size=eval_mb_size,
        plugins=plugins,
        evaluator=evaluator,
        eval_every=eval_every,
        peval_mode=peval_mode,
    )
