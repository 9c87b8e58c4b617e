"""The settings of all methods, and values made from their declarations: one that a setting may
hold, and those that it may not, each with what the message on it must say.
"""

from __future__ import annotations

import math
from typing import Any

from mose_fast.learner.named_settings import all_settings
from mose_fast.methods import method_names
from mose_fast.settings.knob import Setting
from mose_fast.settings.run import ConfigError

#: Every setting once, also where several methods have it.
SETTINGS = [*{str(s): s for method in method_names() for s in all_settings(method).values()}.values()]
TEXTS = ("0123456789abcdef", "half", "cpu", "a/folder")


def sample(setting: Setting) -> Any:
    """A value that a setting may hold, other than None."""
    if setting.default is not None:
        return setting.default
    if setting.type == "str":
        candidates = TEXTS
    else:
        low = setting.low if setting.above is None else setting.above
        candidates = [0.5] if setting.type == "float" else [max(low, 1) * setting.multiple]
    return next(value for value in candidates if accepts(setting, value))


def another(setting: Setting) -> Any:
    """A value that a setting may hold, other than its default."""
    if setting.choices is not None:
        candidates = [*setting.choices]
    elif setting.type == "bool":
        candidates = [not setting.default]
    elif setting.type == "int":
        candidates = [(setting.default or setting.low or 0) + setting.multiple]
    else:
        candidates = [0.25, 0.5, 2.5] if setting.type == "float" else [*TEXTS]
    return next(value for value in candidates if value != setting.default and accepts(setting, value))


def accepts(setting: Setting, value: Any) -> bool:
    try:
        setting.check(value)
    except ConfigError:
        return False
    return True


def outside(setting: Setting) -> list[tuple[Any, str]]:
    """Values just outside of what is declared, with what the message must say is wanted."""
    found: list[tuple[Any, str]] = [] if setting.none is not None else [(None, "")]
    if setting.choices is not None:
        return [
            *found,
            ("no such choice", f"one of {next(iter(setting.choices))!r}"),
            (True, "one of "),
            (7.5, "one of "),
        ]
    if setting.type == "bool":
        return [*found, (1, "true or false"), ("True", "true or false")]
    if setting.type == "str":
        return [*found, *((value, setting.wanted) for value in ("", "a\0b", "\ud800", "x" * 5000, 5))]
    kind, largest = ("an integer", 2**63) if setting.type == "int" else ("a number", 1e32)
    found += [(value, kind) for value in (True, "1", math.nan)]
    found += [(1.5, kind)] if setting.type == "int" else []
    limits = {setting.low: "of at least", setting.above: "above"}
    found += [(n - (n == setting.low), f"{word} {n}") for n, word in limits.items() if n is not None]
    found += [(setting.multiple + 1, f"divisible by {setting.multiple}")] if setting.multiple > 1 else []
    if setting.below < largest:
        return [*found, (setting.below, f"below {setting.below}")]
    return [*found, (largest, "below 2**63" if setting.type == "int" else "below 1e+32")]
