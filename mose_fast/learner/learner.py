"""The learner: what its user calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mose_fast import _loader
from mose_fast.augment import RECIPES, ViewMaker, choose_feed
from mose_fast.device import Choice, choose_precision, resolve_device
from mose_fast.learner.data import IMAGE_SIZE, DataPlane, check_stream
from mose_fast.learner.hooks import Planning
from mose_fast.learner.kept import WRITTEN, KeptValues, survives_json, unsaved
from mose_fast.learner.model import Model
from mose_fast.learner.momentum_teacher import MomentumTeacher, keeps_average
from mose_fast.learner.planner import Planner
from mose_fast.learner.returned import check_returned
from mose_fast.learner.saved import class_of, parts, rebuilt, save_learner
from mose_fast.memory import ReplayMemory
from mose_fast.nn import (
    MEAN_OF_EXPERTS,
    OF_FEATURES,
    Classifiers,
    ClassMeans,
    Cost,
    ExpertNetwork,
    names_of_experts,
    with_mean,
)
from mose_fast.nn.kernels import choose_kernels
from mose_fast.self_check import settle
from mose_fast.settings.knob import plain
from mose_fast.settings.run import CLASSIFIERS, STANDARD, ConfigError, RunConfig, near_matches, shown

K = TypeVar("K", Tensor, nn.Module)

# Attributes whose tensors are saved by themselves or computed again.
_OWN = ("data", "views", "_model", "_classifiers", "_kept")

# Images in a forward pass of an evaluation, unless the configuration has another number.
_EVALUATION_BATCH = {"cpu": 256, "cuda": 2048}


class Learner(Planner):
    """An online learner: sees each batch once, keeps a replay memory, predicts at any time.

    Users call :meth:`observe` and :meth:`predict`. To plan batches ahead, call :meth:`prepare` and
    the prepared batch's ``take`` instead; together they do what :meth:`observe` does. Methods
    override the functions of :class:`mose_fast.learner.hooks.MethodHooks`.

    Args:
        config: The run's settings.
        classes: Number of classes K of the whole stream; labels are 0 ... K - 1.
        image_size: (H, W) of the images, multiples of 8.
        mean: Mean of images in [0, 1], by channel.
        std: Standard deviation of images in [0, 1], by channel.
        mirror_safe: False if mirroring changes the label, as for digits.

    Attributes:
        data: The memory, the tasks and the classes seen.
        views: Makes views of raw images.
        mirrored: Whether images are mirrored, in fixed copies and at random.
        kernels: ``fused`` or ``torch``: the value that the configuration's ``kernels`` has here.
        evaluation_batch: Images in a forward pass of an evaluation.
        precision: The value that the configuration's ``precision`` has here, and why.
        self_check: The verdict on the kernels of this kind of GPU, which the process obeys; None
            where no kernels run.
        stepping: The value that the configuration's ``step`` has here, and why.
        feed: What makes the views, and why.
    """

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
        stream = check_stream(classes=classes, image_size=image_size, mean=mean, std=std, mirror_safe=mirror_safe)
        self._kept = KeptValues()
        self.config = config
        self.classes, self.image_size = stream["classes"], stream["image_size"]
        self.mean, self.std = stream["mean"], stream["std"]
        self.mirrored = stream["mirror_safe"] if config.options.mirror == "auto" else config.options.mirror == "on"
        if config.options.test_mirror and not self.mirrored:
            raise ConfigError(
                "options.test_mirror is True, but mirroring changes the labels of this stream; wanted False, or"
                " options.mirror 'on'"
            )
        if getattr(config.options, "logit_adjustment", 0):
            self.hides_unseen = True  # It leaves classes that a step does not have out of its softmax.
        self.device = resolve_device(config.device)
        self.self_check = settle(self.device)
        self.precision = choose_precision(config.precision, self.device)
        self.stepping = self._choose_step(config.step)
        self.evaluation_batch = config.evaluation_batch or _EVALUATION_BATCH[self.device.type]
        self.kernels = choose_kernels(config.kernels, self.device)
        memory = self.build_memory()
        check_returned(self, "build_memory", memory, isinstance(memory, ReplayMemory), "a ReplayMemory")
        self.data = DataPlane(memory, classes=self.classes, image_size=self.image_size, device=self.device)
        self.data.kept = partial(self._kept.written, "plans")
        self.views = self._build_views()
        self.model = self.build_model()
        self._classifiers: Classifiers | None = None
        self._warned_missing = False
        self._warned_boundaries = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.state is not Learner.state:
            raise ConfigError(
                f"{cls.__qualname__} defines state(), which only copies; wanted self.keep(NAME, TENSOR OR MODULE) in"
                f" {cls.__qualname__}.__init__ for what else a checkpoint must hold"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_kept", ()) and value is not self.__dict__[name]:
            raise ConfigError(
                f"self.{name} of {type(self).__qualname__} is kept, so it must stay the same object; wanted"
                f" self.{name}.copy_(...), or self.keep({name!r}, ...) for one of another shape"
            )
        super().__setattr__(name, value)

    def keep(self, name: str, value: K, *, written: str = "steps") -> K:
        """Makes a tensor or a module of the method's own part of the state, as ``self.<name>`` on
        the learner's device: it is saved, restored and undone with the rest. Call it while the
        learner is built, in ``__init__`` or ``build_model``; later code writes it in place, without
        gradients. Another call with the name replaces it. Returns the value, on the device.

        Args:
            name: Name of the attribute.
            value: The tensor or module; of a module its ``state_dict``.
            written: When it is written. ``steps``: by :meth:`train_on` and what it calls; a step
                whose loss is not finite, and all after it, leave it as it was. ``plans``: by
                :meth:`plan`, :meth:`store` and what they call; undoing a batch restores it.
                ``tasks``: between steps alone, by :meth:`begin_task` or :meth:`on_task_end`, so
                that steps need no copy of it; only then may its shape change during a run.

        Raises:
            ConfigError: One of the arguments is unusable, or the first task has begun.
        """
        call = f"{type(self).__qualname__}.keep({name!r}, ...)"
        if "data" not in self.__dict__:
            raise ConfigError(f"{call} came too early; wanted it after super().__init__(...)")
        if not isinstance(value, Tensor | nn.Module):
            raise ConfigError(f"{call} was given a {type(value).__qualname__}; wanted a tensor or a torch.nn.Module")
        if written not in WRITTEN:
            raise ConfigError(f"{call} has written={written!r}; wanted one of {', '.join(WRITTEN)}")
        taken = hasattr(type(self), name) or self.__dict__.get(name, value) is not value
        value = (value.detach() if isinstance(value, Tensor) and not value.is_leaf else value).to(self.device)
        if name not in self._kept:
            if taken or not name.isidentifier():
                why = f"self.{name} is something else already" if taken else "an attribute cannot have this name"
                raise ConfigError(f"{call}: {why}; wanted another name")
            if self.task is not None:
                raise ConfigError(f"{call} came after the first task had begun; wanted it in __init__")
        elif self.task is not None and written != "tasks" and not self._kept.same_shapes(name, value):
            raise ConfigError(f"{call} has another shape than before; wanted the same, or written='tasks'")
        self._kept.put(name, value, written)
        self.__dict__[name] = value
        return value

    def kept(self) -> dict[str, int]:
        """What the learner has kept from one batch to the next beside its network and optimiser:
        ``images``, the most so far; ``bytes`` of them, with labels and what else is stored beside
        each; ``bytes_beside`` of all else, such as a teacher or statistics of classes.
        """
        others = (t for name, t in self.state()[0].items() if not name.startswith(("network/", "adam/", "memory/")))
        return {
            "images": self.memory.most,
            "bytes": self.memory.most * self.memory.bytes_a_sample,
            "bytes_beside": sum(tensor.nbytes for tensor in others),
        }

    def build_model(self) -> Model:
        """Builds an untrained network, the same for the same seed, and its optimiser."""
        # The weights depend only on their seed, not on the device or on earlier random numbers of
        # the program.
        seed = self.config.seed if self.config.init_seed is None else self.config.init_seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = self.build_network()
        check_returned(self, "build_network", network, isinstance(network, ExpertNetwork), "an ExpertNetwork")
        network.use_kernels(self.kernels)
        network = network.to(self.device, memory_format=torch.channels_last)
        optimiser = self.build_optimiser(network)
        fits = isinstance(optimiser, torch.optim.Optimizer)
        check_returned(self, "build_optimiser", optimiser, fits, "an optimiser of PyTorch's")
        teacher = None
        if keeps_average(options := self.config.options):
            obstacle = self.not_averaged or (options.teacher == "momentum" and self.not_taught)
            if obstacle:
                raise ConfigError(
                    f"options.teacher is {options.teacher!r}, predict_with {options.predict_with!r} and pull_back"
                    f" {options.pull_back!r}, but method {self.config.method!r} {obstacle}; wanted another method, or"
                    " 'none', 'student' and 0"
                )
            teacher = MomentumTeacher(network, optimiser, options)
        return Model(
            network,
            optimiser,
            self.views,
            teacher=teacher,
            predict_with=self.config.options.predict_with,
            precision=self.precision.name,
            evaluation_batch=self.evaluation_batch,
            reads_losses_late=self.reads_losses_late,
        )

    @property
    def shadowed(self) -> bool:
        """Whether the optimiser keeps bf16 copies of the weights."""
        return self.uses_shadows and self.kernels == "fused" and self.precision.name == "bf16"

    def _build_views(self) -> ViewMaker:
        # Augmentations that are no recipe (pad_crop) are made by the method itself.
        recipe = self.config.options.augment if self.config.options.augment in RECIPES else "none"
        self.feed = choose_feed(self.config.feed, self.device, RECIPES[recipe])
        return ViewMaker(
            recipe,
            getattr(self.config.options, "inner_views", 1),
            mirror=self.mirrored,
            mean=self.mean,
            std=self.std,
            jitter_normalised=self.config.options.jitter_domain == "normalised",
            feed=self.feed.name,
        )

    def _choose_step(self, wanted: str) -> Choice:
        obstacle = ""
        if self.device.type != "cuda":
            obstacle = f"the device is {self.device}, and CUDA graphs need a GPU"
        elif self.planning < Planning.CAPTURED:
            obstacle = f"method {self.config.method!r} {self.not_captured}"
        if wanted == "captured" and obstacle:
            raise ConfigError(f"step is 'captured', but {obstacle}; wanted step 'auto' or 'eager'")
        if not obstacle and "captured" in _loader.off:
            obstacle = f"the self-check of captured steps failed: {_loader.off['captured']}"
        if wanted == "eager" or obstacle:
            return Choice("eager", "" if wanted == "eager" or self.device.type != "cuda" else obstacle)
        return Choice("captured")

    # Prediction

    def outputs(self, x: Tensor, student: bool = False) -> tuple[Tensor, Tensor]:
        """Features float32 [E, N, D] and logits float32 [E, N, K] of raw images uint8 [N, H, W, 3],
        in evaluation mode; with :attr:`hides_unseen` the logits of classes not seen are -inf. The
        weights are those that the option ``predict_with`` names, or those of the ``student``.
        """
        features, logits = self.model.outputs(x, self.after_step, student)
        if self.hides_unseen:
            unseen = torch.ones(self.classes, dtype=torch.bool)
            unseen[self.seen] = False
            logits = logits.masked_fill(unseen.to(self.device), -torch.inf)
        return features, logits

    def test_outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What images are classified by: :meth:`outputs`, or with ``options.test_mirror`` the mean
        of those of the images and of their mirrors. The mean is of features before they are
        normalised, so that logits of linear heads remain those of the features.
        """
        if not self.config.options.test_mirror:
            return self.outputs(x)
        images, mirrors = self.outputs(x), self.outputs(x.flip(2))
        return (images[0] + mirrors[0]) / 2, (images[1] + mirrors[1]) / 2

    def classifiers(self, outputs: tuple[Tensor, Tensor] | None = None) -> Classifiers:
        """The classifiers of the current memory; computed once between two batches.

        Args:
            outputs: :meth:`test_outputs` of the memory's samples, if already computed.
        """
        if self._classifiers is None:
            filled = self.memory.filled
            features, logits = self.test_outputs(self.memory.images[:filled]) if outputs is None else outputs
            labels, penalty = self.memory.labels[:filled], self.config.options.ridge_penalty
            self._classifiers = Classifiers(features, logits, labels, ridge_penalty=penalty)
            known = self._classifiers.known.tolist()
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
        return self._classifiers

    def class_means(self) -> ClassMeans:
        """The class means of the current memory."""
        return self.classifiers().means

    def predict(self, x: Tensor | np.ndarray, classifier: str | None = None, expert: str | int | None = None) -> Tensor:
        """Predicts the labels of raw images among the classes seen so far: int64 [N], on the CPU.
        Arguments and errors are those of :meth:`scores`, whose largest values it names.
        """
        return self.scores(x, classifier, expert).argmax(-1).cpu()

    def scores(self, x: Tensor | np.ndarray, classifier: str | None = None, expert: str | int | None = None) -> Tensor:
        """How much raw images look like each class.

        Args:
            x: uint8 [N, H, W, 3].
            classifier: A name in :data:`mose_fast.settings.run.CLASSIFIERS`; None: the
                configuration's.
            expert: ``1`` ... | ``last`` | ``mean`` | ``all``, or a name of the results
                (``mean_distance``, ``mean_logit``, ``mean_score``); None: the configuration's.

        Returns:
            [N, K], on the device; the largest is predicted. ``linear``: logits, float32. All others
            are float64, with -inf for a class without a sample in the memory. ``ncm`` and
            ``residual``: minus squared distances to the class means. ``lda``: log posteriors, up to
            a constant of the image.

        Raises:
            ValueError: Unusable images or names, no class was seen yet, or an empty memory with
                another classifier than ``linear``.
        """
        x = self.data.check_images(x)
        classifier, expert = self.resolve_expert(classifier, expert)
        if not self.seen:
            raise ValueError("no class was seen yet, so there is none to predict; wanted observe() with a batch first")
        self.prepare_evaluation()
        return self.present_scores(x, classifier, expert)

    def present_scores(self, x: Tensor, classifier: str, expert: str) -> Tensor:
        """:meth:`scores` of usable images by the network as it stands; names of the results."""
        features, logits = self.test_outputs(x)
        if classifier == "linear":
            scores = with_mean(logits)
        else:
            scores = self.classifiers().scores(classifier, features, logits, joined=expert == "all")
        # The only row there is, or the mean of experts, comes last.
        return scores[int(expert) - 1 if expert.isdigit() else -1]

    def resolve_expert(self, classifier: str | None = None, expert: str | int | None = None) -> tuple[str, str]:
        """The results' names of this classifier and expert; None: those of the configuration."""
        o = self.config.options
        classifier, expert = o.classifier if classifier is None else plain(classifier), plain(expert)
        if expert is None:
            expert = o.expert
            if expert == "mean" and classifier in STANDARD:
                classifier = "ncm" if o.mean_of_experts == "distance" else "linear"
        expert = str(o.experts) if expert == "last" else str(expert)
        if classifier not in CLASSIFIERS:
            raise ValueError(f"classifier is {classifier!r}{near_matches(classifier, list(CLASSIFIERS))}")
        expert = MEAN_OF_EXPERTS[classifier] if expert == "mean" else expert
        known = names_of_experts(classifier, o.experts, joined=True)
        if expert not in known:
            raise ValueError(
                f"expert is {expert!r} for classifier {classifier!r}; known: last, mean, {', '.join(known)}"
            )
        return classifier, expert

    def evaluated(self) -> dict[str, list[str]]:
        """The results' names of the experts that evaluations report, by classifier."""
        own, expert = self.resolve_expert()
        every = self.config.classifiers == "all"
        names = CLASSIFIERS if every else dict.fromkeys([*STANDARD, own])
        return {name: names_of_experts(name, self.config.options.experts, every or expert == "all") for name in names}

    def costs(self) -> tuple[Cost, Cost]:
        """Parameters and multiply-accumulates an image, in training and for :meth:`predict`."""
        classifier, expert = self.resolve_expert()
        deepest = classifier in OF_FEATURES and expert == str(self.network.experts)
        return self.model.costs(self.image_size, deepest=deepest)

    # State

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that must be restored to continue exactly: tensors by name, contiguous copies each
        with memory of its own, and values for JSON.
        """
        tensors = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in self.tensors().items()
        }
        return tensors, copy.deepcopy(self.values())

    def save(self, path: str | Path) -> None:
        """Writes the learner to one file (safetensors), from which :func:`mose_fast.load_learner`
        continues exactly, also in the middle of a task.

        Args:
            path: The file; an earlier one is replaced.

        Raises:
            ConfigError: Planned steps were not taken, the method holds what is not part of its
                state (:meth:`keep`), or it could not be found by its name.
            StateFileError: The file cannot be written.
        """
        save_learner(self, path)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: as if saved and loaded."""
        return rebuilt, (class_of(self), *parts(self))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of :meth:`state` themselves, which the next step changes."""
        memory = {f"memory/{name}": tensor for name, tensor in self.memory.tensors().items()}
        return self.model.state() | memory | {f"kept/{name}": t for name, t in self._kept.tensors().items()}

    def values(self) -> dict[str, Any]:
        """The values of :meth:`state`."""
        own = {"precision": self.precision.name, "optimiser": self.model.changed_numbers()}
        return self.data.values() | own

    def check_kept(self) -> None:
        """ConfigError for a method that holds tensors, modules or random generators that are not
        part of its state: a run that is resumed would not have them.
        """
        if name := next((name for name, value in self.data.own.items() if not survives_json(value)), None):
            raise ConfigError(
                f"method {self.config.method!r} has {shown(self.data.own[name])} in self.data.own[{name!r}], which a"
                " checkpoint would not give back; wanted numbers, text, lists, and dictionaries with text as keys"
            )
        own = {name: value for name, value in vars(self).items() if name not in (*_OWN, *self._kept)}
        known = [self, *(vars(self)[name] for name in _OWN), *vars(self._model).values()]
        if found := unsaved(own, self.tensors().values(), known):
            path, what = found
            raise ConfigError(
                f"method {self.config.method!r} has a {what} in self.{path}, which is not part of its state, so that a"
                f" resumed run would not have it; wanted self.keep(NAME, TENSOR OR MODULE) in {type(self).__qualname__}"
                ".__init__, plain values in self.data.own, and random numbers of mose_fast.ops.draws"
            )

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restores the result of :meth:`state`, also its precision, where the configuration leaves
        that open. ValueError if it is of another network or memory, or of other kept values.
        """
        values = dict(values)
        precision = values.pop("precision", self.precision.name)
        if self.config.precision == "auto" and precision != self.precision.name:
            self.precision = Choice(precision, "as the run began")
            # The optimiser may keep copies of the weights in this precision.
            self.model = self.build_model()

        def part(owner: str) -> dict[str, Tensor]:
            return {name.removeprefix(owner): t for name, t in tensors.items() if name.startswith(owner)}

        changed = values.pop("optimiser", [])
        self.model.load({name: t for name, t in tensors.items() if not name.startswith(("memory/", "kept/"))}, changed)
        self.data.load(values, part("memory/"))
        self._kept.load(part("kept/"))
        self.__dict__ |= {name: kept.value for name, kept in self._kept.items()}
        self._classifiers = None

    def weights_hash(self) -> str:
        """SHA-256 of all weights and running statistics: equal hashes mean bit-equal networks."""
        return self.model.weights_hash()
