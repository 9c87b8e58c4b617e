"""Imports a package's names when they are first used: ``mose-fast --help`` needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562). The first imports a name when it is
    first used from the module in ``homes`` that defines it; a submodule defines itself. The second
    lists these names too, for completion and help.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(homes[name])
        found = home if homes[name] == f"{package}.{name}" else getattr(home, name)
        setattr(sys.modules[package], name, found)
        return found

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})
