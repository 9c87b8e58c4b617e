"""Names that are imported when they are first used are listed before, as completion wants."""

import os
import subprocess
import sys

from tests.paths import ROOT

CHECK = """
import sys
import mose_fast, mose_fast.evaluate, mose_fast.export, mose_fast.streams
for package in (mose_fast, mose_fast.evaluate, mose_fast.export, mose_fast.streams):
    assert set(package.__all__) <= set(dir(package)), package
assert "torch" not in sys.modules
"""


def test_names_that_nobody_has_used_are_listed():
    subprocess.run([sys.executable, "-c", CHECK], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
