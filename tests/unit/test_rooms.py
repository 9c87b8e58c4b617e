"""Imports run one way: a room of the package imports only rooms that come before it in
docs/architecture.md.
"""

import ast
import re
from pathlib import Path

import pytest

import mose_fast
from tests.paths import ROOT

PACKAGE = Path(mose_fast.__file__).parent

# Modules and packages directly below mose_fast; those in one row do not import each other.
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| ((?:`\w+` ?)+) \| .+ \|$", PAGE, re.MULTILINE)]


def imported(source: str, room: str) -> set[str]:
    """The other rooms that a source text imports, also in functions and for types alone."""
    tree = ast.parse(source)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "mose_fast":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mose_fast."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("mose_fast.")}
    return names - {room}


def upward(source: str, room: str) -> set[str]:
    """The rooms that a source text of a room imports although they come later, or beside it."""
    levels = {name: level for level, row in enumerate(ROOMS) for name in row}
    return {name for name in imported(source, room) if levels[name] >= levels[room]}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_runs_upward(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    # The face of the package may import from everywhere.
    if room != "__init__":
        assert upward(path.read_text(encoding="utf-8"), room) == set()


def test_the_page_names_every_room_and_every_file():
    there = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(name for row in ROOMS for name in row) == sorted(there - {"__init__"})
    named = re.findall(r"`(\w+/\w*(?:\.py)?)`", PAGE)
    homes = (PACKAGE, ROOT, ROOT / "csrc")
    assert len(named) > 20 and [name for name in named if not any((home / name).exists() for home in homes)] == []


def imported_modules(path: Path) -> set[Path]:
    """The files of this package's modules that a file imports anywhere, for types too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mose_fast":
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("mose_fast.")}
    files = (PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names)
    return {file for file in files if file.exists()}


def test_no_modules_import_each_other():
    imports = {path: imported_modules(path) - {path} for path in PACKAGE.rglob("*.py")}
    while leaves := [path for path, others in imports.items() if not others & imports.keys()]:
        for path in leaves:
            del imports[path]
    # What is left imports, perhaps through others, itself.
    assert [str(path.relative_to(PACKAGE)) for path in imports] == []
