"""What a person waits for without need: help, lists and messages on wrong flags and missing folders
must not import torch, pandas or scipy.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import mose_fast

_HEAVY = ("torch", "pandas", "scipy", "sklearn", "matplotlib", "tensorboard")

COMMANDS = [
    *("--help", "--version", "run --help", "sweep --help", "paper --help", "bench --help", "no-such-command"),
    *("run --mem 5", "run --memory many", "run --memory 0", "run --set nothing", "list streams", "list paper"),
    *("export nowhere", "predict nowhere x.png", "resume nowhere", "report nowhere", "collect nowhere"),
]

_SCRIPT = f"""
import sys
from mose_fast.app.cli import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit:
        pass
    print("imported:", command, *(name for name in {_HEAVY} if name in sys.modules))
"""


def test_answers_without_heavy_imports():
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *COMMANDS], capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert told == [f"imported: {command}" for command in COMMANDS], done.stderr


def test_methods_are_listed_without_the_compiler_of_torch():
    code = "import sys; from mose_fast.app.cli import main; main(['list', 'methods']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch._dynamo" not in done.stdout.splitlines()[-1].split()


def test_every_public_name_is_found_and_an_unknown_one_is_an_attribute_error():
    for name in mose_fast.__all__:
        assert getattr(mose_fast, name) is not None
        assert name in dir(mose_fast)
    with pytest.raises(AttributeError, match="'mose_fast' has no attribute 'no_such_name'"):
        _ = mose_fast.no_such_name
