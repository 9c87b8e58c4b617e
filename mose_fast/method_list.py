"""The list of methods for ``mose-fast list methods``. It is read from the methods' source files,
since importing them would import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from mose_fast.settings.run import ENTRY_POINTS

__all__ = ["ListedMethod", "listed_methods"]


class ListedMethod(NamedTuple):
    """A method's line in the list; see :class:`mose_fast.methods.About`.

    ``presets`` are names, the default first.
    """

    name: str
    year: int
    cost: float
    reference: str
    presets: tuple[str, ...]


def listed_methods() -> list[ListedMethod]:
    """All methods of this package, by name, and those of installed packages, which are imported."""
    own = [listed for path in sorted((Path(__file__).parent / "methods").glob("*.py")) for listed in _declared(path)]
    return [*own, *_installed({listed.name for listed in own})]


def _declared(path: Path) -> Iterator[ListedMethod]:
    """The methods that a file declares with the decorator ``@method(name, year=..., ...)``."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", None) == "method":
                given = {keyword.arg: keyword.value for keyword in decorator.keywords}
                name, year, cost, reference, *presets = map(
                    _constant,
                    (decorator.args[0], given["year"], given["cost"], given["reference"], *given["presets"].keys),
                )
                yield ListedMethod(name, year, cost, reference, tuple(presets))


def _constant(expression: ast.expr) -> Any:
    """The value of an expression without names, such as ``138 / 74``."""
    return eval(compile(ast.Expression(expression), "<method>", "eval"), {"__builtins__": {}})


def _installed(known: set[str]) -> Iterator[ListedMethod]:
    for name in dict.fromkeys(entry.name for entry in entry_points(group=ENTRY_POINTS)):
        if name not in known:
            from mose_fast.methods import find_method

            about = find_method(name).about
            yield ListedMethod(name, about.year, about.cost, about.reference, tuple(about.presets))
