"""Imports run one way: a room of the package imports only rooms that come before it here."""

import ast
from pathlib import Path

import pytest

import mose_fast

PACKAGE = Path(mose_fast.__file__).parent

# Modules and packages directly below mose_fast; those in one line do not import each other.
ROOMS = """
_files _lazy _version errors
_loader knobs state_file
_build_info _dali config device output processes signals threads
reference
ops
memory nn optim self_check
losses
augment streams
settings
methods
method_list evaluate
train
progress
sweep
export report
paper tune
benchmark
doctor
cli
__main__
"""


def imported(source: str, room: str) -> set[str]:
    """The other rooms that a source text imports, also in functions, but not only for types."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
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
    levels = {name: level for level, line in enumerate(ROOMS.split("\n")) for name in line.split()}
    return {name for name in imported(source, room) if levels[name] >= levels[room]}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_runs_upward(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    # The face of the package may import from everywhere.
    if room != "__init__":
        assert upward(path.read_text(encoding="utf-8"), room) == set()


def test_an_upward_import_is_seen():
    late = "def f():\n    from mose_fast.train.loop import Loop"
    assert upward(late, "methods") == {"train"}
    assert upward("import mose_fast.cli", "train") == {"cli"}
    assert upward("from mose_fast import ops", "reference") == {"ops"}
    assert upward("if TYPE_CHECKING:\n    from mose_fast.train import run", "methods") == set()
