"""Runs a step of ``make``, says what it does, and every ten seconds that it is still at it.

    python -m build_tools.announce "installing torch" "about 3 GB to download" -- COMMAND...

The command's own output goes to a file and is shown only if it fails. ``--native`` in place of the
second text describes the native build and counts its compiled files. Needs the standard library
alone: it runs before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from build_tools import cuda
from build_tools.sources import read_sources

__all__ = ["announce", "compiled", "native_build"]

ROOT = Path(__file__).resolve().parent.parent

#: Seconds between two lines of a step that is still running.
INTERVAL = 10.0

_TAIL = 40


def announce(
    what: str, detail: str, command: Sequence[str], progress: Callable[[], str] = str, interval: float = INTERVAL
) -> int:
    """Runs a command in silence between a line that says what is done and one that says how long it
    took.

    Args:
        what: What is done, such as ``installing torch``.
        detail: What to expect; may be empty.
        command: Program and arguments.
        progress: Called for each line in between; how far it is, or an empty text.
        interval: Seconds between two lines.

    Returns:
        The command's exit status; if it is not 0, the end of its output has been printed.
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


def native_build(
    csrc: Path, environment: dict[str, str], has_driver: bool, toolkits: Sequence[cuda.Toolkit], looked: Sequence[str]
) -> tuple[str, int]:
    """What to expect of compiling the native library: a text, and the number of files.

    Args:
        csrc: Folder of the native sources.
        environment: Of the process.
        has_driver: Whether an NVIDIA driver is at work here.
        toolkits, looked: As :func:`build_tools.cuda.find_toolkits` returns them.
    """
    lists = read_sources(csrc)
    files = lists["MOSE_FAST_CPU_SOURCES"] + lists["MOSE_FAST_TORCH_SOURCES"]
    if not toolkits or environment.get("MOSE_FAST_BACKEND") == "cpu":
        return f"{len(files)} files of C++, about a minute on two cores", len(files)
    files += lists["MOSE_FAST_CUDA_SOURCES"]
    text = (
        f"{len(files)} files of C++ and CUDA for {environment.get('TORCH_CUDA_ARCH_LIST', 'all cards')}, 1 to 2 minutes"
        " on two cores"
    )
    if not has_driver:
        text += "; there is no NVIDIA driver here: MOSE_FAST_BACKEND=cpu leaves the CUDA part out"
    return text + cuda.ignored_variables(looked), len(files)


def compiled(objects: Path, since: float) -> int:
    """Counts the object files below a folder that were written after ``since``, in seconds of the
    file system's clock.
    """
    return sum(path.stat().st_mtime >= since for path in objects.glob("objects-*/**/*.o"))


def _main(arguments: Sequence[str]) -> int:
    what, detail, _, *command = arguments
    if detail != "--native":
        return announce(what, detail, command)
    driver = (
        bool(shutil.which("nvidia-smi"))
        and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0
    )
    detail, files = native_build(ROOT / "csrc", dict(os.environ), driver, *cuda.find_toolkits(os.environ))
    since = time.time()
    return announce(what, detail, command, lambda: f"{compiled(ROOT / 'build', since)} of {files} files compiled")


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
