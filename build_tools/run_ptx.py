"""Runs kernel_check on the CPU, on the PTX that nvcc made of the kernels, and says what its cases
leave out.

    python -m build_tools.run_ptx build/kernels           # every case, on sm_80 and sm_90 at once
    python -m build_tools.run_ptx build/kernels augment   # the cases whose names begin so

The folder is one of CMake's, configured as .ci/run does: for both architectures, with the PTX kept
in its folder ``ptx``. The interpreter is ``shared/tools/ptx_on_cpu`` beside the checkout; without
it nothing is run. The check fails if a case does, and, where all cases run, if an instance of a
kernel is not launched or less than 90 % of its instructions are run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_tools.machine_code import instance_names
from build_tools.sources import read_sources

ROOT = Path(__file__).resolve().parent.parent
INTERPRETER = ROOT.parent / "shared" / "tools" / "ptx_on_cpu"
ARCHS = ("80", "90")
#: Of the instructions of each instance of a kernel.
LEAST_RUN = 0.9


def complaints(report: str) -> list[str]:
    """What a report (``PTX_REPORT=1``) says of instances that run too little, or never."""
    launched = re.findall(r"^ran +(\d+) of +(\d+)  (\S+)$", report, re.MULTILINE)
    missing = re.findall(r"^never launched +(\S+)$", report, re.MULTILINE)
    if not launched:
        return ["no kernel was launched"]
    names = instance_names([*missing, *(symbol for _, _, symbol in launched)])
    found = [f"{name} is never launched" for name in names[: len(missing)]]
    for name, (ran, of, _) in zip(names[len(missing) :], launched, strict=True):
        if int(ran) < LEAST_RUN * int(of):
            found.append(f"{name} runs {ran} of its {of} instructions; wanted {LEAST_RUN:.0%}")
    return sorted(found)


def _link(folder: Path) -> Path:
    """Links kernel_check with the interpreter, and puts PTX into a folder for each architecture."""
    to = folder / "ptx"
    for arch in ARCHS:
        (to / f"sm_{arch}").mkdir(exist_ok=True)
        for name in read_sources(ROOT / "csrc")["MOSE_FAST_CUDA_SOURCES"]:
            kept, link = to / f"{Path(name).stem}.compute_{arch}.ptx", to / f"sm_{arch}" / f"{Path(name).stem}.ptx"
            if not kept.is_file():
                raise SystemExit(f"{kept} does not exist; wanted a folder built as .ci/run builds build/kernels")
            link.unlink(missing_ok=True)
            link.symlink_to(kept)
    sys.path.insert(0, str(INTERPRETER))
    from run import Build

    objects = [*folder.glob("CMakeFiles/cuda_objects.dir/**/*.o"), *folder.glob("CMakeFiles/kernel_check.dir/**/*.o")]
    program = to / "kernel_check"
    runtime = Build(ROOT, to).runtime()
    subprocess.run(["g++", *map(str, [*objects, *runtime]), "-fopenmp", "-o", str(program)], check=True)
    return program


def _run(program: Path, arch: str, names: Sequence[str]) -> tuple[int, str]:
    settings = {"PTX_FOLDER": str(program.parent / f"sm_{arch}"), "PTX_REPORT": "1"}
    command = [str(program), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | settings)
    return done.returncode, done.stdout + done.stderr


def main(arguments: Sequence[str]) -> int:
    """Links, runs and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of CMake, in which kernel_check is built")
    parser.add_argument("names", nargs="*", help="beginnings of names of cases")
    wanted = parser.parse_args(arguments)
    if not INTERPRETER.is_dir():
        print("skipped: the kernels' PTX is not run, since there is no shared/tools/ptx_on_cpu beside this folder")
        return 0
    program = _link(wanted.folder.resolve())
    failed = False
    with ThreadPoolExecutor(len(ARCHS)) as pool:
        done = pool.map(lambda arch: _run(program, arch, wanted.names), ARCHS)
        for arch, (status, text) in zip(ARCHS, done, strict=True):
            told = [] if wanted.names else complaints(text)
            lines = re.sub(r"^(ok|ran|never|kernel_check on) .*\n", "", text, flags=re.MULTILINE).splitlines()
            print(*(f"sm_{arch}: {line}" for line in [*lines, *told]), sep="\n", flush=True)
            failed |= status != 0 or bool(told)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
