"""Checks whether a library that bench/prebuild.sh built elsewhere belongs to this tree and is
undamaged: python -m bench.prebuilt DIR

It needs no torch and no GPU: it compares the sources. The versions that the library was built for
are compared when it is loaded. ``--seal`` first records the library's size and hash, which have
changed when it was stripped after the build.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


OF_TREE: dict[str, Any] = runpy.run_path(str(ROOT / "mose_fast" / "_version.py"))


def seal(folder: Path) -> None:
    """Records size and hash of the library, so that a damaged one is not loaded."""
    record = folder / "_build.json"
    (library,) = folder.glob("_C*.so")
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"library": OF_TREE["file_facts"](library)}, indent=2) + "\n"
    )


def obstacle(folder: Path) -> str | None:
    """Returns why ``folder`` does not serve this tree, or None."""
    missing = [name for name in ("_build.json", "kernel_check") if not (folder / name).is_file()]
    if not list(folder.glob("_C*.so")):
        missing.append("_C*.so")
    if missing:
        return f"there is no {', '.join(missing)} in {folder}; wanted what bench/prebuild.sh leaves"
    record = json.loads((folder / "_build.json").read_text())
    built, here = record["sources"], OF_TREE["source_hash"](ROOT, record["backend"])
    if built != here:
        return (
            f"{folder} was built from other sources ({built}) than those in csrc ({here}); run bench/prebuild.sh again"
        )
    for library in folder.glob("_C*.so"):
        if record.get("library") not in (None, OF_TREE["file_facts"](library)):
            return f"{library} is not what bench/prebuild.sh left: it is damaged"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prebuilt", description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--seal", action="store_true", help="note size and hash of the library first")
    given = parser.parse_args(arguments)
    if given.seal:
        seal(given.folder)
    found = obstacle(given.folder)
    if found is not None:
        print(found, file=sys.stderr)
        return 1
    print((given.folder / "_build.json").read_text().strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
