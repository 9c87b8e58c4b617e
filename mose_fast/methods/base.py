"""What every online learner offers to the loop and to users."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mose_fast.config import ConfigError, RunConfig, near_matches, shown
from mose_fast.device import Choice, choose_precision, upload
from mose_fast.memory import MemoryRecord, ReplayMemory
from mose_fast.nn import CLASSIFIERS, MEAN_OF_EXPERTS, ClassMeans, Cost, check_image_size, classify

if TYPE_CHECKING:
    from mose_fast.methods.registry import About

__all__ = ["IMAGE_SIZE", "DataState", "Learner", "Prepared", "check_stream", "resolve_device"]

#: (H, W) of images, where nothing else is said: CIFAR's.
IMAGE_SIZE = (32, 32)


# Images a forward pass of an evaluation, unless the configuration says otherwise.
_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}


def check_stream(
    *, classes: Any, image_size: Any = IMAGE_SIZE, mean: Any = (0, 0, 0), std: Any = (1, 1, 1), mirror_safe: Any = True
) -> None:
    """Refuses what no stream can be: see :class:`Learner` for what is wanted.

    Raises:
        ConfigError: One of the arguments has another type or form; the message names it.
    """

    def integer(value: Any) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)

    if not integer(classes) or not 2 <= classes < 2**31:
        raise ConfigError(f"classes is {shown(classes)}; wanted an integer of at least 2 (and below 2**31)")
    if (
        not isinstance(image_size, Sequence)
        or len(image_size) != 2
        or not all(integer(side) and 0 < side < 2**31 for side in image_size)
    ):
        raise ConfigError(f"image_size is {shown(image_size)}; wanted height and width in pixels, for example (32, 32)")
    for name, value in (("mean", mean), ("std", std)):
        try:
            numbers = [float(number) for number in value]
        except (TypeError, ValueError, OverflowError):
            numbers = []
        if len(numbers) != 3 or not all(map(math.isfinite, numbers)) or (name == "std" and min(numbers) <= 0):
            above = " above 0" if name == "std" else ""
            raise ConfigError(
                f"{name} is {shown(value)}; wanted three numbers{above}, one for each channel of images in [0, 1]"
            )
    if not isinstance(mirror_safe, bool | np.bool_):
        raise ConfigError(f"mirror_safe is {shown(mirror_safe)}; wanted True or False")
    check_image_size(*image_size)


def resolve_device(name: str) -> torch.device:
    """The device that a configuration's ``device`` means here.

    Raises:
        ConfigError: A card is asked for and there is none, or none of that number.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = (
                "this torch was built without CUDA"
                if torch.version.cuda is None
                else "torch sees no GPU (is there a driver?)"
            )
            raise ConfigError(
                f"device is {name!r}, but {why}; wanted a machine with an NVIDIA GPU, or cpu", instead=("device", "cpu")
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPU(s); wanted a lower number"
            )
    return device


class DataState(NamedTuple):
    """What a batch changes beside the model, as it was before.

    Attributes:
        values: Of :attr:`Learner.remembered`.
        memory: Undoes what happened to the memory.
    """

    values: dict[str, Any]
    memory: MemoryRecord


@dataclass(frozen=True, eq=False)
class Prepared:
    """A batch between :meth:`Learner.prepare` and :meth:`Learner.consume`.

    Attributes:
        before: The state before the batch came, for :meth:`Learner.roll_back`.
        plan: Of a learner that plans ahead, what its ``plan`` gave: None where the batch trains
        nothing.
        incoming: Of the others, the arguments of :meth:`Learner.observe`, all of which is still to
        do.
        rehearsed: Of training on the final memory, the slots.
        inputs: The step's inputs as a captured step wants them, where there is one.
        views: The step's views, where they were made ahead: see :meth:`Learner.views_ahead`.
    """

    before: DataState
    plan: Any = None
    incoming: dict[str, Any] | None = None
    rehearsed: Tensor | None = None
    inputs: Any = None
    views: Tensor | None = None


class Learner(ABC):
    """An online learner: sees each batch once, keeps a replay memory, predicts at any time.

    Subclasses implement :meth:`train_batch`, :meth:`rehearse`, :meth:`outputs`, :meth:`costs`,
    :meth:`network_state` and :meth:`load_network_state`.

    The loop calls :meth:`prepare` and :meth:`consume`, which together do what :meth:`observe` does.
    Learners that plan ahead do in :meth:`prepare` all that concerns data alone, so that it can run
    several batches before the model.

    Args:
        config: The run's settings.
        classes: Number of classes K of the whole stream; labels are 0 ... K - 1.
        image_size: (H, W) of the images, multiples of 8.
        mean: Of images in [0, 1], by channel.
        std: Alike.
        mirror_safe: False where mirroring changes the label, as for digits.

    Attributes:
        memory: The replay memory.
        seen: All labels seen so far, in order of appearance.
        current: The labels of the current task seen so far, in order of appearance.
        steps: Training steps taken.
        mirrored: Whether images are mirrored, in fixed copies and at random.
        kernels: ``fused`` or ``torch``, what the configuration's ``kernels`` became; None for
        learners without an :class:`ExpertNetwork`.
        evaluation_batch: Images a forward pass of an evaluation.
        precision: What the configuration's ``precision`` became, and why.
        stepping: What the configuration's ``step`` became, and why.
        feed: What makes the views, and why; None for learners that make none by
            :mod:`mose_fast.augment`.
    """

    #: True where replay rows are chosen by looking at the model, so that batches cannot be planned
    #: ahead of training.
    plan_depends_on_model: ClassVar[bool] = False

    #: True where :meth:`prepare` plans the step, by ``plan(x, y)``, and fills the memory, and
    #: :meth:`consume` calls ``step`` with the plan. Neither ``plan`` nor ``store`` may then look at
    #: the model or at what training changes.
    plans_ahead: ClassVar[bool] = False

    #: True where the step can be captured as a CUDA graph besides, which asks for what
    #: :class:`mose_fast.train.captured.CapturedSteps` calls. On a card, its losses are read only
    #: after later steps were launched.
    capturable: ClassVar[bool] = False

    #: True for the upper bound that sees the data of all tasks shuffled into one: the loop presents
    #: the stream as a single task.
    joint_stream: ClassVar[bool] = False

    #: What the method does where the whole stream is one task, by a switch and the value of it that
    #: needs task boundaries: the end of a sentence about the method. The page of methods lists it,
    #: and a learner whose options have such a value warns.
    without_boundaries: ClassVar[Mapping[tuple[str, Any], str]] = {}

    #: Year, reference, cost and presets; the decorator :func:`mose_fast.methods.method` sets it.
    about: ClassVar[About]

    #: Attributes with plain values that a checkpoint must hold; subclasses extend it.
    remembered: ClassVar[tuple[str, ...]] = ("task", "first_task", "task_classes", "seen", "current", "steps")

    def __init__(
        self,
        config: RunConfig,
        *,
        classes: int,
        image_size: tuple[int, int] = IMAGE_SIZE,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        mirror_safe: bool = True,
    ) -> None:
        check_stream(classes=classes, image_size=image_size, mean=mean, std=std, mirror_safe=mirror_safe)
        self.config = config
        self.classes = classes
        self.image_size = tuple(image_size)
        self.mean, self.std = tuple(mean), tuple(std)
        self.mirrored = mirror_safe if config.options.mirror == "auto" else config.options.mirror == "on"
        self.device = resolve_device(config.device)
        self.precision = choose_precision(config.precision, self.device)
        self.feed: Choice | None = None
        self.kernels: str | None = None
        self.stepping = self._choose_step(config.step)
        self.evaluation_batch = config.evaluation_batch or _EVALUATION_BATCH[self.device.type]
        self.memory = self.build_memory()
        self.task: int | None = None
        self.first_task: int | None = None
        self.task_classes: list[int] | None = None
        self.seen: list[int] = []
        self.current: list[int] = []
        self.steps = 0
        # Planned steps that were not taken yet.
        self._ahead = 0
        self._means: ClassMeans | None = None
        self._warned_missing = False
        self._warned_boundaries = False

    @property
    def sequence(self) -> int:
        """Number of the step that is planned next, from 0; it decides the step's random views."""
        return self.steps + self._ahead

    @property
    def reads_losses_late(self) -> bool:
        """Whether losses are read only after later steps were launched."""
        return self.capturable and self.device.type == "cuda"

    @property
    def diverged(self) -> bool:
        """True once a loss was not finite: since then nothing is trained and nothing stored.

        On a card this waits for it.
        """
        return False

    # The stream

    def begin_task(self, task: int, classes: Sequence[int] | None = None) -> None:
        """Starts a task. :meth:`observe` does it by itself when the task changes.

        Args:
            task: Any number that no other task has.
            classes: All labels of the task, where they are known beforehand.
        """
        self.task = int(task)
        self.first_task = self.task if self.first_task is None else self.first_task
        self.task_classes = None if classes is None else [int(c) for c in classes]
        self.current = []

    def observe(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray | Sequence[int],
        task: int,
        *,
        index: Tensor | None = None,
        train: bool = True,
        store: bool = True,
    ) -> dict[str, Tensor] | None:
        """Learns from one incoming batch, then offers it to the memory.

        Args:
            x: uint8 [B, H, W, 3], raw images.
            y: integers [B] in 0 ... K - 1.
            task: The task that the batch belongs to.
            index: int64 [B], positions in the original stream, kept in the memory; None: counted
            from 0.
            train: False only stores the batch.
            store: False leaves the memory as it is (every epoch after the first).

        Returns:
            The step's losses by name, as scalars on the learner's device; None where nothing was
            trained.

        Raises:
            ValueError: The batch has the wrong shape, dtype or labels. Nothing has changed then.
        """
        x, y, index = self._receive(*self._check_batch(x, y), task, index)
        losses = self.train_batch(x, y) if train else None
        self._means = None
        # Where losses are read late there is no time to ask.
        if store and (self.reads_losses_late or losses is None or not self.diverged):
            self.store(x, y, index)
        return losses

    def prepare(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray | Sequence[int],
        task: int,
        *,
        index: Tensor | None = None,
        train: bool = True,
        store: bool = True,
    ) -> Prepared:
        """Does all of :meth:`observe` that does not need the model; arguments and errors as there.

        A learner that plans ahead chooses the step's rows and fills the memory here, and may
        prepare more batches before it consumes this one. ``x`` may lie on the learner's device
        already; ``y`` on the host is read without waiting for a card.
        """
        x, y = self._check_batch(x, y)
        if not self.plans_ahead:
            incoming = {"x": x, "y": y, "task": task, "index": index, "train": train, "store": store}
            return Prepared(self._data_state(), incoming=incoming)
        before = self._data_state(len(x) if store else 0)
        x, y, index = self._receive(x, y, task, index)
        plan = self.plan(x, y) if train else None
        if store:
            self.store(x, y, index)
        self._means = None
        self._ahead += plan is not None
        return Prepared(before, plan)

    def prepare_rehearsal(self, slots: Tensor) -> Prepared:
        """Prepares :meth:`rehearse`, which then is all left to do; no other batch may be
        prepared.
        """
        return Prepared(self._data_state(), rehearsed=slots)

    def consume(
        self, prepared: Prepared, step: Callable[[Prepared], dict[str, Tensor]] | None = None
    ) -> dict[str, Tensor] | None:
        """Does the rest of :meth:`observe` for the oldest batch that was prepared.

        Args:
            prepared: What :meth:`prepare` gave.
            step: Takes the step of a learner that plans ahead; None: its own ``step`` with the
                plan.

        Returns:
            As :meth:`observe`.
        """
        if prepared.incoming is not None:
            return self.observe(**prepared.incoming)
        if prepared.rehearsed is not None:
            losses = self.rehearse(prepared.rehearsed)
            if self.reads_losses_late and self.diverged:
                self.steps -= 1
            return losses
        self._means = None
        if prepared.plan is None:
            return None
        self._ahead -= 1
        if step is not None:
            return step(prepared)
        return self.step(prepared.plan) if prepared.views is None else self.step(prepared.plan, prepared.views)

    def views_ahead(self, prepared: Prepared) -> Callable[[], Tensor] | None:
        """What makes the views of a prepared batch's step on another thread, before
        :meth:`consume`; None: the step makes them itself.

        A learner that gives such a function finds its result in ``prepared.views``, and its
        ``step`` takes it as the second argument. The function reads nothing but the plan and what
        never changes.
        """
        return None

    def roll_back(self, prepared: Prepared, *, consumed: bool = False) -> bool:
        """Undoes a batch that was prepared; of several, the newest first.

        Args:
            prepared: What :meth:`prepare` gave.
            consumed: Whether it was consumed as well.

        Returns:
            Whether all is as before the batch. After a step that is so only if it changed nothing:
            its loss was not finite, and this was seen before any weight changed.
        """
        values = dict(prepared.before.values)
        steps = values.pop("steps")
        planned = int(prepared.plan is not None)
        exact = True
        if not consumed:
            self._ahead -= planned
        elif prepared.incoming is None and prepared.rehearsed is None:
            exact = not planned or self.diverged
            # Where the host did not know that the step changed nothing, it was counted.
            self.steps -= planned if self.reads_losses_late else 0
        else:
            exact = self.diverged and self.steps == steps
            self.steps = steps
        for name, value in values.items():
            setattr(self, name, value)
        self.memory.restore(prepared.before.memory)
        self._means = None
        return exact

    def _choose_step(self, wanted: str) -> Choice:
        obstacle = ""
        if self.device.type != "cuda":
            obstacle = f"the device is {self.device}, and CUDA graphs are a card's"
        elif not self.capturable:
            why = (
                "looks at the network to plan a step"
                if self.plan_depends_on_model
                else "has no step that could be captured"
            )
            obstacle = f"method {self.config.method!r} {why}"
        if wanted == "captured" and obstacle:
            raise ConfigError(f"step is 'captured', but {obstacle}; wanted step 'auto' or 'eager'")
        if wanted == "eager" or obstacle:
            return Choice("eager", "" if wanted == "eager" or self.device.type != "cuda" else obstacle)
        return Choice("captured")

    def _receive(self, x: Tensor, y: Tensor, task: int, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Registers a checked batch's task and labels; returns it on the device."""
        if index is None:
            index = torch.arange(self.memory.seen, self.memory.seen + len(x))
        if task != self.task:
            self.begin_task(task)
        for label in y.tolist():
            if label not in self.seen:
                self.seen.append(label)
            if label not in self.current:
                self.current.append(label)
        # Nobody said which classes the task has, so that it may be a constant. Of several equal
        # tasks none has more than half of them.
        if task == self.first_task and self.task_classes is None and 2 * len(self.current) > self.classes:
            self.warn_of_boundaries(
                f"{len(self.current)} of {self.classes} classes came in task {task}, the only one so far"
            )
        return upload(x, self.device), upload(y, self.device), upload(index, self.device).to(torch.int64)

    def warn_of_boundaries(self, found: str) -> None:
        """Warns, once, where an option needs task boundaries and there are none.

        Args:
            found: What shows that, as the end of "..., but".
        """
        for (switch, value), effect in self.without_boundaries.items():
            if not self._warned_boundaries and getattr(self.config.options, switch, None) == value:
                self._warned_boundaries = True
                warnings.warn(
                    f"options.{switch} of method {self.config.method!r} is {value!r}, which needs several tasks, but"
                    f" {found}: without task boundaries the method {effect} (said once)",
                    stacklevel=4,
                )

    def _data_state(self, upcoming: int = 0) -> DataState:
        return DataState(
            {name: copy.copy(getattr(self, name)) for name in self.remembered}, self.memory.record(upcoming)
        )

    def end_task(self) -> None:  # noqa: B027 - most methods have nothing to do here
        """Ends the current task."""

    def prepare_evaluation(self) -> None:  # noqa: B027 - most methods are ready at any time
        """Called before every evaluation and prediction; methods that train only when asked do it
        here.

        Calling it again before the next batch changes nothing. Methods that train here call
        :meth:`after_step` after every step.
        """

    def after_step(self) -> None:  # noqa: B027 - whoever does not watch puts nothing here
        """Called after each step of what takes many at once: an evaluation, a training for it, a
        review at the end of a task.

        Whoever drives the learner may put a function in its place, to watch it or to stop it by
        raising; the state from before is then what counts.
        """

    def build_memory(self) -> ReplayMemory:
        """The empty replay memory; methods with another policy or with more to keep for each slot
        override it.
        """
        return ReplayMemory(self.config.memory, self.image_size, seed=self.config.seed, device=self.device)

    def store(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Offers a batch to the memory after its training step; arguments as those of
        :meth:`observe`, checked and on the device.

        Returns:
            int64 [B]: the slot in which each item lies now, -1 where it was not kept.
        """
        return self.memory.insert(x, y, self.task, index)

    @abstractmethod
    def train_batch(self, x: Tensor, y: Tensor) -> dict[str, Tensor] | None:
        """One training step on a checked batch on the device; labels are registered already, the
        memory does not hold the batch yet.
        """

    def describe(self, prepared: Prepared) -> str:
        """How large a step is, for messages."""
        if prepared.rehearsed is not None:
            return f"{len(prepared.rehearsed)} rows of the memory"
        return "a plan of its own" if prepared.incoming is None else f"{len(prepared.incoming['x'])} incoming rows"

    @abstractmethod
    def rehearse(self, slots: Tensor) -> dict[str, Tensor]:
        """One training step on memory slots alone (training on the final memory)."""

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Makes fp32 mean fp32: cuDNN's convolutions use TF32 (10 bits of mantissa) on their own,
        unlike PyTorch's matrix products.
        """
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = self.precision.name == "tf32"
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before

    # Prediction

    @abstractmethod
    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features float32 [E, N, D] and logits float32 [E, N, K] of raw images uint8 [N, H, W, 3],
        in evaluation mode.
        """

    def class_means(self, features: Tensor | None = None) -> ClassMeans:
        """The prototypes that the memory gives now; computed once between two batches.

        Args:
            features: [E, filled, D] of the memory's samples, where the caller has them already.
        """
        if self._means is None:
            filled = self.memory.filled
            if features is None:
                features = self.outputs(self.memory.images[:filled])[0]
            self._means = ClassMeans(features, self.memory.labels[:filled], self.classes)
            known = self._means.known.tolist()
            missing = [c for c in sorted(self.seen) if not known[c]]
            if missing and filled and not self._warned_missing:
                self._warned_missing = True
                shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
                warnings.warn(
                    f"{len(missing)} of {len(self.seen)} classes seen have no sample in the memory of"
                    f" {self.memory.capacity} ({shown}); the nearest-class-mean classifier cannot predict them (said"
                    " once)",
                    stacklevel=2,
                )
        return self._means

    def predict(self, x: Tensor | np.ndarray, classifier: str | None = None, expert: str | int | None = None) -> Tensor:
        """Labels of raw images, by the classes seen so far.

        Args:
            x: uint8 [N, H, W, 3].
            classifier: ``ncm`` | ``linear``; None: the configuration's.
            expert: ``1`` ... | ``last`` | ``mean``, or a name of the results (``mean_distance``,
                ``mean_logit``); None: the configuration's.

        Returns:
            int64 [N], on the CPU.

        Raises:
            ValueError: Unusable images or names, or an empty memory with ``ncm``.
        """
        x = self._check_images(x)
        classifier, expert = self.resolve_expert(classifier, expert)
        self.prepare_evaluation()
        features, logits = self.outputs(x)
        if classifier == "linear":
            votes = logits.mean(0) if expert == "mean_logit" else logits[int(expert) - 1]
            return votes.argmax(-1).cpu()
        return classify(features, logits, self.class_means())[classifier][expert].cpu()

    def resolve_expert(self, classifier: str | None = None, expert: str | int | None = None) -> tuple[str, str]:
        """The names under which the results hold the classifier and expert asked for; None means
        the configuration's.
        """
        o = self.config.options
        classifier = o.classifier if classifier is None else classifier
        if expert is None:
            expert = o.expert
            if expert == "mean":
                classifier = "ncm" if o.mean_of_experts == "distance" else "linear"
        expert = str(o.experts) if expert == "last" else str(expert)
        if classifier not in CLASSIFIERS:
            raise ValueError(f"classifier is {classifier!r}{near_matches(str(classifier), list(CLASSIFIERS))}")
        mean = MEAN_OF_EXPERTS[classifier]
        expert = mean if expert == "mean" else expert
        known = [*(str(e + 1) for e in range(o.experts)), mean]
        if expert not in known:
            raise ValueError(
                f"expert is {expert!r} for classifier {classifier!r}; known: last, mean, {', '.join(known)}"
            )
        return classifier, expert

    @abstractmethod
    def costs(self) -> tuple[Cost, Cost]:
        """Parameters and multiply-accumulates an image of the network in training, and of what
        :meth:`predict` needs by default.
        """

    # State

    @abstractmethod
    def network_state(self) -> dict[str, Tensor]:
        """Weights, running statistics and optimiser state, by name."""

    @abstractmethod
    def load_network_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what :meth:`network_state` gave."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that must be restored to continue exactly: tensors by name, and plain values
        for JSON.
        """
        tensors = self.network_state() | {f"memory/{name}": tensor for name, tensor in self.memory.tensors().items()}
        values = {name: copy.copy(getattr(self, name)) for name in self.remembered}
        return tensors, values | {"precision": self.precision.name}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Takes over what :meth:`state` gave. Where the configuration leaves the precision open, it
        is that of the state from now on.

        Raises:
            ValueError: The state belongs to another network or memory.
        """
        precision = values.get("precision", self.precision.name)
        if self.config.precision == "auto" and precision != self.precision.name:
            self.change_precision(Choice(precision, "as the run began"))
        memory = {name.removeprefix("memory/"): t for name, t in tensors.items() if name.startswith("memory/")}
        self.load_network_state({name: t for name, t in tensors.items() if not name.startswith("memory/")})
        self.memory.load(memory)
        for name in self.remembered:
            setattr(self, name, copy.copy(values[name]))
        self._ahead = 0
        self._means = None

    def change_precision(self, precision: Choice) -> None:
        """Computes in another precision from now on.

        What the learner has learned may be lost: a state is loaded next.
        """
        self.precision = precision

    def weights_hash(self) -> str:
        """SHA-256 of all weights and running statistics: equal hashes mean bit-equal networks."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.network_state().items()):
            if name.startswith("network/"):
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # Checks

    def _check_images(self, x: Tensor | np.ndarray) -> Tensor:
        x = torch.as_tensor(x)
        if x.dtype != torch.uint8:
            nan = x.is_floating_point() and bool(x.isnan().any())
            raise ValueError(
                f"x has dtype {x.dtype}{' and holds NaN' if nan else ''}; wanted raw images in uint8, 0 to 255"
            )
        wanted = f"[N, {self.image_size[0]}, {self.image_size[1]}, 3]"
        if x.ndim != 4 or tuple(x.shape[1:]) != (*self.image_size, 3):
            hint = " (channels come last)" if x.ndim == 4 and x.shape[1] == 3 else ""
            raise ValueError(f"x has shape {list(x.shape)}; wanted {wanted}{hint}")
        return x

    def _check_batch(self, x: Tensor | np.ndarray, y: Tensor | np.ndarray | Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = self._check_images(x), torch.as_tensor(y)
        if len(x) == 0:
            raise ValueError("x is an empty batch; wanted at least one image")
        if y.ndim != 1 or len(y) != len(x):
            raise ValueError(f"y has shape {list(y.shape)} for {len(x)} images; wanted [{len(x)}]")
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y has dtype {y.dtype}; wanted integers")
        y = y.to(torch.int64)
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self.classes:
            raise ValueError(
                f"y holds {low if low < 0 else high}; wanted labels of 0 to {self.classes - 1}, since classes is"
                f" {self.classes}"
            )
        return x, y
