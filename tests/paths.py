"""Where the checkout is, and the data and the paper beside it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
# What the authors' released code computed (tests/golden/README.md).
GOLDEN = ROOT / "tests" / "golden" / "released.npz"
