"""Lists every test and benchmark that bench/gpu_check.sh runs on a GPU, and fails if an op with a
CUDA kernel lacks one.

    python -m bench.collect

An op, named by its stem in csrc/sources.cmake, must have cases for kernel_check
(tests/kernels/cases_<stem>.cpp), a test in tests/gpu that imports mose_fast.ops.<stem>, and
benchmarks on a GPU (bench/bench_<stem>.py). Works without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from build_tools.sources import read_sources

ROOT = Path(__file__).resolve().parent.parent


def parse_ids(text: str) -> list[str]:
    """The test ids in the output of ``pytest --collect-only -q``."""
    return [line.strip() for line in text.splitlines() if re.match(r"\S+\.py::", line)]


def collect(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The ids that pytest collects, and what it printed if collecting failed, else nothing."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return parse_ids(done.stdout), "" if done.returncode == 0 else done.stdout + done.stderr


def missing(root: Path, stems: Iterable[str], tests: Sequence[str], benchmarks: Sequence[str]) -> list[str]:
    """A complaint for each thing that an op with a CUDA kernel lacks; ids of tests are relative to
    ``root``.
    """
    files = {test.split("::")[0] for test in tests}
    texts = {file: (root / file).read_text() for file in sorted(files)}
    complaints = []
    for stem in stems:
        if not (root / "tests" / "kernels" / f"cases_{stem}.cpp").is_file():
            complaints.append(f"{stem}: kernel_check has no cases for it; wanted tests/kernels/cases_{stem}.cpp")
        if not any(
            re.search(rf"\bmose_fast\.ops\.{stem}\b|from mose_fast\.ops import .*\b{stem}\b", text)
            for text in texts.values()
        ):
            complaints.append(f"{stem}: no test in tests/gpu imports mose_fast.ops.{stem}")
        if not any(test.startswith(f"bench/bench_{stem}.py::") and "cuda" in test for test in benchmarks):
            complaints.append(f"{stem}: no benchmark on a GPU; wanted bench/bench_{stem}.py")
    return complaints


def main() -> int:
    """Prints the ids and the complaints; returns the exit status."""
    stems = [Path(name).stem for name in read_sources(ROOT / "csrc")["MOSE_FAST_CUDA_SOURCES"]]
    tests, error_in_tests = collect(["tests/gpu"])
    benchmarks, error_in_benchmarks = collect(["bench", "--devices=cuda"])
    print("\n".join(tests + benchmarks))
    print(f"{len(tests)} tests, {len(benchmarks)} benchmarks; kernel_check runs the cases of {', '.join(stems)}")
    complaints = [error for error in (error_in_tests, error_in_benchmarks) if error] + missing(
        ROOT, stems, tests, benchmarks
    )
    for complaint in complaints:
        print(f"missing: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
