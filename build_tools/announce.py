"""Runs a step of ``make``: prints what the step does, and every ten seconds how long it has taken.

    python -m build_tools.announce "installing torch" "about 3 GB to download" -- COMMAND...

The command's own output is stored and shown only if the command fails. The second text may be left
out. With ``--native`` as the second text, the native build is described and its compiled files are
counted. This file needs only the standard library, since it runs before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from build_tools.describe import Build, decide
from build_tools.plan import BuildError, installed_torch
from build_tools.sources import read_sources

ROOT = Path(__file__).resolve().parent.parent

#: Seconds between two lines about a step that is still running.
INTERVAL = 10.0

_TAIL = 40


def announce(
    what: str, detail: str, command: Sequence[str], progress: Callable[[], str] = str, interval: float = INTERVAL
) -> int:
    """Runs a command without showing its output; prints what it does, with a ``detail`` to expect,
    every ``interval`` seconds how long it has taken and what ``progress`` says, and how long it
    took. Returns its exit status; if it is not 0, the end of the output has been printed.
    """
    began = time.monotonic()
    print(f"{what}{f' ({detail})' if detail else ''} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while True:
            try:
                status = process.wait(interval)
                break
            except subprocess.TimeoutExpired:
                far = progress()
                print(f"  ... {time.monotonic() - began:.0f} s{f', {far}' if far else ''}", file=sys.stderr, flush=True)
        if status:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-_TAIL:]
            print("\n".join([*lines, f"{what} failed with exit status {status}"]), file=sys.stderr, flush=True)
        else:
            print(f"  done in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return status


def native_build(csrc: Path, build: Build, has_driver: bool) -> tuple[str, int]:
    """Describes the native build: what to expect, as a text, and the number of files to compile."""
    lists = read_sources(csrc)
    files = lists["MOSE_FAST_CPU_SOURCES"] + lists["MOSE_FAST_TORCH_SOURCES"]
    reason = build.reason.partition(". Looked in:")[0]
    if build.backend == "cpu":
        return f"{len(files)} files of C++, about a minute on two cores; {reason}", len(files)
    files += lists["MOSE_FAST_CUDA_SOURCES"]
    text = f"{len(files)} files of C++ and CUDA for {' '.join(build.archs) or 'the CPU'}, 1 to 2 minutes on two cores"
    if build.backend == "cuda" and not has_driver:
        text += "; this machine has no NVIDIA driver: set MOSE_FAST_BACKEND=cpu to leave the CUDA part out"
    return f"{text}; {reason}", len(files)


def compiled(objects: Path, since: float) -> int:
    """Counts the object files below a folder written after ``since``, by the files' clock."""
    return sum(path.stat().st_mtime >= since for path in objects.glob("objects-*/**/*.o"))


def _main(arguments: Sequence[str]) -> int:
    end = arguments.index("--")
    (what, detail), command = [*arguments[:end], ""][:2], arguments[end + 1 :]
    if detail != "--native":
        return announce(what, detail, command)
    torch = installed_torch(sys.path)
    if torch is None:  # setup.py will say so
        return announce(what, "", command)
    driver = (
        bool(shutil.which("nvidia-smi"))
        and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0
    )
    try:
        build = decide(*torch)
    except (BuildError, ValueError) as error:
        print(f"mose_fast: {error}", file=sys.stderr)
        return 1
    detail, files = native_build(ROOT / "csrc", build, driver)
    since = time.time()
    return announce(what, detail, command, lambda: f"{compiled(ROOT / 'build', since)} of {files} files compiled")


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
