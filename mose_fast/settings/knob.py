"""How a setting is declared, from which all else follows: validation, flags, help, the JSON schema
and the tables in the docs (docs/adding_a_setting.md).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import numbers
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple, TypeVar

from mose_fast.errors import MoseFastError


class ConfigError(MoseFastError, ValueError):
    """A setting has an unusable value; the message names it, its value and what is wanted."""


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


def near_matches(name: Any, known: list[str]) -> str:
    """The text ``; did you mean ...?`` with the known names close to ``name``, or all of them."""
    name = name if isinstance(name, str) else shown(name)
    usual = usual_name(name)
    close = [usual] if usual in known else get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; known: " + ", ".join(known)


# What int64 holds; and what float32 holds, less a few digits for what is computed from it.
_INTEGERS_BELOW = 2**63
_NUMBERS_BELOW = 1e32

#: Characters of a value that a message shows.
SHOWN = 60


def shown(value: Any) -> str:
    """A value as a message shows it: its ``repr``, shortened where it is long."""
    # Python refuses to write an integer of more than 4,300 digits.
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of about {round(value.bit_length() * math.log10(2))} digits"
    try:
        text = " ".join(repr(value).split("\n"))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}...{text[-10:]} ({len(text):,} characters)"


#: What is wrong with an array of which :func:`is_masked` is true.
MASKED = "a masked array; wanted a plain one: leave out what is masked, or give it a value (numpy.ma.filled)"


def is_masked(value: Any) -> bool:
    """Whether a value is one of numpy's masked arrays, whose masked elements have a value, too."""
    return isinstance(value, _loaded("numpy.ma", "MaskedArray"))


def _loaded(module: str, name: str) -> Any:
    """A class of a module that is slow to import; of one that is not loaded, there is no object."""
    return getattr(sys.modules.get(module), name, ())


def plain(value: Any) -> Any:
    """The bool, int, float or str that a value stands for: a number or a text of numpy, an array or
    a tensor without axes, a path, a ``torch.device``. Any other value is returned as it is.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not is_masked(value):
        value = value.item()
        if isinstance(value, numbers.Real) and not isinstance(value, int | float):
            value = float(value)  # numpy's long double is its own item
    elif isinstance(value, os.PathLike):
        value = os.fsdecode(value)
    elif isinstance(value, _loaded("torch", "device")):
        value = str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            # Subclasses may have a __str__ of their own.
            return str.__str__(value) if kind is str else kind(value)
    return value


def usable_path(value: str) -> bool:
    """Whether a text can be a path or a file's name: no null, no lone surrogate, not too long."""
    try:
        path = os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return b"\0" not in path and len(path) < 4096 and all(len(part) <= 255 for part in path.split(b"/"))


class Search(NamedTuple):
    """The range of a number that ``mose-fast tune`` searches: least and greatest value, whether on
    a logarithmic scale, and where it comes from (empty in a user's own space).
    """

    low: float
    high: float
    log: bool = False
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a setting is: a field of a dataclass below :class:`Declared`, as :func:`knob` says.

    Attributes:
        name: The dotted name: ``memory``, ``stream.batch``, ``options.lr``.
        kind: The field's annotation as it is written: ``int | None``.
        default: The field's default.
        doc: What the setting does, in a line, without its choices.
        source: Where the values come from.
        role: ``problem`` (what is learned), ``method`` (how), ``execution`` (where and how fast it
            is computed: no departure from a protocol) or ``bookkeeping`` (changes no result, so it
            may change when a run is resumed).
        choices: The values it may have, and what each of them means.
        low: The least number it may have.
        above: A number that it must exceed.
        below: A number that it must stay below.
        multiple: What a number must be divisible by.
        pattern: A regular expression that a text must match as a whole.
        wanted: What a text should be, for the message on one that is not.
        none: What None means; without, None is no value.
        flag: The name of a command-line flag for it, without dashes; True: the field's name.
        cost: Whether the time or memory of a run depends on it. None: yes, unless it is a float,
            which as a rule only scales, or bookkeeping.
        alters: Whether another value changes results by more than rounding, so that such runs must
            not be mixed. None: yes for ``problem`` and ``method``.
        search: The range that ``mose-fast tune`` searches by default; None: it leaves it alone.
    """

    name: str = ""
    kind: str = ""
    default: Any
    doc: str
    source: str
    role: str = "method"
    choices: Mapping[Any, str] | None = None
    low: float | None = None
    above: float | None = None
    below: float = math.inf
    multiple: int = 1
    pattern: str | None = None
    wanted: str = "a text"
    none: str | None = None
    flag: str | bool = False
    cost: bool | None = None
    alters: bool | None = None
    search: Search | None = None

    @property
    def changes_cost(self) -> bool:
        return self.role != "bookkeeping" and self.type != "float" if self.cost is None else self.cost

    @property
    def changes_results(self) -> bool:
        return self.role in ("problem", "method") if self.alters is None else self.alters

    @property
    def field(self) -> str:
        """The name without the owner's."""
        return self.name.rpartition(".")[2]

    @property
    def type(self) -> str:
        """``bool``, ``int``, ``float`` or ``str``."""
        return re.search(r"\b(bool|int|float|str)\b", self.kind)[0]

    @property
    def meaning(self) -> str:
        """What the setting does, with its choices and what each of them means."""
        choices = [f"{value} ({about})" if about else str(value) for value, about in (self.choices or {}).items()]
        return f"{self.doc}: {' | '.join(choices)}" if choices else self.doc

    @property
    def full_meaning(self) -> str:
        """The meaning, and what null stands for."""
        return self.meaning if self.none is None else f"{self.meaning}; null: {self.none}"

    def check(self, value: Any) -> Any:
        """The :func:`plain` value; refuses what the setting may not hold.

        Raises:
            ConfigError: Names the setting, the value and what is wanted.
        """
        given, value = value, plain(value)
        if value is None and self.none is not None:
            return None
        if self.choices is not None:
            # An array must not come to ``in``, which would compare its elements.
            fits = isinstance(value, str | int) and not isinstance(value, bool) and value in self.choices
            wanted = f"one of {', '.join(map(repr, self.choices))}"
        elif self.type == "bool":
            fits, wanted = isinstance(value, bool), "true or false"
        elif self.type == "str":
            fits = isinstance(value, str) and value != "" and usable_path(value)
            fits = fits and (self.pattern is None or re.fullmatch(self.pattern, value) is not None)
            wanted = self.wanted + (", or none given" if self.none is not None else "")
        else:
            fits, wanted = self._check_number(value)
        if not fits:
            raise ConfigError(f"{self.name} is {shown(given)}; wanted {wanted}")
        return value

    def _check_number(self, value: Any) -> tuple[bool, str]:
        kinds, limit = ((int,), _INTEGERS_BELOW) if self.type == "int" else ((int, float), _NUMBERS_BELOW)
        limit = min(self.below, limit)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        # An integer of any size can be compared with a float, but not converted to one.
        fits = number and value < limit
        fits = fits and (self.low is None or value >= self.low) and (self.above is None or value > self.above)
        fits = fits and (self.multiple == 1 or value % self.multiple == 0)
        wanted = "an integer" if self.type == "int" else "a number"
        bounds = [f"above {self.above}"] if self.above is not None else []
        bounds += [f"of at least {self.low}"] if self.low is not None else []
        bounds += [f"divisible by {self.multiple}"] if self.multiple > 1 else []
        # The limit of the type is named to those alone who exceed it.
        if self.below < math.inf or (number and value >= limit):
            bounds.append(f"below {'2**63' if limit == _INTEGERS_BELOW else limit}")
        return fits, " ".join([wanted, " and ".join(bounds)]).rstrip()

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the setting's values."""
        schema: dict[str, Any] = {"description": self.full_meaning}
        if self.choices is not None:
            return schema | {"enum": [*self.choices, *([] if self.none is None else [None])]}
        kind = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}[self.type]
        schema["type"] = kind if self.none is None else [kind, "null"]
        if kind == "string":
            schema |= {"minLength": 1} if self.pattern is None else {"pattern": f"^({self.pattern})$"}
        bounds = {"minimum": self.low, "exclusiveMinimum": self.above, "exclusiveMaximum": self.below}
        bounds["multipleOf"] = None if self.multiple == 1 else self.multiple
        return schema | {name: value for name, value in bounds.items() if value not in (None, math.inf)}


def knob(
    default: Any,
    doc: str,
    source: str = "choice",
    *,
    choices: Iterable[Any] | None = None,
    compare: bool = True,
    **rules: Any,
) -> Any:
    """Declares a setting: a field of a dataclass below :class:`Declared`, whose annotation says the
    type: ``bool``, ``int``, ``float`` or ``str``.

    Args:
        default, doc, source, choices: See :class:`Setting`.
        compare: Whether configurations that differ in it are unequal.
        **rules: The other attributes of :class:`Setting`.
    """
    if choices is not None and not isinstance(choices, Mapping):
        choices = dict.fromkeys(choices, "")
    setting = Setting(default=default, doc=doc, source=source, choices=choices, **rules)
    return dataclasses.field(default=default, compare=compare, metadata={"setting": setting})


def whole_number(name: str, value: Any, low: int | None = 1, **rules: Any) -> int | None:
    """A whole number that is no setting, of any type that :func:`plain` knows, as an int.

    ConfigError if it is no integer, below ``low`` (None: any) or against other attributes of
    :class:`Setting` in ``rules``.
    """
    return Setting(name=name, kind="int", default=None, doc="", source="", low=low, **rules).check(value)


class Declared:
    """Base of dataclasses of settings: checks every field's value against its declaration, and
    stores it as the plain type.

    A field that holds such a dataclass itself has the metadata ``{"table": meaning}``.
    """

    #: What stands before the fields' names in the dotted names of settings.
    owner: ClassVar[str] = ""

    @classmethod
    def again(cls, name: str, default: Any, source: str, **changes: Any) -> Any:
        """Declares one of this class's settings in a subclass, with another default and source, and
        with other attributes of :class:`Setting` where ``changes`` has them.
        """
        setting = cls.__dataclass_fields__[name].metadata["setting"]
        setting = dataclasses.replace(setting, default=default, source=source, **changes)
        return dataclasses.field(default=default, metadata={"setting": setting})

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)).values():
            object.__setattr__(self, setting.field, setting.check(getattr(self, setting.field)))


@functools.cache
def settings_of(kind: type[Declared]) -> dict[str, Setting]:
    """The settings that a dataclass declares, by dotted name; fields that are tables are left out.

    Raises:
        TypeError: A field is not declared by :func:`knob`.
    """
    found = {}
    for field in dataclasses.fields(kind):
        if not field.metadata:
            raise TypeError(f"{kind.__name__}.{field.name} is no setting; wanted {field.name}: ... = knob(...)")
        if "setting" in field.metadata:
            # A type where the module evaluates its annotations, else a text.
            annotation = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            setting, name = field.metadata["setting"], kind.owner + field.name
            flag = field.name.replace("_", "-") if setting.flag is True else setting.flag
            found[name] = dataclasses.replace(setting, name=name, kind=annotation, flag=flag)
    return found


def meanings(kind: type[Declared]) -> dict[str, str]:
    """What each field of a dataclass of settings means."""
    settings = settings_of(kind)
    return {
        f.name: settings[kind.owner + f.name].full_meaning if "setting" in f.metadata else f.metadata["table"]
        for f in dataclasses.fields(kind)
    }


T = TypeVar("T", bound=type)


def documented(kind: T) -> T:
    """Class decorator that appends what the fields mean to the docstring of a dataclass."""
    lines = [f"    {name}: {meaning}." for name, meaning in meanings(kind).items()]
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Attributes:", *lines])
    return kind


def as_text(value: Any) -> str:
    """A value as people write it in a table or on the command line: a bare word, or JSON."""
    return value if isinstance(value, str) else json.dumps(value)
