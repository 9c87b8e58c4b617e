"""Reads ``csrc/sources.cmake``, the one list of sources and flags that CMake includes and setup.py
parses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def parse_lists(text: str) -> dict[str, list[str]]:
    """The items of every ``set(NAME item ...)`` in ``text`` by name. Raises ValueError if one holds
    a variable, a quote or a generator expression, which only CMake could evaluate.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    lists = {name: items.split() for name, items in re.findall(r"\bset\(\s*(\w+)([^)]*)\)", "\n".join(lines))}
    for name, items in lists.items():
        for item in items:
            if re.search(r"[$\"#]", item):
                raise ValueError(
                    f"sources.cmake: {name} holds {item!r}; wanted literal items and whole-line comments only"
                )
    return lists


def read_sources(csrc: Path) -> dict[str, list[str]]:
    """The lists of ``csrc/sources.cmake``. Raises FileNotFoundError if a file does not exist."""
    lists = parse_lists((csrc / "sources.cmake").read_text())
    for name, items in lists.items():
        for item in items:
            if name.endswith("_SOURCES") and not (csrc / item).is_file():
                raise FileNotFoundError(f"sources.cmake: {name} lists {item!r}, which is not a file under {csrc}")
    return lists


def emulated_sources(root: Path, names: Sequence[str]) -> list[str]:
    """Writes, for every .cu file of ``names`` (relative to ``root / "csrc"``), a C++ file that runs
    its kernels on the CPU; returns their paths, relative to ``root``:
    ``build/emulated_sources/<stem>.cpp``.

    A plain C++ compiler takes a .cu file for one of another language; included, it needs no flags
    of its own. A file that says the right thing already is left alone, so that nothing is compiled
    twice.
    """
    folder = root / "build" / "emulated_sources"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in names:
        path = folder / f"{Path(name).stem}.cpp"
        text = f'#include "emulated/cuda_on_cpu.h"\n#include "{name}"\n'
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        paths.append(path.relative_to(root).as_posix())
    return paths
