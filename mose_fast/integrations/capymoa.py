"""Any method in CapyMOA's loop of online continual learning (docs/integrations.md)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from mose_fast.integrations.adapter import Adapter
from mose_fast.integrations.images import Images
from mose_fast.settings.run import ConfigError, shown, takes_settings

try:
    from capymoa.base import BatchClassifier
    from capymoa.ocl.evaluation import events
    from capymoa.ocl.events import Dispatcher, Handler
    from capymoa.stream import Schema
except ModuleNotFoundError as error:
    raise ImportError(
        f"mose_fast.integrations.capymoa needs CapyMOA ({error}); first: pip install 'mose-fast[capymoa]', and Java"
    ) from error


class LearnerClassifier(BatchClassifier, Handler):
    """A classifier of CapyMOA whose training steps and replay memory are those of a learner; see
    :func:`learner`.

    Attributes:
        learner: The learner, for its memory, its predictions and ``save``.
    """

    def __init__(
        self,
        schema: Schema,
        adapter: Adapter,
        shape: Sequence[int],
        boundaries: bool,
        tasks: Sequence[Collection[int]] | None,
        task_batches: Sequence[int] | None,
    ) -> None:
        super().__init__(schema, random_seed=adapter.learner.config.seed)
        self.learner, self.device = adapter.learner, adapter.learner.device
        self._adapter, self._shape = adapter.eval(), tuple(shape)
        self._boundaries, self._tasks, self._task_batches = boundaries, tasks, task_batches
        # Batches of the current task in all, if known, and so far; passes over it before this one.
        self._batches: int | None = None
        self._trained = self._passed = 0

    def __str__(self) -> str:
        return self.learner.config.method

    def batch_train(self, x: Tensor, y: Tensor) -> None:
        """Learns from images, float [B, C * H * W], and labels, int64 [B]. Raises what
        :meth:`Adapter.observe` does, and ValueError for a batch after its task's end.
        """
        task = self.learner.task
        if task is not None and self.learner.data.ended:
            raise ValueError(
                f"a batch came after the end of task {task}, after {self._trained} batches; task_batches is"
                f" {shown(self._task_batches)}; wanted the number of batches of each task, [epochs * len(s) for s in"
                " train_streams], where the loop evaluates more than once in a task"
            )
        self._adapter.observe(self._images(x), y, store=self._passed == 0)
        self._trained += 1
        if self._boundaries and self._trained == self._batches:
            self.learner.end_task()

    def batch_predict_proba(self, x: Tensor) -> Tensor:
        """Predictions, one-hot float32 [B, K] on the CPU: see :meth:`Adapter.forward`. In the loop,
        batches that are then trained on are predicted in training mode, all others in evaluation
        mode.
        """
        return self._adapter(self._images(x)).cpu()

    def attach_with(self, source: Dispatcher) -> LearnerClassifier:
        """Has a loop tell when tasks and evaluations begin and end; the loop calls it."""
        source.subscribe(events.TrainTaskBegin, self._on_task_begin)
        source.subscribe(events.TrainBatchPredict, self._on_batch)
        source.subscribe(events.TestBegin, self._on_test_begin)
        source.subscribe(events.TestEnd, lambda event: self._adapter.train())
        source.subscribe(events.TrainEnd, self._on_end)
        return self

    def _images(self, x: Tensor) -> Tensor:
        return x.view(len(x), *self._shape)

    def _on_task_begin(self, event: events.TrainTaskBegin) -> None:
        self._adapter.train()
        self._trained, self._passed = 0, -1
        if self._boundaries:
            task = event.train_task
            self._batches = None if self._task_batches is None else self._task_batches[task]
            self._adapter.begin_task(None if self._tasks is None else sorted(self._tasks[task]), self._batches)

    def _on_batch(self, event: events.TrainBatchPredict) -> None:
        self._passed += event.batch == 0

    def _on_test_begin(self, event: events.TestBegin) -> None:
        self._adapter.eval()
        # The loop says that a task has ended only after its last evaluation.
        if self._boundaries and self._batches is None:
            self.learner.end_task()

    def _on_end(self, event: events.TrainEnd) -> None:
        self._adapter.eval()
        if not self.learner.data.ended:
            self.learner.end_task()


@takes_settings
def learner(
    schema: Schema,
    method: str = "mose",
    *,
    shape: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    mirror_safe: bool = True,
    exact_training_accuracy: bool = True,
    boundaries: bool = True,
    tasks: Sequence[Collection[int]] | None = None,
    task_batches: Sequence[int] | None = None,
    **settings: Any,
) -> LearnerClassifier:
    """Creates a learner for ``capymoa.ocl.evaluation.ocl_train_eval_loop``. Labels are taken as
    they are; the number of classes is the schema's.

    Args:
        schema: The benchmark's schema.
        method: The method's name.
        shape: (C, H, W) of the images; None: the schema's.
        mean, std: See :class:`mose_fast.integrations.images.Images`.
        mirror_safe: False where mirroring an image changes its label.
        exact_training_accuracy: Whether the loop's batches, before they are trained on, are
            predicted by the method's own classifier, for which class means cost a pass over the
            memory each time; False: by the last expert's linear classifier.
        boundaries: Whether the learner is told where tasks begin and end; False: all are one task,
            which ends after the loop's last evaluation.
        tasks: The classes of each task (``task_schedule`` of CapyMOA's scenarios), for methods and
            options that want them beforehand.
        task_batches: The number of batches of each task, repeated ones counted again; the task ends
            after the last of them. None: it ends when the first evaluation in it begins, which is
            right where the loop makes one evaluation a task, as it does by default.
        **settings: See :func:`mose_fast.create_learner`; give ``epochs`` as to the loop.

            {settings}

    Raises:
        ConfigError: See :func:`mose_fast.create_learner`.
    """
    shape = tuple(schema.shape if shape is None else shape)
    if len(shape) != 3:
        raise ConfigError(f"shape is {shown(shape)}; wanted (C, H, W), where the schema has no shape of images")
    adapter = Adapter(
        method,
        Images(shape[1:], mean, std),
        exact_training_accuracy=exact_training_accuracy,
        classes=schema.get_num_classes(),
        mirror_safe=mirror_safe,
        **settings,
    )
    return LearnerClassifier(schema, adapter, shape, boundaries, tasks, task_batches)
