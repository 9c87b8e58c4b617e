"""Every knob of a run, typed and validated, with its source.

Sources are abbreviated in the field documentation: *paper* is the CVPR 2024 text taken literally,
*released* is the authors' public code (AnAppleCore/MOSE, commit c24a0e6), *choice* is ours where
neither decides. :data:`MOSE_PRESETS` pins every switch of :class:`MoseOptions` for both presets;
the README prints the same table.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mose_fast.errors import MoseFastError

__all__ = [
    "METHOD_FINDERS",
    "METHOD_SETTINGS",
    "MOSE_PRESETS",
    "ConfigError",
    "MethodOptions",
    "MethodSettings",
    "MoseOptions",
    "RunConfig",
    "StreamConfig",
    "annotation",
    "knob",
    "method_settings",
    "near_matches",
    "preset_table",
    "read_table",
    "shown",
    "usual_name",
]


class ConfigError(MoseFastError, ValueError):
    """A setting has a value that the run cannot use; the message names the setting, the value and
    what is wanted.
    """


# Names of settings elsewhere, by which people look for ours.
_OTHER_NAMES = {
    "batch_size": "stream.batch",
    "batchsize": "stream.batch",
    "betas": "beta1",
    "buffer": "memory",
    "buffer_size": "memory",
    "data": "stream.data_dir",
    "dataset": "stream.name",
    "learning_rate": "lr",
    "mem": "memory",
    "mem_size": "memory",
    "memory_size": "memory",
    "n_tasks": "stream.tasks",
    "num_tasks": "stream.tasks",
    "tau": "temperature",
    "wd": "weight_decay",
}


def usual_name(name: str) -> str:
    """Our name of a setting that other software calls ``name``; any other name as it is."""
    return _OTHER_NAMES.get(name.lower().replace("-", "_"), name)


def near_matches(name: str, known: list[str]) -> str:
    """Returns ``"; did you mean 'a' or 'b'?"`` for the known names close to ``name``, else the list
    of all.
    """
    usual = usual_name(name)
    close = [usual] if usual in known else get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; known: " + ", ".join(known)


# What int64 holds; and what float32 holds, less a few digits for what is computed from it.
_INTEGERS_BELOW = 2**63
_NUMBERS_BELOW = 1e32
_FLOAT32_MOST = 3.4e38

# Characters of a value that a message shows.
_SHOWN = 60


def shown(value: Any) -> str:
    """A value as a message shows it: its ``repr``, shortened where it is long."""
    # Python refuses to write an integer of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of about {round(value.bit_length() * math.log10(2))} digits"
    try:
        text = " ".join(repr(value).split("\n"))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}...{text[-10:]} ({len(text):,} characters)"


def _choice(owner: str, name: str, value: Any, allowed: tuple) -> None:
    # An array is compared element by element, so it must not come to ``in``.
    if not isinstance(value, str | int | None) or value not in allowed or (type(value) is bool and True not in allowed):
        raise ConfigError(f"{owner}{name} is {shown(value)}; wanted one of {', '.join(map(repr, allowed))}")


def _number(
    owner: str, name: str, value: Any, kind: type, low: float, *, open_low: bool = False, below: float = math.inf
) -> None:
    kinds = (int,) if kind is int else (int, float)
    limit = min(below, _INTEGERS_BELOW if kind is int else _NUMBERS_BELOW)
    # An integer of any size can be compared with a float, but not converted to one.
    fits = isinstance(value, kinds) and not isinstance(value, bool) and low <= value < limit
    if not fits or (open_low and value == low):
        what = "an integer" if kind is int else "a number"
        # The limit of the type is named to those alone who exceed it.
        beyond = isinstance(value, kinds) and value >= limit
        end = f" and below {'2**63' if limit == _INTEGERS_BELOW else limit}" if beyond or below < math.inf else ""
        raise ConfigError(
            f"{owner}{name} is {shown(value)}; wanted {what} {'above' if open_low else 'of at least'} {low}{end}"
        )


def _flag(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{owner}{name} is {shown(value)}; wanted true or false")


def _usable_path(value: str) -> bool:
    """Whether the system could take a text as a path, or as the name of a file: no null character,
    no lone surrogate, not too long.
    """
    try:
        path = os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return b"\0" not in path and len(path) < 4096 and all(len(part) <= 255 for part in path.split(b"/"))


def read_table(path: Path, what: str) -> Any:
    """The contents of a ``.toml`` or ``.json`` file.

    Args:
        path: The file.
        what: It is, for the message: ``the configuration``.

    Raises:
        ConfigError: It cannot be read or is no TOML or JSON; the message names it.
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


def knob(
    default: Any,
    doc: str,
    source: str,
    *,
    choices: tuple | None = None,
    low: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    optional: bool = False,
) -> Any:
    """A field of a method's options: its default, what it does, where its values come from, and
    what it may hold.

    Args:
        default: Its type is the field's: a bool, an int (or float) with ``low`` or ``above``, or
        one of ``choices``.
        doc: What it does, in a line.
        source: Where the presets' values come from.
        choices: The values it may have.
        low: Least number it may have.
        above: Number that it must exceed.
        below: Number that it must stay below.
        optional: None is a value, too.
    """
    check = {"choices": choices, "low": low, "above": above, "below": below, "optional": optional}
    return field(default=default, metadata={"doc": doc, "source": source, "check": check})


def annotation(setting: dataclasses.Field) -> str:
    """The type of a setting as its annotation is written, also where the module evaluates
    annotations.
    """
    return setting.type.__name__ if isinstance(setting.type, type) else str(setting.type)


def _check_knob(owner: str, name: str, value: Any, kind_name: str, check: Mapping[str, Any]) -> None:
    if value is None and check["optional"]:
        return
    if check["choices"] is not None:
        _choice(owner, name, value, check["choices"])
    elif check["low"] is not None or check["above"] is not None:
        open_low = check["above"] is not None
        kind = float if kind_name.startswith("float") else int
        _number(
            owner,
            name,
            value,
            kind,
            check["above"] if open_low else check["low"],
            open_low=open_low,
            below=check["below"],
        )
    else:
        _flag(owner, name, value)


@dataclass(frozen=True)
class StreamConfig:
    """What arrives: the data set, how it is split into tasks and in which order its classes come.

    Attributes:
        name: A registered stream (``mose-fast list streams``), a folder
        ``{train,test}/<class>/file.jpg``, or an ``.npz`` file.
        data_dir: Folder that holds the data set's files; None means ``~/.cache/mose_fast``.
        tasks: Number of tasks the classes are split into, equally and in class order; None means
        the stream's own default.
        batch: Incoming images a step (B = 10 in the paper, section 5.1).
        limit_per_task: Keep at most this many training images a task, balanced over its classes;
        None keeps all.
        class_order_seed: None keeps the natural label order (released); a number draws the order of
        classes from it.
        normalisation: Name of the constants (``mose_fast.streams.NORMALISATIONS``); None means the
        stream's default.
        decoder: What reads image files: ``pil`` or ``dali``, whose pixels are the same; ``auto`` is
            ``dali`` where it is installed and there are many files.
        fingerprint: Of the data's content (:attr:`mose_fast.streams.Stream.fingerprint`). A run
            writes it into its configuration; data with another one are refused. None takes whatever
            data there are.
    """

    name: str = "digits"
    data_dir: str | None = None
    tasks: int | None = None
    batch: int = 10
    limit_per_task: int | None = None
    class_order_seed: int | None = None
    normalisation: str | None = None
    decoder: str = "auto"
    # Two configurations are equal where they ask for the same; what data they found is compared
    # where it matters, with its own message.
    fingerprint: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not _usable_path(self.name):
            raise ConfigError(
                f"stream.name is {shown(self.name)}; wanted the name of a stream, a folder or an .npz file"
            )
        _number("stream.", "batch", self.batch, int, 1)
        _choice("stream.", "decoder", self.decoder, ("auto", "pil", "dali"))
        for name, what in (
            ("data_dir", "a folder"),
            ("normalisation", "the name of constants"),
            ("fingerprint", "that of data"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value or not _usable_path(value)):
                raise ConfigError(f"stream.{name} is {shown(value)}; wanted {what}, or none given")
        for name, low in (("tasks", 1), ("limit_per_task", 1), ("class_order_seed", 0)):
            if getattr(self, name) is not None:
                _number("stream.", name, getattr(self, name), int, low)


@dataclass(frozen=True)
class MethodOptions:
    """Switches that every method has. Methods add theirs in a subclass, each a :func:`knob`.

    Each field's metadata holds ``doc`` (what it does) and ``source`` (where the presets' values
    come from).
    """

    #: Number of experts, the one that predicts by default, and what their mean averages; methods
    #: with one network have one.
    experts: ClassVar[int] = 1
    expert: ClassVar[str] = "last"
    mean_of_experts: ClassVar[str] = "distance"

    init: str = knob(
        "kaiming_fan_out",
        "initialisation of convolutions: kaiming_fan_out | default (PyTorch's)",
        "released; the paper is silent",
        choices=("kaiming_fan_out", "default"),
    )
    buffer_batch: int = knob(64, "rows of the buffer set", "paper 5.1; released", low=1)
    augment: str = knob(
        "ocm",
        "ocm (gray, crop) | simclr (flip, gray, crop) | scr (crop, flip, jitter, gray) | none",
        "released default: ocm; paper: simclr",
        choices=("ocm", "simclr", "scr", "none"),
    )
    jitter_domain: str = knob(
        "unit",
        "colour jitter acts on: unit (images in [0, 1]) | normalised (clamping them, as released)",
        "choice; released: normalised",
        choices=("unit", "normalised"),
    )
    mirror: str = knob(
        "auto",
        "mirroring and random flips: auto (off where they change labels) | on | off",
        "choice; both sources only know natural images",
        choices=("auto", "on", "off"),
    )
    lr: float = knob(1e-3, "learning rate of Adam", "paper 5.1; released", above=0)
    weight_decay: float = knob(1e-4, "weight decay of Adam, added to the gradient", "paper 5.1; released", low=0)
    beta1: float = knob(0.9, "first moment's decay", "released (PyTorch's default)", low=0, below=1)
    beta2: float = knob(0.999, "second moment's decay", "released (PyTorch's default)", low=0, below=1)
    eps: float = knob(1e-8, "Adam's epsilon", "released (PyTorch's default)", above=0)
    classifier: str = knob("ncm", "ncm (nearest class mean) | linear", "paper 5.1; released", choices=("ncm", "linear"))

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_knob("options.", f.name, getattr(self, f.name), annotation(f), f.metadata["check"])
        # Adam divides by it in its first step.
        if self.lr / (1 - self.beta1) > _FLOAT32_MOST:
            raise ConfigError(
                f"options.lr is {self.lr!r} with options.beta1 {self.beta1!r}; wanted lr / (1 - beta1) within float32"
            )


@dataclass(frozen=True)
class MoseOptions(MethodOptions):
    """Every switch of MOSE. Defaults are the ``released`` preset; the paper's values are in
    :data:`MOSE_PRESETS`.
    """

    # The network
    experts: int = knob(
        4,
        "branch points: 1 to 8; 4 reads the network after each residual stage",
        "paper 4.1; released; figure of 1 to 8 from the code's history",
        choices=tuple(range(1, 9)),
    )
    attention: bool = knob(
        True, "attention gate before the alignment of every expert but the last", "only in the released code"
    )
    adapter: bool = knob(True, "Linear(D, D) on the student's feature before distillation", "only in the released code")
    projection: int = knob(128, "width of the contrastive projection", "paper, appendix; released", low=1)

    # The losses
    cross_entropy: str = knob(
        "all", "experts with cross-entropy: off | last | all", "paper, ablation table", choices=("off", "last", "all")
    )
    contrastive: str = knob(
        "all",
        "experts with supervised contrastive loss: off | last | all",
        "paper, ablation table",
        choices=("off", "last", "all"),
    )
    distillation: str = knob(
        "rsd",
        "rsd (experts teach the student) | sd (the student teaches them) | off",
        "paper 4.2 and table SD vs. RSD",
        choices=("rsd", "sd", "off"),
    )
    student: int | None = knob(
        None,
        "expert that is distilled into, from 1; null: the deepest",
        "paper, appendix on RSD variations",
        choices=tuple(range(1, 9)),
        optional=True,
    )
    rsd_reduction: str = knob(
        "frobenius",
        "frobenius: one norm of the whole batch's difference | mean_of_norms: per image, averaged",
        "released: one norm; paper: eq. RSD averages",
        choices=("frobenius", "mean_of_norms"),
    )
    separate_cross_entropy: bool = knob(
        True,
        "new rows use only the current task's classes; false: one cross-entropy over all rows and classes",
        "paper, eq. new CE; released",
    )
    buffer_weight: float = knob(2.0, "weight of the buffer rows' cross-entropy", "released: 2; paper: 1", low=0)
    temperature: float = knob(0.07, "temperature of the contrastive loss", "released; SCR", above=0)

    # The composition of a step
    new_extra: int = knob(
        22,
        "rows of the current task drawn from memory into the new set, at most",
        "released: 64 / 2 - 10; paper: none",
        low=0,
    )
    incoming_copies: bool = knob(
        True, "part of the incoming rows is repeated in the buffer set", "released; paper: memory only"
    )
    replay_from: str = knob(
        "others",
        "buffer rows come from: others (every task but the current) | all",
        "released: others; paper: the memory",
        choices=("others", "all"),
    )
    per_class_cap: int | None = knob(
        7,
        "at most this many old rows for each class seen so far; null: no cap",
        "released: 7; paper: none",
        low=1,
        optional=True,
    )
    first_task: str = knob(
        "joint",
        "joint: in task 0 memory rows join the new set and one cross-entropy covers all classes | same: as later tasks",
        "released: joint; paper: same",
        choices=("joint", "same"),
    )
    skip_first_batch: bool = knob(
        True,
        "the first batch of the stream only enters the memory",
        "released (its memory is empty then); paper: trained on",
    )
    current_classes: str = knob(
        "seen",
        "classes of the current task: seen (so far in it) | task (all of it, known at its start)",
        "released: seen; paper: C^t",
        choices=("seen", "task"),
    )
    inner_views: int = knob(
        2,
        "fixed copies of every row: 1 | 2 (mirror) | 4 (each half mirrored or not) | 16 (and quarter turns)",
        "released: 2; the paper describes 4 and doubles: 2",
        choices=(1, 2, 4, 16),
    )

    # The classifier of predict()
    expert: str = knob(
        "last",
        "last | 1 ... experts | mean (over all experts)",
        "paper: MOSE is the last expert, MOE-MOSE the mean",
        choices=("last", "mean", *map(str, range(1, 9))),
    )
    mean_of_experts: str = knob(
        "distance",
        "mean of experts averages: distance (squared, to class means) | logit",
        "released: distance; paper 4.2: logits",
        choices=("distance", "logit"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student", "expert"):
            value = getattr(self, name)
            if str(value).isdigit() and int(value) > self.experts:
                raise ConfigError(f"options.{name} is {value!r}; wanted at most options.experts, {self.experts}")
        if self.cross_entropy == "off" and self.contrastive == "off":
            raise ConfigError(
                "options.cross_entropy and options.contrastive are both 'off'; wanted at least one loss to train with"
            )

    @property
    def student_index(self) -> int:
        """The student's position among the experts, from 0."""
        return (self.student or self.experts) - 1


#: What each preset sets differently from :class:`MoseOptions`' defaults. ``released`` is the
#: default itself.
MOSE_PRESETS: dict[str, dict[str, Any]] = {
    "released": {},
    "paper": {
        "attention": False,
        "adapter": False,
        "rsd_reduction": "mean_of_norms",
        "buffer_weight": 1.0,
        "new_extra": 0,
        "incoming_copies": False,
        "replay_from": "all",
        "per_class_cap": None,
        "first_task": "same",
        "skip_first_batch": False,
        "current_classes": "task",
        "augment": "simclr",
        "mean_of_experts": "logit",
    },
}


class MethodSettings(NamedTuple):
    """What a configuration must know of a method: the type of its options, and by preset what
    differs from their defaults.
    """

    options: type[MethodOptions]
    presets: Mapping[str, Mapping[str, Any]]

    def preset(self, name: str | None) -> str:
        """The preset's name; None means the first.

        Raises:
            ConfigError: The method has no such preset.
        """
        if name is None:
            return next(iter(self.presets))
        if not isinstance(name, str) or name not in self.presets:
            raise ConfigError(
                f"preset is {shown(name)}, which this method does not have{near_matches(str(name), list(self.presets))}"
            )
        return name


#: Settings of every method by name; the modules in :mod:`mose_fast.methods` enter theirs.
METHOD_SETTINGS: dict[str, MethodSettings] = {"mose": MethodSettings(MoseOptions, MOSE_PRESETS)}

#: Asked in turn for a name that is not in the table; ``mose_fast`` adds the one that imports the
#: methods and knows outside files.
METHOD_FINDERS: list[Callable[[str], MethodSettings | None]] = []


def method_settings(name: str) -> MethodSettings:
    """The settings of a method.

    Raises:
        ConfigError: There is no such method.
    """
    if isinstance(name, str) and _usable_path(name):
        if name in METHOD_SETTINGS:
            return METHOD_SETTINGS[name]
        for find in METHOD_FINDERS:
            settings = find(name)
            if settings is not None:
                return settings
    raise ConfigError(f"method is {shown(name)}, which is unknown{near_matches(str(name), list(METHOD_SETTINGS))}")


def preset_table(method: str = "mose") -> list[tuple[str, ...]]:
    """A row for every switch of a method: its name, its value in each preset, what it does, where
    the values come from.
    """

    def show(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    settings = method_settings(method)
    presets = [settings.options(**changes) for changes in settings.presets.values()]
    return [
        (f.name, *(show(getattr(options, f.name)) for options in presets), f.metadata["doc"], f.metadata["source"])
        for f in dataclasses.fields(settings.options)
    ]


@dataclass(frozen=True)
class RunConfig:
    """One run, complete: the same configuration gives the same result on the same machine.

    Attributes:
        method: Name of the learner (``mose-fast list methods``).
        preset: One of the method's presets (MOSE: ``released`` or ``paper``); ``options`` holds
            what it expands to, so later edits stay visible.
        stream: What arrives.
        options: The method's switches.
        memory: Slots of the replay memory (M).
        width: Channels of the first stage; 64 is the full ResNet-18.
        epochs: Passes over each task's data (1 in online learning; more for the study of section
            3.3). The memory is updated in the first only. With ``train_on`` ``final_memory``:
            passes over the final memory.
        train_on: ``stream``, or ``final_memory``: the stream only fills the memory, then the
        network trains on it (joint).
        seed: Initial weights, order within tasks, memory decisions and augmentations.
        init_seed: Of the initial weights, where they alone are to vary, or all else but them; None:
        ``seed``.
        device: ``cpu`` or ``cuda`` (``cuda:1`` ...); ``auto`` takes the card where there is one.
        feed: What makes the views: ``dali``, ``fused`` (the native op) or ``torch`` (plain
            PyTorch), with the same pixels up to rounding; ``auto`` is ``dali`` on CUDA where it is
            installed, else ``fused``. The recipe of the views is ``options.augment``.
        precision: ``fp32``; ``tf32``: the same, but cuDNN's convolutions round their inputs to 10
            bits of mantissa (no difference on a CPU); ``bf16`` for the network in training and
            evaluation (similarities, softmaxes and norms stay fp32); ``auto``: bf16 on cards of
            compute capability 8.0 and later, else fp32.
        kernels: What runs the network's norms, alignment path and heads, and Adam: ``torch``,
            PyTorch's own modules, or ``fused``, the ops of mose_fast.ops; ``auto``: fused on CUDA
            where the native library has kernels, else torch. Equal up to rounding.
        step: ``captured``: on CUDA, steps of a method that allows it (``mose``) replay as CUDA
            graphs; ``eager``: PyTorch launches each kernel; ``auto``: captured where that can be.
            With deterministic kernels both give the same bits.
        deterministic: On CUDA, use deterministic kernels only, so that resuming is exact. The CPU
        always is.
        evaluation_batch: Images a forward pass of an evaluation; None: 256 on the CPU, 2,048 on
        CUDA.
        checkpoint_every: Steps between checkpoints within a task; None: at task ends only.
    """

    method: str = "mose"
    preset: str = "released"
    stream: StreamConfig = field(default_factory=StreamConfig)
    options: MethodOptions = field(default_factory=MoseOptions)
    memory: int = 1000
    width: int = 64
    epochs: int = 1
    train_on: str = "stream"
    seed: int = 0
    init_seed: int | None = None
    device: str = "auto"
    feed: str = "auto"
    precision: str = "auto"
    kernels: str = "auto"
    step: str = "auto"
    deterministic: bool = False
    evaluation_batch: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        settings = method_settings(self.method)
        settings.preset(self.preset)
        if type(self.options) is not settings.options:
            raise ConfigError(
                f"options are {type(self.options).__name__}; wanted {settings.options.__name__} for method"
                f" {self.method!r}"
            )
        for name in ("memory", "width", "epochs"):
            _number("", name, getattr(self, name), int, 1)
        for name in ("seed", "init_seed"):
            value = getattr(self, name)
            if name == "init_seed" and value is None:
                continue
            _number("", name, value, int, 0)
        for name in ("evaluation_batch", "checkpoint_every"):
            if getattr(self, name) is not None:
                _number("", name, getattr(self, name), int, 1)
        _choice("", "train_on", self.train_on, ("stream", "final_memory"))
        if isinstance(self.feed, str) and self.feed in ("none", "ocm", "simclr", "scr", "pad_crop"):
            raise ConfigError(
                f"feed is {self.feed!r}, which is a recipe; wanted auto, dali, fused or torch, or --set"
                f" augment={self.feed} for the recipe"
            )
        _choice("", "feed", self.feed, ("auto", "dali", "fused", "torch"))
        _choice("", "precision", self.precision, ("auto", "fp32", "tf32", "bf16"))
        _choice("", "kernels", self.kernels, ("auto", "fused", "torch"))
        _choice("", "step", self.step, ("auto", "captured", "eager"))
        _flag("", "deterministic", self.deterministic)
        # PyTorch numbers cards in 8 bits.
        numbered = isinstance(self.device, str) and re.fullmatch(r"cuda:(0|[1-9][0-9]?)", self.device)
        if not numbered and (not isinstance(self.device, str) or self.device not in ("auto", "cpu", "cuda")):
            raise ConfigError(f"device is {shown(self.device)}; wanted auto, cpu, cuda or cuda:N")
        if self.memory < self.options.buffer_batch:
            raise ConfigError(
                f"memory is {self.memory}, smaller than options.buffer_batch, {self.options.buffer_batch}; "
                "wanted a memory of at least one buffer batch (a larger memory or a smaller options.buffer_batch)"
            )

    @classmethod
    def create(
        cls,
        preset: str | None = None,
        stream: str | StreamConfig | Mapping | None = None,
        options: Mapping | None = None,
        method: str = "mose",
        **settings: Any,
    ) -> RunConfig:
        """Builds a configuration from a preset and what differs from it.

        Args:
            preset: One of the method's presets; None: its first (MOSE: ``released``).
            stream: Name of a stream, a :class:`StreamConfig` or a mapping of its fields.
            options: Fields of the method's options that differ from the preset.
            method: Name of the method.
            **settings: The other fields of :class:`RunConfig`, and fields of the method's options,
                which may stand beside them as on the command line: ``lr=0.01`` is ``options={"lr":
                0.01}``.

        Raises:
            ConfigError: A name is unknown, an option is given twice, or a value is out of range.
        """
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
        for name in settings:
            if name not in own:
                raise ConfigError(f"{name} is not a setting{near_matches(str(name), sorted(own | of_options))}")
        built = _build(known.options, {**known.presets[preset], **(options or {}), **bare}, "options.")
        return _build(cls, {**settings, "method": method, "preset": preset, "stream": stream, "options": built}, "")

    @classmethod
    def from_dict(cls, values: Mapping) -> RunConfig:
        """The inverse of :meth:`to_dict`.

        Fields that are missing take the preset's value, unknown ones are an error.
        """
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
        return {
            f.name: getattr(self.options, f.name)
            for f in dataclasses.fields(pinned)
            if getattr(self.options, f.name) != getattr(pinned, f.name)
        }

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Reads a ``.json`` or ``.toml`` file.

        Raises:
            ConfigError: The file is missing, is no valid JSON or TOML, or holds unusable settings;
                the message names the file.
        """
        path = Path(path)
        values = read_table(path, "the configuration")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_json(self) -> str:
        """The configuration as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_toml(self) -> str:
        """The configuration as TOML text.

        TOML has no null: fields that are None are left out, and None is their default.
        """
        # Not at the top: only who writes TOML needs it.
        import tomli_w

        values = {
            key: _without_none(value) if isinstance(value, dict) else value for key, value in self.to_dict().items()
        }
        text = tomli_w.dumps(_without_none(values))
        if RunConfig.from_dict(tomllib.loads(text)) != self:
            raise ConfigError(
                "this configuration cannot be written as TOML: a field that the preset sets is None here; use JSON"
            )
        return text


def _without_none(values: Mapping) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _build(kind: type, values: Mapping, owner: str) -> Any:
    """Constructs the dataclass ``kind`` from a mapping; unknown names are refused with near
    matches.
    """
    known = {f.name for f in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            told = (
                f"{owner}{name}"
                if isinstance(name, str) and name.isprintable() and len(name) <= _SHOWN
                else f"{owner}{shown(name)}"
            )
            raise ConfigError(f"{told} is not a setting{near_matches(str(name), sorted(known))}")
    return kind(**values)
