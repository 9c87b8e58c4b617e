"""Every setting of a run: its default, what it may hold, what it does and where it comes from.

Each is declared once, by :func:`.knob.knob`; docs/settings.md lists them all. Sources are
abbreviated: *paper* is the CVPR 2024 text taken literally, *released* is the authors' public code
(AnAppleCore/MOSE, commit c24a0e6), *choice* is ours where neither decides. A method's own options
and presets are in its file.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mose_fast.settings.knob import (
    SHOWN,
    ConfigError,
    Declared,
    Search,
    documented,
    knob,
    meanings,
    near_matches,
    plain,
    settings_of,
    shown,
    usable_path,
)

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def read_table(path: Path, what: str) -> Any:
    """The contents of a ``.toml`` or ``.json`` file, which is ``what``; ConfigError if it cannot be
    read.
    """
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; wanted tables of settings") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error


_problem = partial(knob, role="problem")
_execution = partial(knob, role="execution")
_bookkeeping = partial(knob, role="bookkeeping")


#: Kinds of streams that do not tell the learner where tasks begin and end.
WITHOUT_BOUNDARIES = ("blurry", "si_blurry", "task_free")


@documented
@dataclass(frozen=True)
class StreamConfig(Declared):
    """What arrives: the data set, its split into tasks and the order of its classes."""

    owner = "stream."

    name: str = _problem(
        "digits",
        "a registered stream, a folder {train,test}/<class>/file.jpg, or an .npz file",
        wanted="the name of a stream, a folder or an .npz file",
        flag="stream",
    )
    data_dir: str | None = _bookkeeping(
        None, "folder with the data set's files", wanted="a folder", none="~/.cache/mose_fast", flag=True
    )
    tasks: int | None = _problem(
        None,
        "tasks that the classes are split into, in class order; without task boundaries, parts to evaluate after",
        low=1,
        none="the stream's own",
        flag=True,
    )
    batch: int = _problem(10, "incoming images a step", "paper 5.1; released", low=1, flag=True)
    first_tasks: int | None = _problem(
        None, "the stream ends after this many of its tasks, and has their classes alone", low=1, none="all", flag=True
    )
    limit_per_task: int | None = _problem(
        None, "training images a task at most, balanced over its classes", low=1, none="all", flag=True
    )
    validation: float | None = _problem(
        None,
        "share of each class's training images that are held out: never trained on, never in the memory",
        above=0,
        below=1,
        none="none",
        flag=True,
        cost=True,
    )
    validation_seed: int = _problem(0, "seed that the held-out images are drawn from", low=0, cost=False)
    kind: str = _problem(
        "tasks",
        "how classes come",
        "docs/streams.md has the definitions",
        choices={
            "tasks": "task by task",
            "imbalanced": "task by task, with fewer and fewer images a class",
            "blurry": "i-Blurry: no task boundaries; some classes come in one part, others have images in all parts",
            "si_blurry": "Si-Blurry: likewise, in random numbers",
            "task_free": "without task boundaries; the classes' probabilities drift",
        },
        flag=True,
    )
    kind_seed: int = _problem(
        0, "seed that classes and images of kinds other than tasks are chosen by", low=0, cost=False
    )
    disjoint: float = _problem(
        0.5, "blurry, si_blurry: share of classes that come in one part", "Koh et al. 2022: N = 50 %", low=0, below=1
    )
    blur: float = _problem(
        0.1,
        "blurry, si_blurry: share of the other classes' images that come in other parts",
        "Koh et al. 2022: M = 10 %",
        low=0,
        below=1,
    )
    imbalance: float = _problem(
        100.0,
        "imbalanced: how many times as many images the first class has as the last",
        "Liu et al. 2022: 100",
        low=1,
        cost=True,
    )
    drift: float = _problem(
        0.05,
        "task_free: standard deviation of the times at which a class comes, as a share of the stream",
        "Shanahan et al. 2021: 50 of 1,000 batches",
        above=0,
    )
    class_order_seed: int | None = _problem(
        None, "seed that the order of classes is drawn from", low=0, none="the natural order", flag=True, cost=False
    )
    normalisation: str | None = _problem(
        None, "name of the images' constants", wanted="the name of constants", none="the stream's own", flag=True
    )
    decoder: str = _bookkeeping(
        "auto",
        "what reads image files, with the same pixels",
        choices={"auto": "dali where it is installed and there are 2,000 files or more", "pil": "", "dali": ""},
        flag=True,
    )
    load: str = _bookkeeping(
        "auto",
        "where an image folder's images are, with the same results",
        choices={
            "auto": "memory where three times the decoded images are free, else disk",
            "memory": "all are decoded at the start",
            "disk": "each is decoded when it comes",
        },
        flag=True,
        cost=True,
    )
    on_error: str = _bookkeeping(
        "stop",
        "what happens at an image file that is damaged or of another size",
        choices={"stop": "", "skip": "it is left out and results.json names it; load is disk then"},
        flag=True,
    )
    resize: int | None = _problem(
        None,
        "side in pixels that an image folder's images are resized and centre-cropped to",
        low=8,
        multiple=8,
        none="as they are",
        flag=True,
    )
    # What data two configurations found is compared where it matters, with its own message.
    fingerprint: str | None = _problem(
        None,
        "hash of the data's content, which a run writes here; data with another one are refused",
        pattern="[0-9a-f]{16}",
        wanted="a fingerprint of data, 16 hexadecimal digits",
        none="any data",
        cost=False,
        alters=False,
        compare=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_error == "skip" and self.load == "memory":
            raise ConfigError(
                "stream.on_error is 'skip' with stream.load 'memory', which decodes all images at the start; wanted"
                " stream.load 'disk', or stream.on_error 'stop'"
            )


#: Recipes of the random views, and what each draws.
RECIPES = {
    "ocm": "gray, crop",
    "simclr": "flip, gray, crop",
    "scr": "crop, flip, jitter, gray",
    "gsa": "gray, smaller crop",
    "pad_crop": "4 black pixels around; flip",
    "none": "",
}


# Ranges that settings of several methods have.
LEARNING_RATES = Search(
    1e-4, 1e-1, log=True, source="choice: from a tenth of Adam's 1e-3 (paper 5.1) to the repositories' 0.1 with SGD"
)
WEIGHT_DECAYS = Search(1e-6, 1e-2, log=True, source="choice: two decades around 1e-4 (paper 5.1)")
CONTRASTIVE_TEMPERATURES = Search(0.02, 0.5, log=True, source="choice: from below SCR's 0.07 to Co2L's 0.5")


#: Tasks that replayed rows come from, and when the classes of the current task are known.
REPLAY_FROM = {"all": "", "others": "every task but the current"}
CURRENT_CLASSES = {"seen": "those seen so far in it", "task": "all of it, known at its start"}


#: What classifies (docs/specification/mose.md section 7); the :data:`STANDARD` ones are always
#: evaluated.
CLASSIFIERS = {
    "ncm": "nearest class mean",
    "linear": "",
    "lda": "linear discriminant analysis",
    "ridge": "regression",
    "residual": "neighbours' residuals",
    "adjusted": "linear, less its prior",
    "ncm_linear": "mean",
    "lda_adjusted": "mean",
}
STANDARD = ("ncm", "linear")


@documented
@dataclass(frozen=True)
class MethodOptions(Declared):
    """Switches that every method has. Methods add theirs in a subclass, each a :func:`knob`."""

    owner = "options."

    #: Number of experts, the one that predicts by default, and what their mean averages; methods
    #: with one network have one.
    experts: ClassVar[int] = 1
    expert: ClassVar[str] = "last"
    mean_of_experts: ClassVar[str] = "distance"
    #: What methods that do not train on incoming batches (:class:`ReplayOptions`) have instead.
    iterations: ClassVar[int] = 1
    memory_policy: ClassVar[str] = "reservoir"
    review: ClassVar[bool] = False
    teacher: ClassVar[str] = "none"
    predict_with: ClassVar[str] = "student"
    pull_back: ClassVar[float] = 0.0

    init: str = knob(
        "kaiming_fan_out",
        "initialisation of convolutions",
        "released; the paper is silent",
        choices={"kaiming_fan_out": "", "default": "PyTorch's"},
    )
    buffer_batch: int = knob(64, "rows of the buffer set", "paper 5.1; released", low=1)
    augment: str = knob(
        "ocm",
        "recipe of the views",
        "released default: ocm; paper: simclr",
        choices={name: about for name, about in RECIPES.items() if name != "pad_crop"},
    )
    jitter_domain: str = knob(
        "unit",
        "what colour jitter acts on",
        "choice; released: normalised",
        choices={"unit": "images in [0, 1]", "normalised": "normalised images, clamped, as released"},
    )
    mirror: str = knob(
        "auto",
        "mirroring and random flips",
        "choice; both sources only know natural images",
        choices={"auto": "off where they change labels", "on": "", "off": ""},
    )
    lr: float = knob(1e-3, "learning rate of Adam", "paper 5.1; released", above=0, search=LEARNING_RATES)
    weight_decay: float = knob(
        1e-4, "weight decay of Adam, added to the gradient", "paper 5.1; released", low=0, search=WEIGHT_DECAYS
    )
    beta1: float = knob(0.9, "first moment's decay", "released (PyTorch's default)", low=0, below=1)
    beta2: float = knob(0.999, "second moment's decay", "released (PyTorch's default)", low=0, below=1)
    eps: float = knob(1e-8, "Adam's epsilon", "released (PyTorch's default)", above=0)
    classifier: str = knob("ncm", "what predict() classifies by", "paper 5.1; released", choices=CLASSIFIERS)
    ridge_penalty: float = knob(
        0.1, "ridge: penalty, relative to the mean eigenvalue of the features' scatter", "choice", above=0, cost=False
    )
    test_mirror: bool = knob(
        False, "evaluation averages features and logits of each image and its mirror: a second forward pass", "choice"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Adam divides by it in its first step; the most that float32 holds.
        if self.lr / (1 - self.beta1) > 3.4e38:
            raise ConfigError(
                f"options.lr is {self.lr!r} with options.beta1 {self.beta1!r}; wanted lr / (1 - beta1) within float32"
            )


@documented
@dataclass(frozen=True)
class ReplayOptions(MethodOptions):
    """Switches of every method that trains on incoming batches and on a memory."""

    iterations: int = knob(
        1,
        "training steps on each incoming batch, each with replayed rows drawn anew",
        "paper 5.1; released: one; RaptorMai/online-continual-learning: mem_iters",
        low=1,
    )
    memory_policy: str = knob(
        "reservoir",
        "what the memory keeps",
        "paper 5.1; released: reservoir; GDumb, algorithm 1: balanced",
        choices={
            "reservoir": "each image of the stream with equal probability",
            "balanced": "equally many of each class",
        },
    )
    review: bool = knob(
        False,
        "at the end of a task, once through the memory with a tenth of the gradient",
        "paper and released: none; RaptorMai/online-continual-learning: its review trick",
    )
    optimiser_per_task: bool = knob(
        False,
        "the optimiser's moments start anew with each task",
        "paper: one Adam; repositories of LUCIR, CCIL, IL2A and BiC: a new optimiser for each task",
    )

    # The momentum teacher (docs/specification/baselines.md section 20)
    teacher: str = knob(
        "none",
        "network whose logits the trained one, the student, is drawn to",
        "paper: none; MKD: momentum",
        choices={"none": "", "momentum": "the moving average of the student's weights, after each step"},
    )
    teacher_rate: float = knob(
        0.01, "a of the average t <- (1 - a) t + a s of the weights s, at most 1", "MKD", above=0
    )
    teacher_start: str = knob(
        "weights",
        "the average's first value",
        "choice; MKD: scaled",
        choices={"weights": "the first weights", "scaled": "a times these"},
        cost=False,
    )
    teacher_temperature: float = knob(4.0, "T, which logits are divided by for the teacher's loss", "MKD", above=0)
    teacher_weight: float = knob(5.5, "weight of T^2 KL(teacher || student), a mean over views", "MKD", low=0)
    teacher_rows: str = knob(
        "all",
        "rows that the teacher teaches",
        "MKD: all",
        choices={"all": "", "buffer": "all but the first set, which has the incoming rows"},
        cost=False,
    )
    teacher_raw: bool = knob(
        False,
        "the student sees each row without augmentation, too, and is drawn there to what the teacher says of the"
        " augmented view",
        "MKD: true",
    )
    teacher_outputs: str = knob(
        "each",
        "experts that are taught",
        "choice",
        choices={"each": "each by the teacher's same expert, a sum", "last": ""},
        cost=False,
    )
    teacher_statistics: str = knob(
        "batch",
        "statistics of the teacher's batch norm",
        "MKD: batch",
        choices={"batch": "each batch's", "running": "the moving average of the student's running ones"},
        cost=False,
    )
    predict_with: str = knob(
        "student",
        "weights that predict",
        "paper: the student's; MKD: mean",
        choices={"student": "", "teacher": "their moving average", "mean": "the mean of both"},
    )
    pull_back: float = knob(
        0.0,
        "at the end of each task, the share of the way to their moving average that the weights move, at most 1",
        "paper: none; GWM: 0.5",
        low=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("teacher_rate", "pull_back"):
            if getattr(self, name) > 1:
                raise ConfigError(f"options.{name} is {getattr(self, name)!r}; wanted a share, at most 1")


@documented
@dataclass(frozen=True)
class BeyondOptions(ReplayOptions):
    """Switches that go beyond what the methods' papers do."""

    logit_adjustment: float = knob(
        0.0,
        "weight of the log of the classes' shares that cross-entropies over all classes add to the logits; 0: none",
        "ER-LAS, Huang et al., TMLR 2024: 1, over the rows of one step",
        low=0,
    )
    view_chain: float = knob(
        0.0,
        "weight of the chain in which each view learns from the softmax of the next harder one; 0: none",
        "choice; CCL-DC, Wang et al., arXiv 2312.00600: 2 beside cross-entropies that weigh 2.5 in all",
        low=0,
    )
    view_chain_temperature: float = knob(
        4.0, "temperature of both softmaxes of the chain", "CCL-DC, Wang et al., arXiv 2312.00600", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.view_chain and self.augment == "none":
            raise ConfigError(
                f"options.view_chain is {self.view_chain!r} with options.augment 'none', which makes no hard view to"
                " learn from; wanted another recipe, or view_chain 0"
            )


class MethodSettings(NamedTuple):
    """A method's type of options, and by preset what differs from their defaults."""

    options: type[MethodOptions]
    presets: Mapping[str, Mapping[str, Any]]

    def preset(self, name: str | None) -> str:
        """The preset's name, None: the first; ConfigError if the method has no such preset."""
        known = list(self.presets)
        name = known[0] if name is None else plain(name)
        if not isinstance(name, str) or name not in known:
            raise ConfigError(f"preset is {shown(name)}, which this method does not have{near_matches(name, known)}")
        return name


#: Settings of every method that was found, by name; the decorator
#: :func:`mose_fast.methods.method` enters them.
METHOD_SETTINGS: dict[str, MethodSettings] = {}

#: Group of entry points with which an installed package provides methods:
#: ``name = "package.module:Class"``.
ENTRY_POINTS = "mose_fast.methods"


def method_settings(name: str) -> MethodSettings:
    """The settings of a method; ConfigError if it is unknown."""
    name = plain(name)
    if isinstance(name, str) and usable_path(name):
        # By its name and late: methods need torch, and no other setting does.
        registry = import_module("mose_fast.learner.registry")
        if registry.find_method(name) is not None:
            return METHOD_SETTINGS[name]
    raise ConfigError(
        f"method is {shown(name)}, which is unknown (one in a file of yours: path/to/file.py:Name)"
        f"{near_matches(name, list(METHOD_SETTINGS))}"
    )


@documented
@dataclass(frozen=True)
class RunConfig(Declared):
    """One run, complete: the same configuration gives the same result on the same machine."""

    method: str = knob("mose", "name of a method, or path/to/file.py:Name", wanted="the name of a method", flag=True)
    preset: str = knob(
        "released",
        "named values of the method's options; MOSE: released (the authors' code) | paper (its text, literally)",
        wanted="the name of a preset",
        flag=True,
        cost=False,  # `options` holds what it expands to
    )
    stream: StreamConfig = field(default_factory=StreamConfig, metadata={"table": "what arrives"})
    options: MethodOptions = field(
        default_factory=lambda: method_settings("mose").options(), metadata={"table": "the method's switches"}
    )
    memory: int = _problem(1000, "images that the replay memory holds", "paper 5.1", low=1, flag=True)
    evaluate_on: str = _problem(
        "test",
        "images that accuracies are of",
        choices={"test": "", "validation": "those that stream.validation holds out; no test image is read"},
        flag=True,
    )
    width: int = knob(
        64, "channels of the first stage; 64 is the full ResNet-18", "paper 5.1; released", low=1, flag=True
    )
    epochs: int = _problem(
        1,
        "passes over each task's data, of which the first fills the memory, or over the final memory",
        "paper 5.1: one",
        low=1,
        flag=True,
    )
    train_on: str = _problem(
        "stream",
        "what trains the network",
        choices={"stream": "", "final_memory": "the stream only fills the memory, then the network trains on it"},
    )
    seed: int = knob(0, "seed of weights, order within tasks, memory and views", low=0, flag=True, cost=False)
    init_seed: int | None = knob(None, "seed of the initial weights alone", low=0, none="as seed", cost=False)
    device: str = _execution(
        "auto",
        "where to compute: auto (the GPU where there is one) | cpu | cuda | cuda:N",
        pattern="auto|cpu|cuda(:(0|[1-9][0-9]?))?",  # PyTorch numbers GPUs in 8 bits
        wanted="auto, cpu, cuda or cuda:N",
        flag=True,
    )
    feed: str = _execution(
        "auto",
        "what makes the views, with the same pixels up to rounding",
        choices={
            "auto": "dali on a GPU where it is installed, else fused",
            "dali": "NVIDIA DALI",
            "fused": "the native op",
            "torch": "PyTorch",
        },
        flag=True,
    )
    precision: str = _execution(
        "auto",
        "precision of the network, in training and evaluation",
        choices={
            "auto": "bf16 on a GPU of compute capability 8.0 and later, else fp32",
            "fp32": "",
            "tf32": "convolutions round their inputs to 10 bits of mantissa; the same as fp32 on a CPU",
            "bf16": "similarities, softmaxes and norms stay fp32",
        },
        flag=True,
        alters=True,
    )
    kernels: str = _execution(
        "auto",
        "what runs the network's norms, alignment path and heads, and Adam; equal up to rounding",
        choices={
            "auto": "fused on a GPU where the native library has kernels, else torch",
            "fused": "the native ops",
            "torch": "PyTorch's modules",
        },
        flag=True,
    )
    step: str = _execution(
        "auto",
        "how a step runs on a GPU; with deterministic kernels both ways give the same bits",
        choices={
            "auto": "captured where that can be",
            "captured": "replayed as a CUDA graph, where the method allows it",
            "eager": "PyTorch launches each kernel",
        },
        flag=True,
    )
    deterministic: bool = _execution(
        False, "deterministic kernels only, so that resuming is exact on a GPU too; on a CPU it always is", flag=True
    )
    evaluation_batch: int | None = _execution(
        None, "images a forward pass of an evaluation", low=1, none="256 on a CPU, 2,048 on a GPU"
    )
    evaluate_every: int | None = _execution(
        None,
        "batches between evaluations on a sample of the images, for the accuracy at any time; training does not change",
        low=1,
        none="at task ends only",
        flag=True,
    )
    anytime_images: int = _execution(256, "images of such an evaluation, fixed, of the classes seen so far", low=1)
    anytime_stored: int | None = _execution(
        10, "stored images of a class that its mean is computed from between task ends", low=1, none="all"
    )
    classifiers: str = _execution(
        "standard",
        "classifiers that are evaluated",
        choices={
            "standard": "ncm, linear and options.classifier",
            "all": "every one, also of all experts' features together; no further forward pass",
        },
    )
    tuned: str | None = _bookkeeping(
        None, "on what the settings were chosen, which mose-fast tune notes in its best.toml", none="nothing is noted"
    )
    checkpoint_every: int | None = _bookkeeping(
        None, "batches between checkpoints within a task", low=1, none="at task ends only", flag=True
    )

    def __post_init__(self) -> None:
        settings = method_settings(self.method)
        settings.preset(self.preset)
        if type(self.options) is not settings.options:
            raise ConfigError(
                f"options are {type(self.options).__name__}; wanted {settings.options.__name__} for method"
                f" {self.method!r}"
            )
        if isinstance(self.feed, str) and self.feed in settings_of(settings.options)["options.augment"].choices:
            raise ConfigError(
                f"feed is {self.feed!r}, which is a recipe; wanted {', '.join(settings_of(RunConfig)['feed'].choices)}"
                f" for what makes the views, or augment {self.feed!r} for the recipe",
                instead=("augment", self.feed),
            )
        super().__post_init__()
        if self.evaluate_on == "validation" and self.stream.validation is None:
            raise ConfigError(
                "evaluate_on is 'validation', but stream.validation is None; wanted the share of each class's training"
                " images to hold out, for example 0.1"
            )
        if self.evaluate_every is not None and self.train_on == "final_memory":
            raise ConfigError(
                f"evaluate_every is {self.evaluate_every} with train_on 'final_memory', which trains after the stream;"
                " wanted train_on 'stream', or evaluate_every None"
            )
        if self.epochs > 1 and self.train_on == "stream" and self.stream.kind in WITHOUT_BOUNDARIES:
            raise ConfigError(
                f"epochs is {self.epochs}, but a stream of kind {self.stream.kind!r} has no tasks to repeat; wanted 1"
            )
        if self.memory < self.options.buffer_batch:
            raise ConfigError(
                f"memory is {self.memory}, smaller than options.buffer_batch, {self.options.buffer_batch}; "
                "wanted a memory of at least one buffer batch (a larger memory or a smaller options.buffer_batch)"
            )

    @classmethod
    def create(
        cls,
        preset: str | None = None,
        stream: str | Path | StreamConfig | Mapping | None = None,
        options: Mapping | None = None,
        method: str = "mose",
        **settings: Any,
    ) -> RunConfig:
        """Builds a configuration from a preset and what differs from it.

        Args:
            preset: One of the method's presets; None: its first (MOSE: ``released``).
            stream: Name of a stream, a folder or file, a :class:`StreamConfig` or a mapping of its
                fields.
            options: Fields of the method's options that differ from the preset.
            **settings: The other fields of :class:`RunConfig`, and fields of the method's options,
                which may be given by themselves: ``lr=0.01`` is ``options={"lr": 0.01}``.

        Raises:
            ConfigError: A name is unknown, an option is given twice, or a value is out of range.
        """
        stream = plain(stream)
        if not isinstance(stream, str | StreamConfig | Mapping | None):
            raise ConfigError(f"stream is {shown(stream)}; wanted the name of a stream or a table of its settings")
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"options is {shown(options)}; wanted a table of the method's switches")
        if isinstance(stream, str):
            stream = {"name": stream}
        if not isinstance(stream, StreamConfig):
            stream = _build(StreamConfig, stream or {}, "stream.")
        known = method_settings(method)
        preset = known.preset(preset)
        own = {f.name for f in dataclasses.fields(cls)}
        of_options = {f.name for f in dataclasses.fields(known.options)} - own
        bare = {name: settings.pop(name) for name in list(settings) if name in of_options}
        for name in bare:
            if name in (options or {}):
                raise ConfigError(f"{name} is given by itself and in options; wanted it in one of them")
        built = _build(known.options, {**known.presets[preset], **(options or {}), **bare}, "options.")
        settings |= {"method": method, "preset": preset, "stream": stream, "options": built}
        return _build(cls, settings, "", of_options)

    @classmethod
    def from_dict(cls, values: Mapping) -> RunConfig:
        """The inverse of :meth:`to_dict`; missing fields take the preset's value."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration is a table of settings, not {type(values).__name__}")
        return cls.create(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def changes_from_preset(self) -> dict[str, Any]:
        """The options that differ from what :attr:`preset` pins."""
        settings = method_settings(self.method)
        pinned = settings.options(**settings.presets[self.preset])
        return {name: value for name, value in vars(self.options).items() if value != getattr(pinned, name)}

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Reads a ``.json`` or ``.toml`` file; ConfigError, which names it, if it is missing, is no
        valid JSON or TOML, or holds unusable settings.
        """
        path = Path(path)
        values = read_table(path, "the configuration")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"


def _build(kind: type, values: Mapping, owner: str, others: Set[str] = frozenset()) -> Any:
    """Constructs a dataclass; refuses unknown names, with near matches also among ``others``."""
    known = {f.name for f in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            told = name if isinstance(name, str) and name.isprintable() and len(name) <= SHOWN else shown(name)
            raise ConfigError(f"{owner}{told} is not a setting{near_matches(name, sorted(known | others))}")
    return kind(**values)


F = TypeVar("F", bound=Callable)


def takes_settings(function: F) -> F:
    """Decorator of a function whose last parameter, ``**settings``, goes to
    :meth:`RunConfig.create`: its signature gets a parameter for each setting, and ``{settings}`` in
    its docstring becomes the list of what they mean.
    """
    own = inspect.signature(function, eval_str=True)
    create = inspect.signature(RunConfig.create, eval_str=True).parameters
    types, about = get_type_hints(RunConfig), meanings(RunConfig)
    parameters = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
    lines = []
    for f in dataclasses.fields(RunConfig):
        if f.name not in parameters:
            known = inspect.Parameter(f.name, _KEYWORD, default=f.default, annotation=types[f.name])
            parameters[f.name] = known = create.get(f.name, known).replace(kind=_KEYWORD)
            kind = re.sub(r"[\w.]+\.", "", inspect.formatannotation(known.annotation))
            line = f"- ``{f.name}`` ({kind}, {known.default!r}): {about[f.name]}."
            lines.append(textwrap.fill(line, 100, initial_indent=" " * 8, subsequent_indent=" " * 10))
    rest = inspect.Parameter("switches", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    function.__signature__ = own.replace(parameters=[*parameters.values(), rest])
    if function.__doc__:
        function.__doc__ = inspect.cleandoc(function.__doc__).replace("        {settings}", "\n".join(lines))
    return function
