"""What a person waits for without need: help, lists and messages on wrong flags and missing folders
must not import torch, pandas or scipy.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import mose_fast

_HEAVY = ("torch", "pandas", "scipy", "sklearn", "matplotlib", "tensorboard")

_SCRIPT = f"""
import sys
from mose_fast.app.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("imported:", *(name for name in {_HEAVY} if name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "run --help",
        "sweep --help",
        "paper --help",
        "bench --help",
        "no-such-command",
        "run --mem 5",
        "run --memory many",
        "run --memory 0",
        "run --set nothing",
        "list streams",
        "list paper",
        "export nowhere",
        "predict nowhere x.png",
        "resume nowhere",
        "report nowhere",
        "collect nowhere",
    ],
)
def test_answers_without_heavy_imports(arguments):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "imported:", done.stdout + done.stderr


def test_every_public_name_is_found_and_an_unknown_one_is_an_attribute_error():
    for name in mose_fast.__all__:
        assert getattr(mose_fast, name) is not None
        assert name in dir(mose_fast)
    with pytest.raises(AttributeError, match="'mose_fast' has no attribute 'no_such_name'"):
        _ = mose_fast.no_such_name
