"""Says whether a library that bench/prebuild.sh built elsewhere belongs to this tree: python -m bench.prebuilt DIR

Needs no torch. What the library was built for is compared when it is loaded; sources can be compared here, before a card is at hand.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def obstacle(folder: Path) -> str | None:
    """Returns why ``folder`` does not serve this tree, or None."""
    missing = [name for name in ("_build.json", "kernel_check") if not (folder / name).is_file()]
    if not list(folder.glob("_C*.so")):
        missing.append("_C*.so")
    if missing:
        return f"there is no {', '.join(missing)} in {folder}; wanted what bench/prebuild.sh leaves"
    built = json.loads((folder / "_build.json").read_text())["sources"]
    here = runpy.run_path(str(ROOT / "mose_fast" / "_version.py"))["source_hash"](ROOT)
    if built != here:
        return f"{folder} was built from other sources ({built}) than those in csrc ({here}); run bench/prebuild.sh again"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        print("usage: python -m bench.prebuilt DIR", file=sys.stderr)
        return 2
    found = obstacle(Path(given[0]))
    if found is not None:
        print(found, file=sys.stderr)
        return 1
    print((Path(given[0]) / "_build.json").read_text().strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
